"""Wrong ways to read memory, for the mutants that address it wrongly."""

from __future__ import annotations

import ctypes

import numpy as np

from attnproof.verify.dtypes import Array


def below_boundary(array: Array) -> Array:
    """The same shape and strides, from the 16-byte boundary at or below the array's address."""
    address = array.ctypes.data
    if array.size == 0 or address % 16 == 0:
        return array
    # the arrays of a case have poison in front of them, so this memory exists
    start = np.ctypeslib.as_array((ctypes.c_uint8 * array.itemsize).from_address(address - address % 16))
    return np.lib.stride_tricks.as_strided(start.view(array.dtype), array.shape, array.strides)


def as_if_contiguous(array: Array) -> Array:
    """The same address and shape, with the strides that a contiguous array would have."""
    if array.size == 0 or array.flags.c_contiguous or array.strides[-2] > 1 << 20:
        return array
    steps = np.empty(array.shape, array.dtype).strides
    reach = sum((size - 1) * step for size, step in zip(array.shape, steps, strict=True))
    real = sum((size - 1) * abs(step) for size, step in zip(array.shape, array.strides, strict=True))
    return np.lib.stride_tricks.as_strided(array, array.shape, steps) if reach <= real else array
