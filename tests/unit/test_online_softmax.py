from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from attnproof import DtypeError, ShapeError, attention_with_lse, merge
from attnproof.online_softmax import State, finalize, reference_point, rescale, start


def run(
    s: np.ndarray, v: np.ndarray, cuts: list[int], sink: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence of the module's docstring over tiles that end at `cuts`."""
    state = start(len(s), v.shape[1], s.dtype, sink)
    for a, b in itertools.pairwise([0, *cuts]):
        tile = s[:, a:b]
        m, point, alpha = rescale(state.m, tile.max(axis=1, initial=-np.inf))
        assert not (alpha > 1).any()
        p = np.exp(tile - point[:, None])
        state = State(m, alpha * state.l + p.sum(axis=1), alpha[:, None] * state.acc + p @ v[a:b])
    return finalize(state)


def plain(s: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    p = np.exp(s - s.max(axis=1, keepdims=True))
    return p @ v / p.sum(axis=1, keepdims=True), s.max(axis=1) + np.log(p.sum(axis=1))


@pytest.mark.parametrize("cuts", [[12], [1, 12], [5, 6, 12], list(range(1, 13)), [0, 7, 7, 12]])
@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_any_tiling_gives_the_plain_softmax(cuts: list[int], shift: float) -> None:
    rng = np.random.default_rng(0)
    s, v = rng.standard_normal((4, 12)) + shift, rng.standard_normal((12, 3))
    for right, got in zip(plain(s, v), run(s, v, cuts), strict=True):
        assert np.allclose(right, got, rtol=1e-12, atol=1e-12)


def test_rows_without_a_key_are_zero_whatever_comes_first() -> None:
    """-inf minus -inf is NaN: the first tiles of a row may be masked, or all of them."""
    s, v = np.full((3, 6), -np.inf), np.arange(12.0).reshape(6, 2)
    s[1, 4], s[2, 0] = 3.0, 2.0
    out, lse = run(s, v, [2, 4, 6])
    assert [[0, 0], [8, 9], [0, 1]] == out.tolist()
    assert [-np.inf, 3, 2] == lse.tolist()


def test_a_sink_takes_weight_and_gives_nothing() -> None:
    s, v = np.zeros((1, 3)), np.ones((3, 1))
    out, lse = run(s, v, [1, 3], sink=0.0)
    assert np.allclose([[0.75]], out, rtol=1e-15)
    assert np.allclose(np.log(4), lse, rtol=1e-15)


def test_a_sink_alone_gives_zero_and_its_own_logit() -> None:
    assert ([[0.0]], [0.3]) == tuple(x.tolist() for x in run(np.zeros((1, 0)), np.ones((0, 1)), [], sink=0.3))


def test_a_sink_of_minus_infinity_is_none() -> None:
    for a, b in zip(start(2, 3, np.float32), start(2, 3, np.float32, -np.inf), strict=True):
        assert a.tolist() == b.tolist()


def test_the_dtype_stays() -> None:
    m, point, alpha = rescale(np.full(2, -np.inf, np.float32), np.zeros(2, np.float32))
    assert {np.dtype(np.float32)} == {m.dtype, point.dtype, alpha.dtype, reference_point(m).dtype}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinity_are_never_turned_into_zero(value: float) -> None:
    with np.errstate(invalid="ignore"):
        out, lse = run(np.array([[0.0, value, 0.0], [0.0, 1.0, 2.0]]), np.ones((3, 1)), [1, 2, 3])
    assert [True, False] == np.isnan(out[:, 0]).tolist()
    assert [False, True] == np.isfinite(lse).tolist()


# merge


def pair(kind: str, dtype: str = "float64") -> tuple[list[Any], list[Any]]:
    """out and lse over 9 keys, and over the first 5 and the last 4."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 3, length, 8)) for length in (4, 9, 9))
    if kind == "torch":
        torch = pytest.importorskip("torch")
        q, k, v = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in (q, k, v))
    else:
        q, k, v = (x.astype(dtype) for x in (q, k, v))
    parts = [attention_with_lse(q, k[:, :, s], v[:, :, s]) for s in (slice(5), slice(5, 9))]
    return list(attention_with_lse(q, k, v)), [*parts[0], *parts[1]]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_merge_of_two_key_sets_is_the_whole(kind: str) -> None:
    """A base other than e in either lse would be off by a tenth here."""
    whole, parts = pair(kind)
    for right, got in zip(whole, merge(*parts), strict=True):
        assert type(right) is type(got)
        assert np.allclose(np.asarray(right), np.asarray(got), rtol=0, atol=1e-15)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_merge_of_a_long_and_a_short_set_is_the_whole(kind: str) -> None:
    """A cached prefix of 4096 keys and a suffix of 16."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 1, length, 16)) for length in (3, 4112, 4112))
    if kind == "torch":
        torch = pytest.importorskip("torch")
        q, k, v = (torch.from_numpy(x) for x in (q, k, v))
    parts = [attention_with_lse(q, k[:, :, s], v[:, :, s]) for s in (slice(4096), slice(4096, 4112))]
    for right, got in zip(attention_with_lse(q, k, v), merge(*parts[0], *parts[1]), strict=True):
        assert np.allclose(np.asarray(right), np.asarray(got), rtol=0, atol=2e-15)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_merge_keeps_the_dtypes(kind: str, dtype: str) -> None:
    whole, parts = pair(kind, dtype)
    for right, got in zip(whole, merge(*parts), strict=True):
        assert right.dtype == got.dtype
        assert np.allclose(np.asarray(right), np.asarray(got), rtol=0, atol=2.0**-10)


def test_merge_keeps_bfloat16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    out = np.array([[1.5, -2.0]], ml_dtypes.bfloat16)
    merged, _ = merge(out, np.zeros(1, np.float32), out, np.zeros(1, np.float32))
    assert (np.dtype(ml_dtypes.bfloat16), [[1.5, -2.0]]) == (merged.dtype, merged.astype(float).tolist())


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_merge_of_two_empty_sets_is_empty(kind: str) -> None:
    """The short forms with a sigmoid give NaN here."""
    out, lse = np.zeros((2, 3)), np.array([-np.inf, 1.0])
    empty = np.full(2, -np.inf)
    given = [out, empty, out + 5, lse]
    if kind == "torch":
        torch = pytest.importorskip("torch")
        given = [torch.from_numpy(x) for x in given]
    for a, b in ((given[:2], given[2:]), (given[2:], given[:2])):
        merged, log_sum = merge(*a, *b)
        assert ([[0, 0, 0], [5, 5, 5]], [-np.inf, 1.0]) == (merged.tolist(), log_sum.tolist())


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_merge_passes_nan_and_infinity_on(kind: str, value: float) -> None:
    given = [np.ones((2, 1)), np.array([value, 0.0]), np.ones((2, 1)), np.zeros(2)]
    if kind == "torch":
        torch = pytest.importorskip("torch")
        given = [torch.from_numpy(x) for x in given]
    out, lse = merge(*given)
    assert [True, False] == np.isnan(np.asarray(out)[:, 0]).tolist()
    assert [False, True] == np.isfinite(np.asarray(lse)).tolist()


def test_merge_is_differentiable_in_all_four_parts() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(2)
    given = [
        torch.from_numpy(rng.standard_normal(shape)).requires_grad_() for shape in ((2, 3), 2, (2, 3), 2)
    ]
    assert torch.autograd.gradcheck(merge, given)


def test_the_gradient_of_merge_is_finite_beside_empty_sets() -> None:
    torch = pytest.importorskip("torch")
    given = [
        torch.zeros(2, 3),
        torch.tensor([-torch.inf, 0.0]),
        torch.ones(2, 3),
        torch.full((2,), -torch.inf),
    ]
    given = [x.requires_grad_() for x in given]
    out, lse = merge(*given)
    grads = torch.autograd.grad((out.sum(), lse[1]), given)
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)


KIND = "a NumPy array or torch tensor, all of one kind"
OUT, LSE = np.zeros((2, 3, 4)), np.zeros((2, 3))
BAD_PARTS = {
    "lists": (([[1.0]], LSE, OUT, LSE), DtypeError, f"out_a: expected {KIND}, got list"),
    "a number for lse": ((OUT, 1.0, OUT, LSE), DtypeError, f"lse_a: expected {KIND}, got float"),
    "another dtype": (
        (OUT, LSE, OUT.astype(np.float32), LSE),
        DtypeError,
        "out_b: expected dtype float64 to match out_a, got float32",
    ),
    "a half lse": (
        (OUT, LSE.astype(np.float16), OUT, LSE),
        DtypeError,
        "lse_a: expected dtype float32 or float64, got float16",
    ),
    "another lse dtype": (
        (OUT, LSE, OUT, LSE.astype(np.float32)),
        DtypeError,
        "lse_b: expected dtype float64 to match lse_a, got float32",
    ),
    "another shape": (
        (OUT, LSE, OUT[:, :2], LSE),
        ShapeError,
        r"out_b: expected shape \(2, 3, 4\) to match out_a, got \(2, 2, 4\)",
    ),
    "another lse shape": (
        (OUT, LSE, OUT, LSE[:, :1]),
        ShapeError,
        r"lse_b: expected shape \(2, 3\) to match lse_a, got \(2, 1\)",
    ),
    "axes in another order": (
        (OUT, LSE.T, OUT, LSE.T),
        ShapeError,
        r"lse_a: expected shape \(2, 3\), that of out_a without its last axis "
        r"\(transpose out to lse's order\), got \(3, 2\)",
    ),
}


@pytest.mark.parametrize("name", BAD_PARTS)
def test_parts_that_do_not_fit_are_refused(name: str) -> None:
    """Broadcasting an lse of the wrong shape would weigh the wrong rows without a word."""
    parts, error, message = BAD_PARTS[name]
    with pytest.raises(error, match=f"^{message}$"):
        merge(*parts)


def test_kinds_are_not_mixed() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(DtypeError, match=f"^out_b: expected {KIND}, got Tensor$"):
        merge(OUT, LSE, torch.from_numpy(OUT), LSE)
