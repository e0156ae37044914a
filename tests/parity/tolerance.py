"""How close is close enough: twice the error of an eager computation in the same dtype, plus a rounding band.

Both are measured in units of `size`, the sum of the magnitudes that make up a result, so that a small
value beside large ones is not held to less. The eager error is the largest over the tensor, less what is
lost of operands that are too small for a half, which is allowed where it is lost and nowhere else. The band is
what a single rounding of each step can do to each element (oracle.py counts the steps) and one rounding
of the stored result. Nothing in here is chosen by hand, and a result that is a sum of nothing must be
exactly zero.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from .oracle import EXACT, Halves, Policy, attend
from .problems import Array, Case, draw, representable

ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
# half the distance between the numbers next to zero
UNDERFLOW = {"float16": 2.0**-25, "bfloat16": 2.0**-134, "float32": 2.0**-150, "float64": 2.0**-1075}
GRADIENTS = ("q", "k", "v", "bias", "alibi_slopes", "sink")


class Allowed(NamedTuple):
    """A right value and how far from it a result may be, element by element."""

    value: Array
    tolerance: Array


def same(x: Array) -> Array:
    """No rounding."""
    return x


def exact_policy(dtype: str) -> Policy:
    """float64 is judged by the widest float of the machine, the others by float64."""
    return Policy(np.longdouble if dtype == "float64" else np.float64, same, same)


def eager_policy(dtype: str, half_operands: bool) -> Policy:
    """float32 arithmetic on half inputs; a matrix unit also takes p and dS as halves."""
    compute = np.float64 if dtype == "float64" else np.float32

    def stored(x: Array) -> Array:
        return representable(x, dtype).astype(compute)

    return Policy(compute, stored if half_operands and dtype in ("float16", "bfloat16") else same, stored)


@cache
def expected(case: Case, half_operands: bool = False) -> dict[str, Allowed]:
    """Right value and tolerance of out, lse and every gradient of a case with its own arrays."""
    return judge(case, draw(case), half_operands)


def judge(case: Case, x: dict[str, Array], half_operands: bool = False) -> dict[str, Allowed]:
    """Right value and tolerance of out, lse and every gradient of a case with these arrays."""
    x = completed(case, x)
    compute = "float64" if case.dtype == "float64" else "float32"
    u, stored = ROUNDOFF[compute], ROUNDOFF[case.dtype]
    halved = half_operands and stored > u
    halves = Halves(UNDERFLOW[case.dtype] / stored, UNDERFLOW[case.dtype]) if halved else EXACT
    exact = attend(case, x, exact_policy(case.dtype), u, stored if stored > u else 0, halves)
    eager = attend(case, x, eager_policy(case.dtype, half_operands))
    operands = stored if halved else 0.0
    made = {}
    for name, right in exact.items():
        to = case.dtype_of(name)
        with np.errstate(all="ignore"):
            off = np.maximum(np.abs(eager[name].value - right.value) - right.lost, 0)
            error = np.where(right.size > 0, off / right.size, 0)
        worst = float(np.max(error, initial=0, where=np.isfinite(right.value)))
        stored_error = np.where(right.size > 0, ROUNDOFF[to] * np.abs(right.value) + UNDERFLOW[to], 0)
        tolerance = (
            right.size * (2 * worst + operands)
            + right.band
            + right.lost
            + np.where(np.isfinite(right.value), stored_error, 0)
        )
        made[name] = Allowed(right.value, tolerance)
    return made


def held(case: Case, at: str, x: Array) -> Array:
    """Values as the case's dtypes hold them."""
    if x.dtype == bool:
        return x
    with np.errstate(over="ignore"):
        return representable(x, case.dtype_of(at))


def completed(case: Case, x: dict[str, Array]) -> dict[str, Array]:
    """Arrays as the case's dtypes hold them, with a dout and a dlse where none are given."""
    rng = np.random.default_rng(len(case.name))
    shape = (*x["q"].shape[:-1], x["v"].shape[-1])
    lse = (shape[1], shape[0]) if case.rows == "packed" else shape[:-1]
    made = {"dout": rng.standard_normal(shape), "dlse": rng.standard_normal(lse), **x}
    return {at: held(case, at, part) for at, part in made.items()}


def assert_close(got: Array, allowed: Allowed, what: str) -> None:
    """Every element within its own tolerance; infinities equal, nothing NaN."""
    assert allowed.value.shape == got.shape, what
    finite = np.isfinite(allowed.value)
    assert np.array_equal(allowed.value[~finite], got[~finite]), f"{what}: dead rows differ"
    error = np.zeros_like(allowed.value)
    error[finite] = np.abs(got.astype(error.dtype)[finite] - allowed.value[finite])
    # `not <=` also catches NaN
    bad = ~(error <= allowed.tolerance)
    if bad.any():
        with np.errstate(all="ignore"):
            ratio = np.where(bad, np.nan_to_num(error / allowed.tolerance, nan=np.inf, posinf=np.inf), 0)
        at = np.unravel_index(int(ratio.argmax()), ratio.shape)
        right, found, tolerance = (float(x[at]) for x in (allowed.value, got, allowed.tolerance))
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.size} elements are off; at {tuple(map(int, at))} "
            f"expected {right!r}, got {found!r}, tolerance {tolerance:.3g}"
        )
