"""Right answers on the device, in float64 and in slices of queries, for calls that are too large to materialise."""

from __future__ import annotations

from typing import Any

import torch

# twice the rounding of one half-precision output plus that of p as an operand of the matrix unit
BOUNDS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def attention(
    q: Any, k: Any, v: Any, *, allowed: Any = None, bias: Any = None, scale: float | None = None
) -> Any:
    """out and lse in float64; ``allowed`` and ``bias`` broadcast to [B, H, M, N]; heads of k are repeated."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    s = (q.double() @ k.transpose(-1, -2)) * (scale or q.shape[-1] ** -0.5)
    if bias is not None:
        s = s + bias.double()
    if allowed is not None:
        s = s.masked_fill(~allowed, -torch.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse.isneginf(), 0, lse)[..., None])
    return p @ v, lse


def causal(m: int, n: int) -> Any:
    """bool [M, N], bottom-right."""
    i, j = torch.arange(m, device="cuda")[:, None], torch.arange(n, device="cuda")
    return j <= i + n - m


def assert_near(got: Any, right: Any, dtype: torch.dtype, what: str = "out") -> None:
    """Finite in the same places, and within the dtype's bound of the largest value."""
    assert torch.equal(torch.isfinite(got), torch.isfinite(right)), f"{what}: not finite in the same places"
    finite = torch.isfinite(right)
    if not finite.any():
        return
    error = (got.double() - right)[finite].abs().max().item()
    size = max(1.0, right[finite].abs().max().item())
    assert error <= BOUNDS[dtype] * size, f"{what}: off by {error:.3g} of {size:.3g}"


def leaves(*tensors: Any) -> list[Any]:
    """Detached copies that want gradients."""
    return [x.detach().clone().requires_grad_() for x in tensors]
