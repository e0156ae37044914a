"""torch's scaled_dot_product_attention, one candidate per backend, and the plain eager form.

Each says what its documentation says: causal masks are aligned top left, `is_causal` together with a mask is an error,
and there is no window, ALiBi, softcap or sink. Gradients come from autograd. The lse comes from the operator that the
public function dispatches to, where that operator returns one.
"""

from __future__ import annotations

import warnings
from typing import Any

from attnproof.cases import Case
from attnproof.verify.candidate import Candidate, Skip, Traits, wrap

BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}
REFUSALS = (
    "No available kernel",
    "no viable backend",
    "not supported",
    "does not support",
    "No viable backend",
)


def build(name: str, device: str | None = None) -> Candidate:
    """`flash`, `efficient`, `cudnn`, `math`, or `eager` for unfused torch."""
    try:
        import torch
    except ImportError:
        raise Skip("torch is not installed") from None
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "eager":
        return wrap("torch:eager", _eager, Traits(numerics="eager", limits=_eager_limits), device=device)
    if name not in BACKENDS:
        raise Skip(f"sdpa has {', '.join(BACKENDS)}; got {name}")
    if device == "cpu" and name in ("efficient", "cudnn"):
        raise Skip("torch has this backend on GPUs only")
    traits = Traits(
        numerics="precise" if name == "math" else "flash",
        align="top_left",
        limits=_limits,
        # the fused backward passes of GPUs add with atomics, and torch documents that
        deterministic=name == "math" or device == "cpu",
    )
    return wrap(f"sdpa:{name}", _Sdpa(name, device), traits, device=device)


def names() -> tuple[str, ...]:
    """The backends that exist on this machine."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        return ()
    import torch

    return ("flash", "math") if not torch.cuda.is_available() else ("flash", "cudnn", "efficient", "math")


def _limits(case: Case) -> str | None:
    if case.causal and (case.keep or case.bias):
        return "documents is_causal together with attn_mask as an error"
    if case.keep and case.bias:
        return "takes one attn_mask, boolean or additive"
    return None


def _eager_limits(case: Case) -> str | None:
    if case.dtype == "float16" and case.generator in ("large_v", "large_all", "abyss", "fp16_range"):
        return "float16 logits or gradients overflow, as they do in any eager kernel"
    return None


class _Sdpa:
    """The public function with one backend forced, and the lse of the operator behind it."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, device

    def __call__(
        self, q: Any, k: Any, v: Any, *, causal: bool, scale: float, mask: Any = None, bias: Any = None
    ) -> Any:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        attn_mask = mask if bias is None else bias
        if attn_mask is not None and self.device != "cpu":
            attn_mask = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        try:
            with sdpa_kernel(getattr(SDPBackend, BACKENDS[self.name])), warnings.catch_warnings():
                # a forced backend that refuses warns why and then raises; the error is what we report
                warnings.simplefilter("ignore")
                out = scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    attn_mask=attn_mask,
                    is_causal=causal,
                    scale=scale,
                    enable_gqa=q.shape[1] != k.shape[1],
                )
        except RuntimeError as error:
            if any(sentence in str(error) for sentence in REFUSALS):
                raise Skip(str(error).splitlines()[0]) from None
            raise
        lse = self.lse(q, k, v, causal, scale, attn_mask)
        return out if lse is None else (out, lse)

    def lse(self, q: Any, k: Any, v: Any, causal: bool, scale: float, attn_mask: Any) -> Any:
        import torch

        if self.name != "flash" or 0 in (*q.shape, *k.shape):
            return None
        group = q.shape[1] // k.shape[1]
        with torch.no_grad():
            k, v = (part.repeat_interleave(group, 1) for part in (k, v))
            if self.device != "cpu":
                if attn_mask is not None or q.shape[-1] != v.shape[-1]:
                    return None
                # the public function pads head dims to what the operator takes; zeros leave the logits alone
                q, k, v = (torch.nn.functional.pad(part, (0, -part.shape[-1] % 8)) for part in (q, k, v))
                return torch.ops.aten._scaled_dot_product_flash_attention(
                    q, k, v, 0.0, causal, False, scale=scale
                )[1]
            if attn_mask is not None and attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros(attn_mask.shape, dtype=q.dtype).masked_fill(~attn_mask, float("-inf"))
            if q.shape[-1] != v.shape[-1]:
                return None
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, attn_mask=attn_mask, scale=scale
            )[1]


def _eager(q: Any, k: Any, v: Any, *, causal: bool, scale: float, mask: Any = None, bias: Any = None) -> Any:
    """The materialised form in the dtype of q: what a model without a fused kernel computes."""
    import torch

    group = q.shape[1] // max(k.shape[1], 1)
    k, v = (part.repeat_interleave(group, 1) if group > 1 else part for part in (k, v))
    s = (q @ k.transpose(-1, -2)) * scale
    if bias is not None:
        s = s + bias.to(s.dtype)
    seen = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device)
    if causal:
        seen = seen.tril(s.shape[-1] - s.shape[-2])
    if mask is not None:
        seen = seen & mask
    s = s.masked_fill(~seen, float("-inf"))
    dead = torch.isneginf(s).all(-1, keepdim=True)
    return torch.softmax(s.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0) @ v
