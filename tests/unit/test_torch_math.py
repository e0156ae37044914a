"""The math backend: right in every option and row kind, exact where it claims to be, and never M x N in memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import attnproof  # noqa: E402
from attnproof import dispatch, philox  # noqa: E402
from attnproof.backends import math, reference  # noqa: E402
from attnproof.backends.math import blocks, formulas  # noqa: E402
from attnproof.backends.math import philox as torch_philox  # noqa: E402
from attnproof.problem import (  # noqa: E402
    GRADIENTS,
    Bound,
    Options,
    bind,
    bind_decode,
    bind_varlen,
)

CUTS = {"whole": 2**24, "rows": 100, "single rows": 1}


def randn(*shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=CUTS, ids=list(CUTS))
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How small the chunks are: everything at once, a few rows, one row."""
    monkeypatch.setattr(blocks, "BUDGET", CUTS[request.param])
    return request.param


def assert_close(expected: Any, actual: Any) -> None:
    """Equal up to a few roundings of float64 (or of float32 where that is what is stored)."""
    assert (expected.shape, expected.dtype) == (actual.shape, actual.dtype)
    finite = expected[expected.isfinite()].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=64 * torch.finfo(expected.dtype).eps * scale, equal_nan=True
    )


def assert_matches_the_reference(bound: Bound, *, gradients: bool = True) -> None:
    problem, tensors = bound
    out, lse = dispatch.forward(reference, problem, tensors)
    for wanted, got in zip((out, lse), math.forward(problem, tensors), strict=True):
        assert_close(wanted, got)
    if not gradients:
        return
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    needs = frozenset(name for name in GRADIENTS if getattr(tensors, name) is not None)
    expected = dispatch.backward(reference, problem, tensors, out, lse, dout, dlse, needs)
    actual = math.backward(problem, tensors, out, lse, dout, dlse, needs)
    for wanted, got in zip(expected, actual, strict=True):
        assert (wanted is None) == (got is None)
        if wanted is not None:
            assert_close(wanted, got)


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "top left": {"causal": True, "align": "top_left"},
    "window": {"window": (2, 1), "softcap": 1.5},
    "window to one side": {"window": (-1, 2), "scale": -0.3},
    "dropout": {"causal": True, "dropout_p": 0.3, "seed": 2**40 + 7},
    "all dropped": {"dropout_p": 1.0, "seed": 1},
    "prefix": {"mask": attnproof.prefix(2)},
}
DENSE = {
    "grouped heads": (2, 4, 2, 5, 7, 8, 6),
    "more queries than keys": (1, 4, 1, 7, 5, 5, 3),
    "one pair": (1, 1, 1, 1, 1, 1, 1),
    "no query": (1, 2, 1, 0, 5, 4, 4),
    "no key": (1, 2, 1, 3, 0, 4, 4),
    "no sequence": (0, 2, 1, 3, 2, 4, 4),
    "no head": (1, 0, 0, 3, 2, 4, 4),
    "no width": (1, 2, 2, 3, 2, 0, 4),
}


@pytest.mark.parametrize("extras", [False, True], ids=["bare", "with bias, slopes, sink and mask"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("shape", DENSE.values(), ids=list(DENSE))
def test_a_dense_call_matches_the_reference(shape: tuple[int, ...], options: Any, extras: bool) -> None:
    """A wrong order of modifiers, a lost group sum or an empty axis would show here first."""
    B, H, Hkv, M, N, D, Dv = shape
    if extras:
        keep = torch.rand(B, 1, M, N) > 0.3
        options = {**options, "bias": randn(H, M, 1), "alibi_slopes": torch.rand(H), "sink": randn(H)}
        options["mask"] = options["mask"] & keep if "mask" in options else keep
    assert_matches_the_reference(
        bind(randn(B, H, M, D), randn(B, Hkv, N, D), randn(B, Hkv, N, Dv), Options(**options))
    )


def test_any_cut_into_chunks_gives_the_same(cut: str) -> None:
    """A chunk that starts in the middle must count its rows from the sequence's start: mask, alibi and dropout do."""
    options = Options(
        causal=True,
        window=(4, -1),
        bias=randn(3, 4, 9, 1),
        alibi_slopes=torch.rand(3, 4),
        dropout_p=0.4,
        seed=(5, 9),
    )
    assert_matches_the_reference(bind(randn(3, 4, 9, 8), randn(3, 2, 11, 8), randn(3, 2, 11, 6), options))


def gathered(problem: Any, tensors: Any) -> Iterator[Any]:
    """What a device does: no length is read, two sequences at a time."""
    for start in range(0, problem.B, 2):
        yield blocks.group(problem, tensors, start, min(start + 2, problem.B))


PACKED = {"gaps": ([0, 3, 3, 10], [0, 5, 9, 9]), "empty first": ([0, 0, 12], [0, 7, 11]), "none": ([0], [0])}


@pytest.mark.parametrize("lengths", ["read", "left on the device"])
@pytest.mark.parametrize("cu", PACKED.values(), ids=list(PACKED))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_a_packed_call_matches_the_reference(
    cu: Any, options: Any, lengths: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows past the last sequence hold NaN: a padded gather that lets them in poisons every gradient."""
    if lengths != "read":
        monkeypatch.setattr(formulas, "groups", gathered)
    cu_q, cu_k = (torch.tensor(x) for x in cu)
    q, k, v = randn(13, 4, 8), randn(12, 2, 8), randn(12, 2, 5)
    q[cu_q[-1] :], k[cu_k[-1] :], v[cu_k[-1] :] = torch.nan, torch.nan, torch.nan
    options = Options(**options, sink=randn(4), alibi_slopes=torch.rand(4), bias=randn(4, 1, 20))
    assert_matches_the_reference(bind_varlen(q, k, v, cu_q, cu_k, 14, 20, options))


def test_a_packed_call_in_small_chunks_matches_the_reference(cut: str) -> None:
    """A chunk of a packed sequence starts at its own row, not at the token's number."""
    cu_q, cu_k = torch.tensor([0, 4, 9]), torch.tensor([0, 6, 13])
    options = Options(causal=True, dropout_p=0.3, seed=3)
    assert_matches_the_reference(
        bind_varlen(randn(9, 4, 8), randn(13, 2, 8), randn(13, 2, 5), cu_q, cu_k, 5, 7, options)
    )


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, 1), "softcap": 1.5}], ids=str)
def test_a_cache_is_read_up_to_its_length_only(options: Any) -> None:
    """Stale slots hold NaN: 0 * NaN in P V would spread it."""
    q, k, v, lengths = randn(3, 4, 2, 8), randn(3, 2, 9, 8), randn(3, 2, 9, 5), torch.tensor([0, 5, 9])
    for b, length in enumerate(lengths):
        k[b, :, length:], v[b, :, length:] = torch.nan, torch.nan
    assert_matches_the_reference(bind_decode(q, k, v, lengths, None, Options(**options, sink=randn(4))))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, 1), "softcap": 1.5}], ids=str)
def test_pages_are_read_through_the_table_only(options: Any) -> None:
    """Unused entries hold nonsense and unused slots NaN; neither may be dereferenced or multiplied."""
    q, k, v = randn(3, 4, 2, 8), randn(6, 2, 4, 8), randn(6, 2, 4, 5)
    table = torch.tensor([[10**6, -1, 7], [4, 2, -5], [0, 1, 5]])
    for page, start in ((3, 0), (2, 1), (5, 1)):
        k[page, :, start:], v[page, :, start:] = torch.nan, torch.nan
    bound = bind_decode(q, k, v, torch.tensor([0, 5, 9]), table, Options(**options, sink=randn(4)))
    assert_matches_the_reference(bound, gradients=False)


def test_the_gradient_of_shared_pages_is_the_sum_over_their_sequences() -> None:
    """Two sequences may share a prefix page: a store instead of a sum would lose one of them."""
    q, k, v = randn(2, 2, 3, 4), randn(3, 1, 2, 4), randn(3, 1, 2, 4)
    table, lengths = torch.tensor([[1, 0], [1, 2]]), torch.tensor([4, 3])
    problem, tensors = bind_decode(q, k, v, lengths, table, Options())
    dout = randn(2, 2, 3, 4)
    grads = math.backward(problem, tensors, None, None, dout, None, frozenset("qkv"))
    # the same keys, copied to where a dense cache has them
    dense = bind_decode(q, *(x[table].movedim(2, 1).flatten(2, 3) for x in (k, v)), lengths, None, Options())
    apart = math.backward(*dense, None, None, dout, None, frozenset("qkv"))
    assert_close(apart.dq, grads.dq)
    for whole, pages in ((apart.dk, grads.dk), (apart.dv, grads.dv)):
        rows = whole.unflatten(2, (2, 2))  # [B, Hkv, slot, page, D]
        assert_close(rows[0, :, 0] + rows[1, :, 0], pages[1])
        assert_close(rows[0, :, 1], pages[0])
        assert_close(rows[1, :, 1], pages[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_half_types_are_computed_in_float32(dtype: Any) -> None:
    """Scores in half precision would be off by 2^-8 of their size; only the stored result may be rounded."""
    q, k, v = (torch.randn(1, 2, 40, 16).to(dtype) for _ in range(3))
    problem, tensors = bind(q, k, v, Options(causal=True))
    out, lse = math.forward(problem, tensors)
    assert (dtype, torch.float32) == (out.dtype, lse.dtype)
    exact, exact_lse = math.forward(*bind(*(x.double() for x in (q, k, v)), Options(causal=True)))
    roundoff = torch.finfo(dtype).eps / 2
    assert float((out.double() - exact).abs().max()) <= roundoff * 1.01 * float(exact.abs().max()) + 1e-6
    assert float((lse.double() - exact_lse).abs().max()) <= 4 * torch.finfo(torch.float32).eps * float(
        exact_lse.abs().max()
    )


@pytest.mark.parametrize("layout", ["bhmd", "bmhd"])
def test_the_result_is_stored_in_the_callers_layout(layout: str) -> None:
    """A fused kernel after it reads [B, M, H D] as one matrix: a transposed storage costs a copy."""
    q = torch.randn(2, 3, 5, 4)
    assert attnproof.attention(q, q, q, layout=layout, backend="math").is_contiguous()


def test_numpy_arrays_are_served_and_come_back_as_numpy() -> None:
    """The backend takes torch tensors; a NumPy caller must not notice, gradients included."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 2, 4, 3)) for _ in range(3))
    out, lse = attnproof.attention_with_lse(q, k, v, backend="math")
    expected, expected_lse = attnproof.attention_with_lse(q, k, v, backend="reference")
    assert (np.ndarray, np.ndarray) == (type(out), type(lse))
    np.testing.assert_allclose(out, expected, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-14)
    grads = attnproof.attention_backward(q, k, v, out, lse, np.ones_like(out), backend="math")
    wanted = attnproof.attention_backward(q, k, v, out, lse, np.ones_like(out), backend="reference")
    for got, want in zip(grads[:3], wanted[:3], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-14)


def test_dropout_decisions_are_those_of_the_numpy_generator() -> None:
    """One different bit and a checkpoint recomputed on another backend would drop other entries."""
    seed, offset = 0x123456789ABCDEF, 5 + 2**32
    planes = torch.tensor([[0, 1], [7, 2**33 + 1]])
    kept = torch_philox.keep(0.3, torch.tensor([seed, offset]), planes, (3, 9), (5, 22))
    for at in np.ndindex(2, 2):
        expected = philox.keep(
            0.3, seed=seed, offset=offset, plane=int(planes[at]), i=np.arange(3, 9), start=5, stop=22
        )
        np.testing.assert_array_equal(expected, kept[at].numpy())


def test_philox_in_torch_gives_the_published_words() -> None:
    """All-ones counter and key: the known-answer vector with every product at its largest."""
    ones = torch.tensor([0xFFFFFFFF])
    words = torch_philox.philox4x32((ones, ones, ones, ones), (ones, ones))
    assert [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD] == [int(word) for word in words]


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return made


def test_nothing_of_size_m_times_n_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """One forgotten mask of M x N and a long sequence runs out of memory; forward and backward stay in the budget."""
    monkeypatch.setattr(blocks, "BUDGET", 2**13)
    M = N = 256
    tensors = (torch.randn(1, 2, M, 8) for _ in range(3))
    options = Options(
        causal=True, mask=torch.rand(1, N) > 0.1, alibi_slopes=torch.rand(2), dropout_p=0.2, seed=1
    )
    problem, bound = bind(*tensors, options)
    with Largest() as largest:
        out, lse = math.forward(problem, bound)
        math.backward(
            problem, bound, out, lse, torch.randn_like(out), torch.randn_like(lse), frozenset("qkv")
        )
    # dropout words take four keys at a time and are stacked as int64, so a chunk may round up by a few keys
    rows = 2**13 // (2 * N)
    assert largest.elements <= 2**13 + 2 * rows * 4
    assert 2 * M * N > 8 * largest.elements


def test_only_the_gradients_that_are_asked_for_are_computed() -> None:
    """A frozen cache of keys must not cost the products of its gradient."""
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    problem, tensors = bind(q, k, v, Options(sink=torch.randn(2)))

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.mm)
            return func(*args, **(kwargs or {}))

    counts = {}
    for needs in ("v", "q", "k", "qkv"):
        with Products() as products:
            grads = math.backward(problem, tensors, None, None, torch.randn_like(q), None, frozenset(needs))
        counts[needs] = products.count
        given = {name for name, x in zip(GRADIENTS, grads, strict=True) if x is not None}
        assert set(needs) == given
    # q k^T is always built again; dv is one product, dP one, dq and dk one each
    assert {"v": 2, "q": 3, "k": 3, "qkv": 5} == counts


def test_float32_products_are_exact_whatever_is_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32 or bfloat16 products inside a float32 call are wrong in the third digit, and the setting is global."""
    settings = torch.backends.mkldnn.matmul
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket is torch.ops.aten.bmm:
                seen.append((settings.fp32_precision, args[0].dtype, torch.is_autocast_enabled("cpu")))
            return func(*args, **(kwargs or {}))

    problem, tensors = bind(*(torch.randn(1, 2, 6, 4) for _ in range(3)), Options())
    before = settings.fp32_precision
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16), Watch():
            out, lse = math.forward(problem, tensors)
            math.backward(problem, tensors, out, lse, out, None, frozenset("qkv"))
        assert "bf16" == settings.fp32_precision, "the caller's setting has to come back"
    finally:
        torch.set_float32_matmul_precision("highest")
        settings.fp32_precision = before
    assert {("ieee", torch.float32, False)} == set(seen)


def test_an_inherited_precision_stays_inherited() -> None:
    """Set back as a value of its own, it would ignore what the caller sets for all of torch later."""
    settings, general = torch.backends.mkldnn.matmul, torch.backends
    problem, tensors = bind(*(torch.randn(1, 1, 2, 4) for _ in range(3)), Options())
    before = settings.fp32_precision, general.fp32_precision
    try:
        settings.fp32_precision, general.fp32_precision = "none", "bf16"
        assert "bf16" == settings.fp32_precision
        math.forward(problem, tensors)
        assert "bf16" == settings.fp32_precision
        general.fp32_precision = "ieee"
        assert "ieee" == settings.fp32_precision
    finally:
        settings.fp32_precision, general.fp32_precision = before


def test_without_torch_it_refuses_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """`explain` lists every backend on a machine without torch; an ImportError there would be the wrong answer."""
    problem, _ = bind(*(np.zeros((1, 1, 1, 1)) for _ in range(3)), Options())
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(math, "_installed", lambda: False)
    assert "needs torch, which is not installed; pip install 'attnproof[torch]'" == math.why_not(problem)


def test_it_serves_what_no_kernel_does_and_comes_before_the_oracle() -> None:
    """On a GPU it is the last resort of `auto`: behind every kernel, before the reference that is never chosen."""
    assert dispatch.ORDER.index("math") == len(dispatch.ORDER) - 2
    assert "reference" == dispatch.ORDER[-1]
    problem, _ = bind(*(torch.zeros(1, 1, 1, 1, device="meta") for _ in range(3)), Options())
    assert math.why_not(problem) is None


def test_nan_and_infinity_stay_in_their_rows() -> None:
    """A NaN turned into zeros hides a broken model; one that spreads breaks a whole batch."""
    q, k, v = randn(1, 1, 4, 8), randn(1, 1, 5, 8), randn(1, 1, 5, 8)
    q[0, 0, 1, 0], q[0, 0, 2] = torch.nan, torch.inf
    k.abs_()
    out, lse = math.forward(*bind(q, k, v, Options()))
    assert [False, True, True, False] == out[0, 0].isnan().all(-1).tolist()
    assert [False, True, True, False] == lse[0, 0].isnan().tolist()
