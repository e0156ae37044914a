from __future__ import annotations

import numpy as np
import pytest

from attnproof.dtypes import NAMES, compute_dtype, narrow, storage_dtype, widen

ml_dtypes = pytest.importorskip("ml_dtypes")

SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    np.inf,
    -np.inf,
    3.3895313892515355e38,
    3.4e38,
    1e300,
    -1e300,
    1e-40,
    5e-46,
    -1e-60,
    65504,
    65520,
]


def numbers(dtype: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    made = [*SPECIAL, *(rng.standard_normal(2000) * 10.0 ** rng.integers(-44, 38, 2000))]
    # exact ties between neighbouring bfloat16 values, and their neighbours
    ties = (1 + (2 * np.arange(64) + 1) / 256).tolist()
    with np.errstate(over="ignore"):
        return np.array(
            made + ties + [np.nextafter(x, 9) for x in ties] + [np.nextafter(x, 0) for x in ties]
        ).astype(dtype)


def test_every_bfloat16_survives_the_way_there_and_back() -> None:
    bits = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    wide = widen(bits, "bfloat16", np.float32)
    assert np.array_equal(bits.view(ml_dtypes.bfloat16).astype(np.float32), wide, equal_nan=True)
    back = narrow(wide, "bfloat16")
    real = ~np.isnan(wide)
    assert bits[real].tolist() == back[real].tolist()
    assert np.isnan(widen(back[~real], "bfloat16", np.float32)).all()


def test_float32_becomes_the_nearest_bfloat16() -> None:
    x = numbers("float32")
    assert x.astype(ml_dtypes.bfloat16).view(np.uint16).tolist() == narrow(x, "bfloat16").tolist()


def test_float64_becomes_the_nearest_bfloat16_in_one_rounding() -> None:
    """Rounding to float32 first would move ties: 1 + 2^-8 + 2^-40 is nearer to 1 + 2^-7, by the last bit only."""
    x = numbers("float64")
    wide = widen(narrow(x, "bfloat16"), "bfloat16", np.float64)
    grid = np.sort(
        np.unique(widen(np.arange(2**16, dtype=np.uint32).astype(np.uint16), "bfloat16", np.float64))
    )
    grid = grid[np.isfinite(grid)]
    for value, got in zip(x.tolist(), wide.tolist(), strict=True):
        if abs(value) > 3.3961775292304957e38:  # halfway between the largest bfloat16 and 2^128
            assert np.copysign(np.inf, value) == got
        else:
            at = np.searchsorted(grid, value)
            near = grid[max(at - 1, 0) : at + 1]
            assert abs(got - value) == np.abs(near - value).min()
    assert 1 + 2.0**-7 == wide_of(1 + 2.0**-8 + 2.0**-40)
    assert 1.0 == wide_of(1 + 2.0**-8)


def wide_of(x: float) -> float:
    return float(widen(narrow(np.array([x]), "bfloat16"), "bfloat16", np.float64)[0])


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_other_dtypes_round_as_numpy_does(name: str) -> None:
    x = numbers("float64")
    with np.errstate(over="ignore"):
        right = x.astype(name)
    assert np.array_equal(right, narrow(x, name))


def test_what_already_fits_is_not_copied() -> None:
    x = np.zeros(3, np.float32)
    assert np.shares_memory(x, widen(x, "float32", np.float32))
    assert np.shares_memory(x, narrow(x, "float32"))


def test_arithmetic_is_single_precision_unless_the_input_is_double() -> None:
    assert ["float32", "float32", "float32", "float64"] == [compute_dtype(name).name for name in NAMES]
    assert ["float16", "uint16", "float32", "float64"] == [storage_dtype(name).name for name in NAMES]
