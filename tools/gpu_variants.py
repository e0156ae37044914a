"""The calls that are timed on a GPU, variant by variant, and what others offer for the same.

Others are torch's SDPA flash, cuDNN and efficient, FlexAttention, compiled afresh for every shape (after a few shapes
torch.compile would drop it to eager), and FlashAttention 4, where the package flash-attn-4 is installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnproof import masks
from attnproof.problem import Options

WINDOW, CAP, DOCUMENTS, DROPPED = 1024, 30.0, 8, 0.1
HEAVY = ("mask", "bias", "dropout")  # calls that read or draw something for every pair
SDPA_HEAVY = {
    "mask": {"sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION},
    "bias": {"sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION},
    "dropout": {"sdpa_flash": SDPBackend.FLASH_ATTENTION},
}
SDPA = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
Run = Callable[[], Any]
sdpa = torch.nn.functional.scaled_dot_product_attention


def documents(n: int) -> Any:
    """Segment ids of ``DOCUMENTS`` documents of uneven length."""
    cuts = [round(n * (at / DOCUMENTS) ** 1.5) for at in range(DOCUMENTS + 1)]
    return torch.cat([torch.full((b - a,), at) for at, (a, b) in enumerate(pairwise(cuts))])


def slopes(heads: int) -> Any:
    return torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)], device="cuda")


@functools.cache
def allowed(n: int) -> Any:
    """A dense boolean mask [1, 1, N, N] whose tiles are skipped, full and at an edge: causal inside of documents."""
    ids, at = documents(n).cuda(), torch.arange(n, device="cuda")
    return ((ids[:, None] == ids) & (at[:, None] >= at))[None, None]


@functools.cache
def added(n: int) -> Any:
    """A bias [1, 1, N, N] that all batches and heads share."""
    return torch.randn(1, 1, n, n, device="cuda", dtype=torch.bfloat16)


def options(variant: str, heads: int, n: int) -> Options:
    if variant == "full":
        return Options()
    if variant == "window":
        return Options(causal=True, window=(WINDOW - 1, 0))
    if variant == "softcap":
        return Options(causal=True, softcap=CAP)
    if variant == "alibi":
        return Options(causal=True, alibi_slopes=slopes(heads))
    if variant == "document":
        return Options(causal=True, mask=masks.segments(documents(n)))
    if variant == "mask":
        return Options(mask=allowed(n))
    if variant == "bias":
        return Options(bias=added(n))
    if variant == "dropout":
        return Options(causal=True, dropout_p=DROPPED, seed=(1, 0))
    return Options(causal=True)


def pairs(variant: str, n: int) -> int:
    """Allowed pairs of one head."""
    if variant in ("full", "bias"):
        return n * n
    mask = masks.causal()
    if variant == "window":
        mask = mask & masks.window(WINDOW - 1, 0)
    if variant in ("document", "mask"):
        mask = mask & masks.segments(documents(n))
    return mask.pairs(n, n)


def flex(variant: str, q: Any, k: Any, v: Any) -> Run:
    """FlexAttention, compiled for this shape alone."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    n, heads = q.shape[2], q.shape[1]
    slope, ids = slopes(heads), documents(n).cuda()
    dense = allowed(n)[0, 0] if variant == "mask" else None
    bias = added(n)[0, 0] if variant == "bias" else None
    rules = {
        "window": lambda b, h, i, j: (i >= j) & (i - j < WINDOW),
        "document": lambda b, h, i, j: (i >= j) & (ids[i] == ids[j]),
        "mask": lambda b, h, i, j: dense[i, j],
    }
    rule = rules.get(variant, lambda b, h, i, j: i >= j)
    whole = variant in ("full", "bias")
    block = None if whole else create_block_mask(rule, None, None, n, n, device="cuda")
    scores = {
        "softcap": lambda s, b, h, i, j: CAP * torch.tanh(s / CAP),
        "alibi": lambda s, b, h, i, j: s - slope[h] * (i - j),
        "bias": lambda s, b, h, i, j: s + bias[i, j],
    }
    compiled = torch.compile(flex_attention, dynamic=False)
    score = scores.get(variant)
    return lambda: compiled(q, k, v, score_mod=score, block_mask=block)


@dataclass(frozen=True)
class Peer:
    """A call of somebody else's, on tensors laid out as it likes them best."""

    run: Run
    inputs: tuple[Any, ...]
    dout: Any
    heads_last: bool = False  # (B, N, H, D)

    def laid_out(self, out: Any) -> Any:
        """Its output as ours is."""
        return out.transpose(1, 2) if self.heads_last else out

    def backward(self, out: Any) -> Run:
        """Its gradients, again and again."""
        return lambda: torch.autograd.grad(out, self.inputs, self.dout, retain_graph=True)


def peers(variant: str, q: Any, k: Any, v: Any, dout: Any) -> dict[str, Peer]:
    """Those that serve this variant and are installed."""
    found: dict[str, Peer] = {}
    plain = variant in ("full", "causal")
    for name, at in (SDPA if plain else SDPA_HEAVY.get(variant, {})).items():
        given = {
            "is_causal": variant in ("causal", "dropout"),
            "dropout_p": DROPPED if variant == "dropout" else 0.0,
            "attn_mask": {"mask": allowed, "bias": added}[variant](q.shape[2])
            if variant in ("mask", "bias")
            else None,
        }

        def run(at: Any = at, given: Any = given) -> Any:
            with sdpa_kernel(at):
                return sdpa(q, k, v, **given)

        found[name] = Peer(run, (q, k, v), dout)
    if plain and installed("flash-attn-4"):
        from flash_attn.cute import flash_attn_func

        own = tuple(x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v))
        found["fa4"] = Peer(
            lambda: first(flash_attn_func(*own, causal=variant == "causal")),
            own,
            dout.transpose(1, 2).contiguous(),
            heads_last=True,
        )
    if variant != "dropout":
        found["flex"] = Peer(flex(variant, q, k, v), (q, k, v), dout)
    return found


def first(found: Any) -> Any:
    """An output that may come with its lse."""
    return found[0] if isinstance(found, tuple) else found


def installed(distribution: str) -> bool:
    """Whether a package from PyPI is here."""
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False
