"""Dtype names, and the step from storage to arithmetic and back.

Half types are stored, never computed with: a tile is widened to float32 when it is loaded and narrowed when it is
stored. NumPy has no bfloat16, so a bfloat16 array travels as its raw bits in ``uint16`` and the dtype *name* that
travels beside it says so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

NAMES = ("float16", "bfloat16", "float32", "float64")

# unit roundoff: half the distance from 1 to the next number
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


def compute_dtype(name: str) -> np.dtype[Any]:
    """The dtype of scores, softmax and accumulators for inputs of dtype ``name``."""
    return np.dtype(np.float64 if name == "float64" else np.float32)


def storage_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype that holds values of dtype ``name`` (uint16 bits for bfloat16)."""
    return np.dtype(np.uint16 if name == "bfloat16" else name)


def widen(x: Array, name: str, to: npt.DTypeLike) -> Array:
    """Values of a stored array as ``to``; a view where storage and ``to`` agree."""
    with np.errstate(invalid="ignore"):  # a signalling NaN is data like any other
        if name == "bfloat16":
            return (x.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(to, copy=False)
        return x.astype(to, copy=False)


def narrow(x: Array, name: str) -> Array:
    """Store float values as dtype ``name``, rounding to nearest, ties to even."""
    if name != "bfloat16":
        with np.errstate(over="ignore"):
            return x.astype(name, copy=False)
    bits = _to_float32_odd(x).view(np.uint32)
    rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    nan = np.isnan(x)
    return np.where(nan, np.uint16(0x7FC0), ((bits + rounding) >> np.uint32(16)).astype(np.uint16))


def _to_float32_odd(x: Array) -> Array:
    """float64 to float32 rounded to odd, so that the second rounding to bfloat16 is the only one that counts."""
    if x.dtype != np.float64:
        return x.astype(np.float32, copy=False)
    with np.errstate(over="ignore"):
        near = x.astype(np.float32)
    inexact = near.astype(np.float64) != x
    bits = near.view(np.uint32).copy()
    # step towards zero where rounding went away from zero, then set the sticky bit
    away = inexact & (np.abs(near.astype(np.float64)) > np.abs(x)) & np.isfinite(x)
    bits[away] -= np.uint32(1)
    bits[inexact & np.isfinite(x)] |= np.uint32(1)
    return bits.view(np.float32)
