"""The error model: how far a correct kernel of a given kind may be from the exact answer.

A rounding to unit roundoff u of a number that is nothing special has a relative error of root mean square rho * u.
Per output element the independent roundings add up to a variance, the judge divides each error by its square root, and
the result z is about 1 in root mean square for a correct kernel whatever the length, the mask or the scale of the
values. A fixed absolute tolerance cannot do that: outputs shrink with the number of keys, so it grows lax where long
sequences need it most.

A kernel declares the class that describes it; one that declares nothing must meet `flash`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, prod, sqrt
from typing import Any

import numpy as np

from attnproof.verify.dtypes import DTYPES, F32_UNIT, RHO, Array
from attnproof.verify.oracle import Terms


@dataclass(frozen=True)
class Numerics:
    """What a kernel rounds on the way.

    Attributes:
        name: flash, precise, split, eager, or the user's own word.
        operand: how often P (and dS) are rounded to the input dtype before a product: 1, or 0 where they stay in fp32.
        split: how often P is written as a sum of two numbers of the input dtype, which is off by the square of its unit.
        scores: how often the logits are rounded to the input dtype.
        eta_exp: declared relative error of the exponential, beyond fp32 rounding.
        slack: factor on the statistical limits, 1 unless declared.
        row: further factor on the limit of a single row. Eager kernels round sums of logits whose common part is
            large, which moves a whole row together.
        floor: factor on what underflow does, for kernels that store more than P and dS in the input dtype.
    """

    name: str
    operand: float = 1.0
    split: float = 0.0
    scores: float = 0.0
    eta_exp: float = 0.0
    slack: float = 1.0
    row: float = 1.0
    floor: float = 1.0


CLASSES = {
    "flash": Numerics("flash"),
    "precise": Numerics("precise", operand=0.0),
    "split": Numerics("split", operand=0.0, split=1.0),
    "eager": Numerics("eager", operand=2.0, scores=2.0, slack=1.4, row=2.0, floor=10.0),
}


def of_backend(backend: Any) -> str:
    """The class of one of our backends: what it declares, or says of the machine it is on."""
    if hasattr(backend, "numerics"):
        return str(backend.numerics())
    return str(getattr(backend, "NUMERICS", "precise"))


def numerics(declared: str | Numerics | dict[str, Any]) -> Numerics:
    """A class by name, by object, or by a dict of the fields of `Numerics`.

    Raises:
        ValueError: the name is unknown.
    """
    if isinstance(declared, Numerics):
        return declared
    if isinstance(declared, dict):
        fields: dict[str, Any] = {"name": "custom", **declared}
        return Numerics(**fields)
    if declared not in CLASSES:
        raise ValueError(f"numerics: expected one of {', '.join(CLASSES)}, got {declared!r}")
    return CLASSES[declared]


def variance(terms: Terms, dtype: str, kind: Numerics, stored: str | None = None) -> Array:
    """Expected squared error per element; `stored` is the dtype of this tensor when it is not that of q."""
    u, out = DTYPES[dtype].unit, DTYPES[stored or dtype].unit
    rounding = (RHO * out) ** 2 * terms.value**2
    weights = (kind.operand + kind.split * u**2) * terms.operand
    noise = (RHO * u) ** 2 * (weights + terms.delta + kind.scores * terms.scores)
    drift = (3 * F32_UNIT * terms.slop) ** 2 + (kind.eta_exp * terms.linear) ** 2
    return rounding + noise + drift + kind.floor**2 * terms.floor


def hard_bound(terms: Terms, dtype: str, kind: Numerics, stored: str | None = None) -> Any:
    """Worst case per element: no correct kernel of the class is further away, however its roundings conspire.

    Terms are arrays of NumPy or tensors of torch on any device, and so is the bound.
    """
    info = DTYPES[dtype]
    out = DTYPES[stored or dtype].unit
    scores = kind.scores * info.unit * terms.slop if kind.scores else 0.0
    weights = (kind.operand + kind.split * info.unit) * terms.linear
    worst = 1.02 * (out * abs(terms.value) + info.unit * (weights + terms.reach)) + scores
    return (
        worst
        + 16 * info.compute * terms.slop
        + kind.eta_exp * terms.linear
        + 4 * kind.floor * terms.floor**0.5
    )


def lse_bound(lse: Array, slop: Array, dtype: str, kind: Numerics) -> Array:
    """Largest error of an lse in the accumulator's precision; eager kernels lose the precision of their logits."""
    unit = DTYPES[dtype].compute
    lost = 2 * kind.scores * DTYPES[dtype].unit * slop
    return 8 * unit * (slop + np.abs(np.where(np.isfinite(lse), lse, 0.0))) + kind.eta_exp + lost


@dataclass(frozen=True)
class Limits:
    """The statistical limits of one tensor of n elements."""

    z_rms: float
    z_max: float
    bias: float


def limits(kind: Numerics, tensor: str, n: int) -> Limits:
    """Limits on z that correct kernels keep and that grow only with the number of samples.

    The last term of `z_rms` is what chance adds for few elements: the root mean square of n samples scatters by
    1/sqrt(2n).
    """
    gradient = tensor != "out"
    base = 1.3 if gradient else 1.25
    spread = 9.0 if gradient else 1.15 * sqrt(2 * log(max(n, 2))) + 2.0
    return Limits(
        z_rms=kind.slack * (base + 3 / sqrt(2 * max(n, 1))),
        z_max=kind.slack * spread,
        bias=6.0 + 0.02 * sqrt(n),
    )


def row_limits(kind: Numerics, tensor: str, counts: Array) -> Array:
    """Limit on the root mean square z of each row of `counts` elements, out of as many rows.

    The rounding of `out` moves a whole row of a gradient together through rowsum(dout * out), so that a row's z is
    one sample there and not an average: 4 is its limit.
    """
    chance = 3 * sqrt(2 * log(max(counts.size, 2))) / np.sqrt(2.0 * np.maximum(counts, 1))
    limit = 1.15 + chance
    return kind.slack * kind.row * (limit if tensor == "out" else np.maximum(limit, 4.0))


# float32 and float64: errors come from the order of a sum and from exp, which no model of independent roundings fits.
# The root mean square error is compared with what the logits' own noise allows, and with a plain float32 evaluation.
SINGLE_SLOP = 2.0
SINGLE_CONTROL = 4.0


def single_chance(tensor: str, shape: tuple[int, ...]) -> float:
    """What chance adds to a root mean square error in fp32 and fp64.

    The error of a weight is shared by all elements of a row, so the samples are the rows, and a case of few rows scatters:
    with one query and one key the gradient of v is wrong by one number.
    """
    rows = shape[:-1] if tensor in ("out", "dq", "dk", "dv") else shape
    return 1 + 3 / sqrt(2 * max(prod(rows), 1))
