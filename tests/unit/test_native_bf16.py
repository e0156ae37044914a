"""bfloat16 in the C++ backend: every SIMD target, and what the matrix unit of one of them would get wrong by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attnproof.backends import native
from attnproof.backends.native import loader
from attnproof.problem import Options, bind

torch = pytest.importorskip("torch")
if loader.why_not() is not None:
    pytest.skip(str(loader.why_not()), allow_module_level=True)
TARGETS = loader.kernels().targets()
needs_amx = pytest.mark.skipif(
    "amx" not in TARGETS, reason="the processor, the system or the build has no AMX"
)


@pytest.fixture(params=TARGETS)
def simd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every SIMD target of this build that this machine can run."""
    monkeypatch.setenv(loader.SIMD, request.param)
    return str(request.param)


def normal(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def forward(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    """Out and lse of a call on NumPy arrays, as float32 tensors."""
    problem, tensors = bind(q, k, v, Options(**options))
    out, lse = native.forward(problem, type(tensors)(*map(to_host, tensors)))
    return torch.from_numpy(out).view(torch.bfloat16).float(), torch.from_numpy(lse)


def to_host(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


def on(target: str, monkeypatch: pytest.MonkeyPatch, *inputs: Any, **options: Any) -> tuple[Any, Any]:
    monkeypatch.setenv(loader.SIMD, target)
    return forward(*inputs, **options)


def exact(q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any, Any]:
    """Out, lse and the sum of the weighted magnitudes of v, in float64."""
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        m, n = s.shape[-2:]
        s = s.masked_fill(~torch.ones(m, n, dtype=torch.bool).tril(n - m), -torch.inf)
    p = s.softmax(-1)
    return p @ v, s.logsumexp(-1), p @ v.abs()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("M", "N", "D", "Dv"),
    [(9, 9, 1, 1), (65, 129, 40, 24), (130, 257, 64, 72), (60, 700, 33, 17), (50, 300, 256, 256)],
)
def test_every_target_is_as_good_as_its_output_dtype(
    M: int, N: int, D: int, Dv: int, causal: bool, simd: str
) -> None:
    """Head dims and lengths that fill no square, no vector and no tile of keys."""
    q, k, v = normal(2, 4, M, D), normal(2, 2, N, D, seed=1), normal(2, 2, N, Dv, seed=2)
    right, right_lse, magnitude = exact(q, k, v, causal)
    out, lse = forward(q, k, v, causal=causal)
    assert ((out - right).abs() <= 2.0**-8 * right.abs() + 2.0**-15 * magnitude).all()
    np.testing.assert_allclose(lse, right_lse, rtol=0, atol=4e-6)


def test_weights_are_not_rounded_to_bf16(simd: str) -> None:
    """Two values that cancel: a weight with 8 bits would be off by 2^-8 of itself, more than the rounding of what is left over."""
    q, k = normal(1, 1, 96, 16), normal(1, 1, 2, 16, seed=1) / 16
    v = torch.tensor([1.0, -1.0]).bfloat16()[:, None].expand(1, 1, 2, 16)
    right, _, _ = exact(q, k, v, False)
    out, _ = forward(q, k, v)
    assert ((out - right).abs() <= 2.0**-8 * right.abs() + 2.0**-16).all()


def test_threads_never_change_a_bit(simd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tiles go vector by vector, others by blocks; the row tiles of one thread are others than those of seven."""
    q, k, v = normal(1, 8, 700, 64), normal(1, 4, 900, 64, seed=1), normal(1, 4, 900, 48, seed=2)
    q[0, 3, 350, 5], v[0, 1, 300, 7] = 1e-38, torch.inf
    for options in ({}, {"causal": True}, {"window": (100, 20), "softcap": 3.0}):
        found = []
        for threads in (1, 2, 7):
            monkeypatch.setattr(loader, "threads", lambda threads=threads: threads)
            found.append([x.numpy().tobytes() for x in forward(q, k, v, **options)])
        assert [found[0]] * 3 == found


@needs_amx
def test_numbers_that_leave_the_range_of_the_unit_are_multiplied_as_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reads a denormal as zero and flushes products below 2^-126, and the scale comes after the product."""
    q, k, v = (normal(1, 1, 60, 32, seed=seed) for seed in range(3))
    small, large, scale = 2.0**-128, 2.0**96, 2.0**28
    calls = [(q * small, k * large, v, scale), (q * large, k * small, v, scale), (q, k, v * small, None)]
    calls.append((q * 2.0**66, k * 2.0**66, v, 2.0**-134))
    calls.append((q * 2.0**66, k * 2.0**58, v, 2.0**-30))
    for *inputs, scale in calls:
        got = on("amx", monkeypatch, *inputs, scale=scale)
        right = on("avx512", monkeypatch, *inputs, scale=scale)
        assert right[0].abs().max() > 0 and right[1].std() > 0
        for a, b in zip(got, right, strict=True):
            assert torch.equal(a, b)


@needs_amx
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_among_values_reaches_its_rows_as_elsewhere(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight of exactly one half has no lower part: 0 * inf must not make NaN of an infinite sum."""
    q, k, v = (normal(1, 2, 300, 32, seed=seed) for seed in range(3))
    q[0, 0, :50] = 0
    clean, _ = on("amx", monkeypatch, q, k, v, causal=True)
    v[0, 0, 140, 3] = v[0, 1, 0, 31] = value
    got, _ = on("amx", monkeypatch, q, k, v, causal=True)
    right, _ = on("avx512", monkeypatch, q, k, v, causal=True)
    strange = ~right.isfinite()
    assert strange.any() and torch.equal(strange, ~got.isfinite())
    np.testing.assert_array_equal(got[strange], right[strange])
    assert torch.equal(got[~strange], clean[~strange])


@needs_amx
def test_logits_of_any_size_keep_their_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale is multiplied after the product: with one rounding, a max of 1e12 would not cancel itself."""
    q, k, v = (normal(1, 1, 256, 16, seed=seed) for seed in range(3))
    for size in (1e3, 1e6, 1e15):
        got = on("amx", monkeypatch, q * size, k * size, v, scale=0.3)
        right = on("avx512", monkeypatch, q * size, k * size, v, scale=0.3)
        assert got[0].isfinite().all()
        np.testing.assert_allclose(got[1], right[1], rtol=1e-6)
        assert ((got[0] - right[0]).abs() <= 2.0**-7 * right[0].abs() + 2.0**-14).float().mean() > 0.99


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [(wanted, "split" if wanted == "amx" else "precise") for wanted in (*TARGETS, "avx9000")],
)
def test_the_numerics_class_is_that_of_the_target(
    wanted: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge allows two bf16 numbers a weight on `amx` and nowhere else; a target that is not here is no error here."""
    monkeypatch.setenv(loader.SIMD, wanted)
    assert kind == native.numerics()
