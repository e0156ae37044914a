"""What a storage dtype does to a number: unit roundoff, underflow floors, and bfloat16 as raw bits.

NumPy has no bfloat16. Arrays of it travel as uint16 raw bits, as in the rest of the package, so nothing here needs
torch or ml_dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# root mean square of a rounding error in units of the unit roundoff, for mantissas spread log-uniformly:
# sqrt(1/3 * 3 / (8 ln 2))
RHO = 0.42466
F32_UNIT = 2.0**-24
# smallest normal float32: kernels may flush below it
F32_TINY = 2.0**-126


@dataclass(frozen=True)
class DType:
    """A storage dtype.

    Attributes:
        name: its name in `Problem` and `Case`.
        storage: NumPy dtype of the array that carries it.
        unit: unit roundoff u, half the distance from 1 to the next number.
        floor: largest absolute error of rounding a number below the normal range.
        compute: unit roundoff of the accumulators that the semantics ask for.
        largest: largest finite value.
    """

    name: str
    storage: str
    unit: float
    floor: float
    compute: float
    largest: float


DTYPES = {
    "float16": DType("float16", "float16", 2.0**-11, 2.0**-25, F32_UNIT, 65504.0),
    # bfloat16 and float32 share an exponent range: what underflows there may be flushed to zero as a whole
    "bfloat16": DType("bfloat16", "uint16", 2.0**-8, F32_TINY, F32_UNIT, 3.3895313892515355e38),
    "float32": DType("float32", "float32", F32_UNIT, F32_TINY, F32_UNIT, 3.4028234663852886e38),
    "float64": DType("float64", "float64", 2.0**-53, 2.0**-1022, 2.0**-53, 1.7976931348623157e308),
}


def encode(values: Array, dtype: str) -> Array:
    """Round real values to the storage form of `dtype`, to nearest, ties to even."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return np.asarray(values).astype(DTYPES[dtype].storage)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, (bits >> 16) | 0x40, rounded >> 16).astype(np.uint16)


def decode(stored: Array, dtype: str) -> Array:
    """The exact float64 values of an array in storage form."""
    if dtype != "bfloat16":
        return np.asarray(stored, np.float64)
    return (np.asarray(stored).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def rounded(values: Array, dtype: str) -> Array:
    """Real values as `dtype` would hold them."""
    return decode(encode(values, dtype), dtype)


def poison_bits(dtype: str) -> Any:
    """A quiet NaN in storage form."""
    return np.uint16(0x7FC1) if dtype == "bfloat16" else np.dtype(DTYPES[dtype].storage).type(np.nan)
