"""torch's FlexAttention: score and mask functions compiled into one kernel.

On a GPU it is compiled freshly for each shape, because after a few shapes torch.compile falls back to eager without a
word. On a CPU the uncompiled form runs, which materialises the scores in fp32.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from attnproof.cases import UNBOUNDED, Case
from attnproof.verify.candidate import Candidate, Outputs, Skip, Traits, wrap
from attnproof.verify.inputs import Inputs


def build(device: str | None = None) -> Candidate:
    """FlexAttention on `device`, the GPU where there is one."""
    try:
        import torch
        from torch.nn.attention import flex_attention  # noqa: F401  # pyright: ignore[reportUnusedImport]  its absence is the refusal
    except ImportError as error:
        raise Skip(f"FlexAttention needs a newer torch: {error}") from None
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    backward = "FlexAttention has none on the CPU" if device == "cpu" else ""
    traits = Traits(limits=_limits, dtypes=("float16", "bfloat16", "float32"), backward=backward)
    candidate = wrap("torch:flex", _flex, traits, device=device)
    return replace(candidate, call=_refusing(candidate.call))


def _refusing(call: Callable[[Inputs], Outputs]) -> Callable[[Inputs], Outputs]:
    """The compiler wraps what FlexAttention says it does not do; both passes are compiled inside the call."""

    def run(inputs: Inputs) -> Outputs:
        try:
            return call(inputs)
        except Exception as error:
            for line in str(error).splitlines():
                _, refused, said = line.partition("NotImplementedError: ")
                if refused or "NYI" in line:
                    raise Skip(said or line[line.index("NYI") :]) from None
            raise

    return run


def _limits(case: Case) -> str | None:
    if 0 in (case.B, case.H, case.M, case.N, case.D):
        return "no zero sizes"
    return None


_last: dict[tuple[Any, ...], Any] = {}  # what was compiled last


def _compiled(*structure: Any) -> Any:
    """FlexAttention compiled for calls of one structure alone; the same structure again compiles nothing."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    if structure not in _last:
        torch._dynamo.reset()
        _last.clear()
        # the whole graph or an error: never eager without a word
        _last[structure] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return _last[structure]


def _flex(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool,
    scale: float,
    mask: Any = None,
    bias: Any = None,
    window: tuple[int, int] | None = None,
    alibi_slopes: Any = None,
    softcap: float | None = None,
    align: str = "bottom_right",
) -> Any:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    (B, H, M, _), N = q.shape, k.shape[2]
    shift = N - M
    full = (B, H, M, N)
    bias = None if bias is None else bias.expand(full)
    mask = None if mask is None else mask.expand(full)
    left, right = (-1, -1) if window is None else window

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if alibi_slopes is not None:
            score = score - alibi_slopes[b, h] * (i + shift - j).abs()
        return score if bias is None else score + bias[b, h, i, j]

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = j >= 0
        if causal:
            seen = seen & (j <= (i if align == "top_left" else i + shift))
        if left != UNBOUNDED:
            seen = seen & (j >= i + shift - left)
        if right != UNBOUNDED:
            seen = seen & (j <= i + shift + right)
        return seen if mask is None else seen & mask[b, h, i, j]

    plain = not (softcap or alibi_slopes is not None or bias is not None)
    unmasked = not causal and window is None and mask is None
    block = None if unmasked else create_block_mask(mask_mod, B, H, M, N, device=q.device)
    run = flex_attention
    if q.device.type != "cpu":
        run = _compiled(
            *(tuple((part.shape, part.stride(), part.dtype, part.requires_grad) for part in (q, k, v))),
            *(
                tuple(
                    None if part is None else (part.stride(), part.dtype)
                    for part in (mask, bias, alibi_slopes)
                )
            ),
            (causal, scale, window, softcap, align),
        )
    with warnings.catch_warnings():
        # the uncompiled form says that it is slow; on a CPU it is what there is
        warnings.simplefilter("ignore")
        return run(
            q,
            k,
            v,
            score_mod=None if plain else score_mod,
            block_mask=block,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_lse=True,
        )
