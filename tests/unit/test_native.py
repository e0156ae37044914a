"""The C++ backend beside the parity suite: polynomials, passes, SIMD targets, refusals."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from attnproof.backends import native, reference
from attnproof.backends.native import loader
from attnproof.errors import ShapeError, Unsupported
from attnproof.problem import Grads, Options, Problem, Tensors, bind

built = loader.why_not() is None
needs_extension = pytest.mark.skipif(not built, reason=loader.why_not() or "")
TARGETS = loader.kernels().targets() if built else ("none",)
NEEDS = frozenset({"q", "k", "v", "bias", "alibi_slopes", "sink"})


@pytest.fixture(params=TARGETS)
def simd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every SIMD target of this build that this machine can run."""
    monkeypatch.setenv(loader.SIMD, request.param)
    return str(request.param)


def rich_call(
    dtype: type = np.float32, M: int = 150, N: int = 300, D: int = 24, **options: Any
) -> tuple[Problem, Tensors]:
    """A call with every feature at once, GQA included."""
    rng = np.random.default_rng(7)
    q = rng.standard_normal((2, 6, M, D)).astype(dtype)
    k, v = (rng.standard_normal((2, 3, N, D)).astype(dtype) for _ in range(2))
    given: dict[str, Any] = {
        "causal": True,
        "window": (200, -1),
        "mask": rng.random((2, 1, M, N)) > 0.2,
        "bias": rng.standard_normal((6, M, N)).astype(dtype),
        "alibi_slopes": rng.random(6).astype(np.float32) * 0.05,
        "softcap": 4.0,
        "sink": rng.standard_normal(6).astype(np.float32 if dtype != np.float64 else dtype),
        "dropout_p": 0.2,
        "seed": 11,
    }
    return bind(q, k, v, Options(**(given | options)))


def bits(x: Any) -> bytes:
    return np.ascontiguousarray(x).tobytes()


def all_gradients(problem: Problem, tensors: Tensors, passes: int = 0) -> list[Any]:
    out, lse = native.forward(problem, tensors)
    rng = np.random.default_rng(3)
    dout = rng.standard_normal(out.shape).astype(out.dtype)
    dlse = rng.standard_normal(lse.shape).astype(lse.dtype)
    needs = NEEDS - {name for name in NEEDS if getattr(tensors, name) is None}
    return [out, lse, *native.backward(problem, tensors, out, lse, dout, dlse, needs, passes=passes)]


@needs_extension
def test_exp2_is_within_two_ulp_everywhere(simd: str) -> None:
    """The softmax rests on it; 2^0 is exactly 1, so that rows of equal logits stay exact."""
    x = np.linspace(-125, 127, 400_003).astype(np.float32)
    x = np.concatenate([x, np.linspace(-1, 1, 400_003).astype(np.float32)])
    got = np.empty_like(x)
    loader.kernels().exp2(x, got, len(x), simd)
    right = np.exp2(x.astype(np.float64))
    assert np.max(np.abs(got - right) / np.spacing(right.astype(np.float32))) <= 2
    x64 = np.linspace(-40, 40, 100_003)
    got64 = np.empty_like(x64)
    loader.kernels().exp2_f64(x64, got64, len(x64), simd)
    right64 = np.exp2(x64.astype(np.longdouble))
    assert np.max(np.abs(got64 - right64) / np.spacing(right64.astype(np.float64))) <= 2


@needs_extension
def test_exp2_of_special_values_is_exact(simd: str) -> None:
    x = np.array([0, -np.inf, np.nan, -np.nan, -1e38, -127, 1, -1], np.float32)
    got = np.empty_like(x)
    loader.kernels().exp2(x, got, len(x), simd)
    assert [1, 0, 0, 0, 2, 0.5] == got[[0, 1, 4, 5, 6, 7]].tolist()
    assert np.isnan(got[2:4]).all()


@needs_extension
def test_tanh_is_within_three_ulp_and_saturates(simd: str) -> None:
    """Near zero the exponential form would cancel: a large softcap would then eat the logits."""
    x = np.concatenate([np.linspace(-12, 12, 400_001), np.geomspace(1e-30, 1, 100_000)]).astype(np.float32)
    got = np.empty_like(x)
    loader.kernels().tanh(x, got, len(x), simd)
    right = np.tanh(x.astype(np.float64))
    assert np.max(np.abs(got - right) / np.spacing(np.maximum(np.abs(right), 1e-37).astype(np.float32))) <= 3
    ends = np.array([np.inf, -np.inf, np.nan, 0.0], np.float32)
    got = np.empty_like(ends)
    loader.kernels().tanh(ends, got, 4, simd)
    assert [1.0, -1.0, 0.0] == got[[0, 1, 3]].tolist()
    assert np.isnan(got[2])


@needs_extension
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_threads_and_passes_never_change_a_bit(
    dtype: type, simd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums run in one order whoever computes them: 1, 2 and 7 threads, one pass over the scores or two."""
    problem, tensors = rich_call(dtype)
    found = []
    for threads in (1, 2, 7):
        monkeypatch.setattr(loader, "threads", lambda threads=threads: threads)
        for passes in (1, 2):
            found.append([bits(x) for x in all_gradients(problem, tensors, passes)])
    assert [found[0]] * len(found) == found


@needs_extension
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 3)}])
def test_every_simd_target_agrees_with_the_reference(simd: str, options: dict[str, Any]) -> None:
    """A panel of one width, or a tail block, would be wrong on one target only."""
    rng = np.random.default_rng(0)
    for M, N, D, Dv in ((1, 1, 1, 1), (65, 129, 40, 24), (130, 257, 64, 72), (3, 700, 128, 128)):
        q = rng.standard_normal((1, 4, M, D)).astype(np.float32)
        k, v = (rng.standard_normal((1, 2, N, width)).astype(np.float32) for width in (D, Dv))
        problem, tensors = bind(q, k, v, Options(**options))
        right_out, right_lse = reference.forward(problem, tensors)
        got_out, got_lse = native.forward(problem, tensors)
        np.testing.assert_allclose(got_out, right_out, rtol=0, atol=4e-6)
        np.testing.assert_allclose(got_lse, right_lse, rtol=0, atol=4e-6)
        dout = rng.standard_normal(right_out.shape).astype(np.float32)
        needs = frozenset("qkv")
        right = reference.backward(problem, tensors, right_out, right_lse, dout, None, needs)
        got = native.backward(problem, tensors, right_out, right_lse, dout, None, needs)
        for name, a, b in zip(Grads._fields[:3], got, right, strict=False):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1, np.abs(b).max()), err_msg=name)


@needs_extension
def test_every_feature_at_once_agrees_with_the_reference(simd: str) -> None:
    problem, tensors = rich_call(np.float64)
    out, lse, *grads = all_gradients(problem, tensors)
    rng = np.random.default_rng(3)
    dout, dlse = (rng.standard_normal(x.shape) for x in (out, lse))
    right = reference.backward(problem, tensors, out, lse, dout, dlse, NEEDS)
    for name, a, b in zip(Grads._fields, grads, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(1, np.abs(b).max()), err_msg=name)


@needs_extension
@pytest.mark.parametrize("splits", [1, 2, 8, 64])
def test_split_keys_merge_to_the_same_result(splits: int, simd: str) -> None:
    """Decoding splits keys; an empty split must bring neither NaN nor weight."""
    from attnproof import attention_decode

    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 8, 1, 64)).astype(np.float32)
    k, v = (rng.standard_normal((2, 2, 3000, 64)).astype(np.float32) for _ in range(2))
    lengths = np.array([1, 2999], np.int32)
    right = attention_decode(q, k, v, lengths, backend="reference")
    for window in ((-1, -1), (20, 0)):
        right = attention_decode(q, k, v, lengths, window=window, backend="reference")
        got = attention_decode(q, k, v, lengths, window=window, num_splits=splits, backend="native")
        np.testing.assert_allclose(got, right, rtol=0, atol=3e-6)


@pytest.mark.parametrize("wanted", ["avx9000", "neon" if "baseline" in TARGETS else "amx"])
def test_a_simd_target_that_cannot_run_here_is_named(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a typing mistake nor another machine's target may run a third one in silence."""
    if not built:
        pytest.skip(str(loader.why_not()))
    monkeypatch.setenv(loader.SIMD, wanted)
    problem, _ = rich_call()
    assert f"got '{wanted}'" in str(native.why_not(problem))
    with pytest.raises(ShapeError, match="ATTNPROOF_SIMD: expected one of"):
        loader.simd()


def test_a_wrong_number_of_threads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv(loader.THREADS, "0")
    with pytest.raises(ShapeError, match="ATTNPROOF_NUM_THREADS: expected a positive integer, got '0'"):
        loader.threads()
    monkeypatch.setenv(loader.THREADS, "5")
    assert 5 == loader.threads()
    monkeypatch.delenv(loader.THREADS)
    assert loader.threads() >= 1


def test_without_the_extension_the_reason_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler the package works on streaming, and the table says why native does not."""
    reason = "its C++ extension is not built: reinstall"
    monkeypatch.setattr(loader, "_extension", lambda: (None, reason))
    problem, _ = rich_call()
    assert reason == native.why_not(problem)
    assert "" == native.simd_target()
    with pytest.raises(ImportError, match="native: its C"):
        loader.kernels()


@needs_extension
def test_doctor_names_the_target_and_why() -> None:
    assert loader.describe()["simd"] in native.simd_target()
    assert "asked for" in native.simd_target() or "widest" in native.simd_target()


@needs_extension
def test_a_gradient_through_a_cache_is_refused() -> None:
    from attnproof.problem import bind_decode

    q = np.zeros((1, 2, 1, 8), np.float32)
    pool = np.zeros((3, 2, 4, 8), np.float32)
    table, lengths = np.array([[2, 0]], np.int32), np.array([6], np.int32)
    problem, tensors = bind_decode(q, pool, pool, lengths, table, Options())
    out, lse = native.forward(problem, tensors)
    with pytest.raises(Unsupported, match="no gradient through a cache"):
        native.backward(problem, tensors, out, lse, out, None, frozenset("q"))


@needs_extension
def test_two_python_threads_may_call_at_once() -> None:
    """The pool serves one call; another runs on its own thread, and gets the same bits."""
    from concurrent.futures import ThreadPoolExecutor

    problem, tensors = rich_call()
    right = bits(native.forward(problem, tensors)[0])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: bits(native.forward(problem, tensors)[0]), range(16)))
    assert [right] * 16 == found
