"""Large, small and impossible numbers: what has gone wrong elsewhere, and the right value here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .checking import case_of, check
from .direct import Attend, drawn
from .problems import Array
from .targets import Target, every_target, values
from .tolerance import assert_close, judge

DTYPES = ("float16", "bfloat16", "float32", "float64")


def arrays(m: int, n: int, **more: int) -> dict[str, Array]:
    return dict(zip("qkv", drawn(m, n, **more), strict=True))


@every_target
@pytest.mark.parametrize("length", [1, 8, 200])
def test_large_equal_inputs_give_themselves(target: Target, length: int) -> None:
    """s * c - max * c rounded apart and overflowed: pytorch#121558. The logits are 1.4e11 here."""
    x = np.full((1, 1, length, 64), 133120.0)
    got = Attend(target, "bfloat16")(x, x, x)
    assert {133120.0} == set(got.out.ravel().tolist())


@every_target
def test_products_past_the_range_of_half_are_held_in_single(target: Target) -> None:
    """QK is 5.76e6, 88 times the largest float16: llama.cpp#7805, #6646."""
    k = np.full((1, 1, 8, 64), 300.0)
    k[:, :, 1::2] = -300.0
    x = {"q": np.full((1, 1, 8, 64), 300.0), "k": k, "v": drawn(8, 8, H=1, D=64)[2]}
    check(target, case_of("large products", x, "float16"), x)
    got = Attend(target, "float16")(x["q"], x["k"], x["v"])
    # 5.76e6 / sqrt(64): the even keys take everything, in equal parts, and the mean of four such numbers is exact
    assert x["v"][0, 0, ::2].mean(axis=0).tolist() == got.out[0, 0, 0].tolist()


@every_target
def test_a_sum_past_the_range_of_half_is_held_in_single(target: Target) -> None:
    """4096 keys of value 6e4 add up to 2.5e8 before the division: llama.cpp#7805."""
    q, k, _ = drawn(2, 4096, H=1, D=8)
    got = Attend(target, "float16")(q, k, np.full((1, 1, 4096, 8), 6e4))
    assert {6e4} == set(got.out.ravel().tolist())


@every_target
@pytest.mark.parametrize("length", [1024, 8192, 65536])
def test_the_error_does_not_grow_with_length(target: Target, length: int) -> None:
    """An accumulator in bfloat16 loses a third of the sum at 64k: ring-flash-attention#22, flash-attention#2151."""
    if not target.fast and length > 8192:
        length = 16384
    rng = np.random.default_rng(length)
    q, k = rng.standard_normal((1, 1, 4, 32)), rng.standard_normal((1, 1, length, 32))
    v = rng.standard_normal((1, 1, length, 32)) + 1
    q, k, v = (Attend(target, "bfloat16").native(x) for x in (q, k, v))
    wide = [values(x) for x in (q, k, v)]
    out, _ = Attend(target, "bfloat16").raw(q, k, v)
    p = np.exp(wide[0] @ wide[1].swapaxes(2, 3) / np.sqrt(32))
    right = p @ wide[2] / p.sum(axis=3, keepdims=True)
    ulp = 2.0 ** (np.floor(np.log2(np.abs(right))) - 7)
    # one rounding of the result is half an ulp, and of the operands of a matrix unit another half
    assert float((np.abs(values(out) - right) / ulp).max()) <= 2


@every_target
def test_single_precision_is_ieee_single_precision(target: Target) -> None:
    """Fast modes of tensor cores keep ten bits; the gradient was off by 0.7 elsewhere: triton#1821."""
    x = arrays(128, 128, D=32, seed=3)
    check(target, case_of("IEEE", x, causal=True), x)


# the running maximum and everything below it


@every_target
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("keys", [3, 300])
def test_logits_far_below_any_filler_are_exact(target: Target, dtype: str, keys: int) -> None:
    """A finite stand-in for -inf, -1e30 say, would be taken for a key here and win against the real ones.

    The logits are -k 2^102, about -5e30 k, and exact; all but the largest have no weight at all.
    """
    n = keys
    k = (1 + np.arange(n)[::-1]).reshape(1, 1, n, 1) * 2.0**52
    q = np.array([-(2.0**50), -(2.0**40)]).reshape(1, 1, 2, 1)
    v = np.arange(4.0 * n).reshape(1, 1, n, 4)
    keep = np.ones((2, n), bool)
    keep[:, 0] = False
    attend = Attend(target, dtype)
    for options in ({}, {"mask": keep}, {"causal": True, "window": (-1, -1)}):
        got = attend(q, k, v, scale=1.0, **options)
        last = [n - 2 if options.get("causal") else n - 1, n - 1]
        assert [v[0, 0, at].tolist() for at in last] == got.out[0, 0].tolist()
        assert [float(q[0, 0, row, 0] * k[0, 0, at, 0]) for row, at in enumerate(last)] == got.lse[
            0, 0
        ].tolist()


@every_target
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_masked_tile_before_very_low_logits_leaves_them_alone(target: Target, dtype: str) -> None:
    """A row at -60000 after two whole masked tiles: below the filler that half kernels like to use."""
    x = arrays(3, 300, H=1, D=8, seed=1)
    keep = np.ones((3, 300), bool)
    keep[:, :268] = False
    keep[1] = False
    low = np.full((1, 300), -60000.0)
    masked = x | {"keep": keep, "bias": low}
    check(target, case_of(f"near -60000 in {dtype}", masked, dtype), masked)
    attend = Attend(target, dtype)
    # all logits equal: exactly the mean of the 32 keys that are left, and nothing in the dead row
    got = attend(x["q"] * 0, x["k"], np.ones_like(x["v"]), bias=low, mask=keep)
    assert [1.0, 0.0, 1.0] == got.out[0, 0, :, 0].tolist()
    stored = float(values(attend.native(low))[0, 0])
    assert np.isneginf(got.lse[0, 0, 1])
    assert np.float32(stored + np.log(32)) == np.float32(got.lse[0, 0, 0])


@every_target
def test_a_tile_of_minus_infinity_is_not_a_tile_of_the_lowest_number(target: Target) -> None:
    """The trap for a filler: any finite one, however low, gives a dead row a value and an lse."""
    x = arrays(4, 256, H=1, D=8, seed=2)
    attend = Attend(target)
    qkv = [x[at] for at in "qkv"]
    for low in (-1e4, -1e9, -1e30, float(np.finfo(np.float32).min)):
        alive = attend(x["q"] * 0, x["k"], x["v"], bias=np.full((4, 256), low))
        # a row at the lowest number is alive: an average, exact for 256 keys, with an lse near that number
        assert np.isfinite(alive.lse).all()
        assert x["v"][0, 0].mean(axis=0).tolist() == alive.out[0, 0, 0].tolist()
    for options in (
        {"bias": np.full((4, 256), -np.inf)},
        {"mask": np.zeros((4, 256), bool)},
        {"mask": np.zeros((4, 256), bool), "bias": np.full((4, 256), 7.0)},
    ):
        dead = attend(*qkv, **options)
        assert {0.0} == set(dead.out.ravel().tolist())
        assert {-np.inf} == set(dead.lse.ravel().tolist())


@every_target
def test_weights_below_the_smallest_number_vanish_without_a_trace(target: Target) -> None:
    x = arrays(2, 260, H=1, D=8)
    bias = np.zeros((1, 260))
    bias[0, :130] = -500.0
    got = Attend(target)(x["q"], x["k"], x["v"], bias=bias)
    seen = {"q": x["q"], "k": x["k"][:, :, 130:], "v": x["v"][:, :, 130:]}
    right = judge(case_of("keys at zero", seen), seen)
    assert_close(got.out, right["out"], "out")
    assert_close(got.lse, right["lse"], "lse")


# NaN and infinity stay in their rows


def poisoned_rows(clean: Any, got: Any) -> list[int]:
    """Rows of out that are not finite; the others must be the clean ones, bit for bit, and lse must agree."""
    bad = ~np.isfinite(got.out[0, 0]).all(axis=1)
    assert clean.out[0, 0][~bad].tolist() == got.out[0, 0][~bad].tolist()
    assert clean.lse[0, 0][~bad].tolist() == got.lse[0, 0][~bad].tolist()
    assert np.isnan(got.out[0, 0][bad]).all()
    assert not np.isfinite(got.lse[0, 0][bad]).any()
    assert not np.isneginf(got.lse[0, 0][bad]).any()
    return np.flatnonzero(bad).tolist()


@every_target
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_a_query_reaches_its_own_row(target: Target, dtype: str) -> None:
    """A maximum that skips NaN would turn it into a plausible zero."""
    x = arrays(70, 150, H=1, D=8)
    attend = Attend(target, dtype)
    clean = attend(x["q"], x["k"], x["v"], causal=True)
    x["q"][0, 0, 33, 5] = np.nan
    assert [33] == poisoned_rows(clean, attend(x["q"], x["k"], x["v"], causal=True))


@every_target
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinity_in_a_bias_reach_their_own_row(target: Target, value: float) -> None:
    x = arrays(70, 150, H=1, D=8)
    bias = np.zeros((70, 150))
    attend = Attend(target)
    clean = attend(x["q"], x["k"], x["v"], causal=True, bias=bias)
    bias[12, 3] = bias[68, 140] = bias[2, 149] = value  # the last one is masked, and does not count
    assert [12, 68] == poisoned_rows(clean, attend(x["q"], x["k"], x["v"], causal=True, bias=bias))


@every_target
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_masked_entry_may_hold_anything(target: Target, value: float) -> None:
    x = arrays(9, 20, H=1, D=8)
    keep = np.ones((9, 20), bool)
    keep[4, 7] = False
    bias = np.zeros((9, 20))
    attend = Attend(target)
    clean = attend(x["q"], x["k"], x["v"], mask=keep, bias=bias)
    bias[4, 7] = value
    assert [] == poisoned_rows(clean, attend(x["q"], x["k"], x["v"], mask=keep, bias=bias))


@every_target
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinity_in_a_key_reach_the_rows_that_see_it(target: Target, value: float) -> None:
    """Rows that do not see it are promised nothing, as in eager attention."""
    x = arrays(40, 40, H=1, D=8)
    x["q"] = np.abs(x["q"]) + 1
    attend = Attend(target)
    x["k"][0, 0, 39, 2] = value
    got = attend(x["q"], x["k"], x["v"], causal=True)
    assert not np.isfinite(got.out[0, 0, 39]).any()
    assert not np.isfinite(got.lse[0, 0, 39])


@every_target
def test_infinity_in_a_value_reaches_its_own_column(target: Target) -> None:
    x = arrays(5, 40, H=1, D=8)
    x["v"][0, 0, 7, 3] = np.inf
    got = Attend(target)(x["q"], x["k"], x["v"])
    assert {np.inf} == set(got.out[0, 0, :, 3].tolist())
    assert np.isfinite(np.delete(got.out, 3, axis=3)).all()
    assert np.isfinite(got.lse).all()


@every_target
@pytest.mark.parametrize("length", [256, 1024, 2048])
@pytest.mark.parametrize("causal", [False, True])
def test_double_precision_is_within_2e15_of_the_materialised_form(
    target: Target, length: int, causal: bool
) -> None:
    """The documents' own table of exactness: float64, D = 64, default_rng(N), against softmax(QK^T)V."""
    rng = np.random.default_rng(length)
    q, k, v = (rng.standard_normal((length, 64)) for _ in range(3))
    s = q @ k.T / 8
    if causal:
        s = np.where(np.tri(length, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(axis=1, keepdims=True))
    naive = p / p.sum(axis=1, keepdims=True) @ v
    got = Attend(target, "float64")(*(x[None, None] for x in (q, k, v)), causal=causal)
    assert float(np.abs(got.out[0, 0] - naive).max()) < 2e-15
