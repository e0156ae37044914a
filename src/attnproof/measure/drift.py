r"""Does the error grow with length? z against N, a decode shape with few queries and up to a million keys.

z is the error over the standard deviation that rounding alone explains (docs/05):
:math:`\sigma^2 = (\rho u)^2 (O^2 + \sum_j p_j^2 v_j^2)` for a kernel with float32 scores and sums, :math:`\rho = 0.425`.
A correct kernel keeps z near 1 at every N; one that accumulates in half precision grows like :math:`\sqrt N`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ..dtypes import ROUNDOFF
from .stats import Interval, fit_exponent

RHO = 0.425  # RMS of one rounding of a log-uniform number, in units of u
ROWS = 16
CHUNK = 2**16

Attend = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class Point:
    """Error of one implementation at one length."""

    name: str
    dtype: str
    n: int
    z_rms: float
    rms: float
    bias: float  # mean of z with the sign of the output, times sqrt(count): a few at most when unbiased

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return asdict(self)


def point(
    name: str, attend: Attend, n: int, *, dtype: str, device: str, d: int = 64, seeds: int = 1
) -> Point:
    """Judge ``attend(q, k, v)`` on [1, 1, ROWS, d] queries and n keys, all normal, over ``seeds`` draws."""
    import torch

    kind, u = getattr(torch, dtype), ROUNDOFF[dtype]
    errors: list[Any] = []
    scores: list[Any] = []
    signs: list[Any] = []
    for seed in range(seeds):
        generator = torch.Generator(device).manual_seed(seed)
        q, k, v = (
            torch.randn(1, 1, rows, d, generator=generator, device=device).to(kind) for rows in (ROWS, n, n)
        )
        with torch.no_grad():
            out = attend(q, k, v)[0, 0].to(torch.float64)
        expected, spread = _expected(q[0, 0], k[0, 0], v[0, 0])
        errors.append(out - expected)
        scores.append(errors[-1] / (RHO * u * torch.sqrt(expected.square() + spread)))
        signs.append(expected.sign())
    error, z, sign = (torch.cat(parts) for parts in (errors, scores, signs))
    bias = (z * sign).mean().item() * z.numel() ** 0.5
    return Point(name, dtype, n, z.square().mean().sqrt().item(), error.square().mean().sqrt().item(), bias)


def band(seeds: int, d: int = 64) -> float:
    """Upper end of what z may be at any length: the limit of ``attnproof verify`` for as many elements."""
    from ..verify.numerics import limits, numerics

    return limits(numerics("flash"), "out", seeds * ROWS * d).z_rms


def _expected(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Output and sum of p^2 v^2 in float64, keys in chunks."""
    import torch

    q = q.to(torch.float64)
    s = torch.cat([q @ k[at : at + CHUNK].to(torch.float64).T for at in range(0, len(k), CHUNK)], dim=1)
    p = torch.softmax(s * q.shape[1] ** -0.5, dim=1)
    out = torch.zeros(len(q), v.shape[1], dtype=torch.float64, device=q.device)
    spread = torch.zeros_like(out)
    for at in range(0, len(k), CHUNK):
        part, values = p[:, at : at + CHUNK], v[at : at + CHUNK].to(torch.float64)
        out += part @ values
        spread += part.square() @ values.square()
    return out, spread


def half_accumulator(q: Any, k: Any, v: Any, *, tile: int = 64) -> Any:
    """The mutant shown beside real kernels: online softmax whose sum and accumulator are rounded to the input dtype."""
    import torch

    kind, wide = q.dtype, torch.float32
    m = torch.full(q.shape[:-1], -torch.inf, device=q.device)
    total = torch.zeros(q.shape[:-1], device=q.device, dtype=kind)
    acc = torch.zeros(*q.shape[:-1], v.shape[-1], device=q.device, dtype=kind)
    for at in range(0, k.shape[2], tile):
        s = q.to(wide) @ k[:, :, at : at + tile].to(wide).transpose(-1, -2) * q.shape[-1] ** -0.5
        m_new = torch.maximum(m, s.amax(-1))
        p, alpha = torch.exp(s - m_new[..., None]), torch.exp(m - m_new)
        total = (alpha * total + p.sum(-1)).to(kind)
        acc = (alpha[..., None] * acc + p @ v[:, :, at : at + tile].to(wide)).to(kind)
        m = m_new
    return (acc.to(wide) / total[..., None].to(wide)).to(kind)


def slope(points: Iterable[Point]) -> Interval:
    """d log z_rms / d log N with its 95% interval: 0 is flat, 0.5 a low-precision accumulator."""
    chosen = list(points)
    return fit_exponent([p.n for p in chosen], [p.z_rms for p in chosen])
