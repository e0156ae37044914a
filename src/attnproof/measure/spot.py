r"""A verdict for a timed call: some of its rows against float64, by the worst-case bound of the error model.

Timed shapes are too large for a full oracle, so rows are sampled, each over all of its keys. The bound per element is

.. math::

    |e| \le 1.02\,u\,(|O| + \textstyle\sum_j p_j |v_j|) + 2^{-20} \sum_j p_j (1 + |s_j|) |v_j|

with u the unit roundoff of the storage dtype (derivation: docs/05). It holds for every kernel that keeps scores, sums
and accumulator in float32; float32 storage adds nothing to it but its own u.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..dtypes import ROUNDOFF

ROWS = 32


@dataclass(frozen=True)
class Spot:
    """What the sampled rows say. ``used`` is the largest error over its bound: green up to 1."""

    green: bool
    used: float
    max_abs: float
    rms: float
    rows: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return asdict(self)


def judge_rows(
    q: Any, k: Any, v: Any, out: Any, *, mask: Any, scale: float, dtype: str, seed: int = 0
) -> Spot:
    """Judge ``ROWS`` random rows of out [B, H, M, D] (torch, any device) against float64."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    B, H, M, _ = q.shape
    n, group = k.shape[2], H // k.shape[1]
    # always the last row, which has the most keys under a causal mask
    rows = torch.cat([torch.randint(0, M, (ROWS - 1,), generator=generator), torch.tensor([M - 1])])
    b, h = (torch.randint(0, size, (ROWS,), generator=generator) for size in (B, H))
    lo, hi = (torch.as_tensor(x)[rows].to(q.device) for x in mask.bounds(M, n))
    wide = torch.float64
    keys, values = (x[b, h // group].to(wide) for x in (k, v))  # [R, N, D]
    s = scale * torch.einsum("rd,rnd->rn", q[b, h, rows].to(wide), keys)
    j = torch.arange(n, device=q.device)
    s = s.masked_fill((j < lo[:, None]) | (j >= hi[:, None]), -torch.inf)
    p = torch.nan_to_num(torch.softmax(s, dim=1))
    expected = torch.einsum("rn,rnd->rd", p, values)
    magnitude = torch.einsum("rn,rnd->rd", p, values.abs())
    finite = torch.where(torch.isinf(s), torch.zeros_like(s), s).abs()
    logits = torch.einsum("rn,rnd->rd", p * (1 + finite), values.abs())
    bound = 1.02 * ROUNDOFF[dtype] * (expected.abs() + magnitude) + 2.0**-20 * logits
    error = (out[b, h, rows].to(wide) - expected).abs()
    # a bound of 0 is a row without keys: its output must be exactly 0
    used = torch.where(bound > 0, error / bound, torch.where(error > 0, torch.inf, 0.0)).max().item()
    green = bool(torch.isfinite(error).all().item()) and used <= 1
    return Spot(green, used, error.max().item(), error.square().mean().sqrt().item(), ROWS)
