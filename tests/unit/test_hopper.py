"""The Hopper backend where there is no Hopper: what it refuses, its numbers, and its device pieces run as Python."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton.experimental.gluon")

import torch
from hypothesis import given
from hypothesis import strategies as st

from attnproof import dispatch
from attnproof.backends import hopper
from attnproof.backends.hopper import arguments, compile_matrix, configs, counters, device, launch
from attnproof.masks import BIG
from attnproof.problem import Options, Problem, bind

from .hopper_model import load

PIECES = load()
PROBLEM = compile_matrix.Job(128, 128, "full").problem()


def band(**options: Any) -> Problem:
    """A problem with the band that these options mean."""
    x = torch.zeros(1, 1, 4, 8, dtype=torch.bfloat16)
    bound = bind(x, x, x, Options(**options)).problem
    return replace(PROBLEM, left=bound.left, right=bound.right, top_left=bound.top_left)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "unsupported", lambda: None)


# what it serves


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "cpu"}, "compute capability 9.0, and the tensors are on cpu"),
        ({"dtype": "float32"}, "got float32"),
        ({"rows": "packed"}, "got packed"),
        ({"D": 257}, "got D=257 and Dv=128"),
        ({"D": 0}, "got D=0"),
        ({"Dv": 20}, "got Dv=20"),
        ({"bias_shape": (1, 1, 1, 8192)}, "has no bias"),
        ({"has_keep": True}, "has no boolean mask"),
        ({"has_bounds": True}, "has no mask by bounds"),
        ({"dropout_p": 0.1}, "has no dropout"),
    ],
)
def test_what_it_does_not_serve_it_says_in_a_sentence(change: dict[str, Any], words: str) -> None:
    """Auto-dispatch goes on to triton, and a user who named it must learn why."""
    assert hopper.why_not(PROBLEM) is None
    reason = hopper.why_not(replace(PROBLEM, **change))
    assert reason is not None
    assert words in reason


def test_it_is_asked_before_triton() -> None:
    assert dispatch.ORDER.index("hopper") + 1 == dispatch.ORDER.index("triton")


def test_a_kernel_that_does_not_compile_is_said_once_and_then_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A newer Triton may change Gluon: the calls go to triton, visibly."""
    monkeypatch.setattr(device, "_FAILED", [])
    monkeypatch.setattr(device, "_unsupported", lambda: None)
    assert device.unsupported() is None
    with pytest.warns(RuntimeWarning, match="triton serves instead"):
        device.failed(ValueError("no async_load"))
    device.failed(ValueError("again"))
    assert "no async_load" in str(hopper.why_not(PROBLEM))


# tensors


def test_what_the_copy_engine_cannot_read_is_named() -> None:
    base = torch.zeros(2, 4, 64, 72, dtype=torch.bfloat16)
    assert arguments.undescribable(q=base[..., :64], k=base.transpose(1, 2)) is None
    assert "last stride is 72" in str(arguments.undescribable(q=base.transpose(2, 3)))
    assert "address" in str(arguments.undescribable(v=base[..., 1:65]))
    assert "stride 0" in str(arguments.undescribable(k=base[:, :1].expand(2, 4, 64, 72)))
    narrow = torch.zeros(2, 4, 64, 20, dtype=torch.bfloat16)
    assert "k: stride 20" in str(arguments.undescribable(k=narrow[:1, :1]))
    # the stride of an axis of length 1 is never used
    assert arguments.undescribable(q=narrow[:1, :1, :1]) is None


def test_descriptors_have_the_blocks_that_the_kernel_copies() -> None:
    q = torch.zeros(2, 100, 4, 80, dtype=torch.float16).transpose(1, 2)
    k = torch.zeros(2, 70, 1, 80, dtype=torch.float16).transpose(1, 2)
    facts = configs.facts(replace(PROBLEM, dtype="float16", D=80, Dv=80, H=4, Hkv=1, M=100, N=70))
    described = arguments.descriptors(facts, q, k, k, q)
    assert [[2, 4, 100, 80], [2, 1, 70, 80]] == [described[0].shape, described[1].shape]
    assert [32000, 80, 320, 1] == described[0].strides
    assert [5600, arguments.UNUSED_STEP, 80, 1] == described[1].strides
    blocks = [x.block_shape for x in described]
    assert [[1, 1, 64, 128], [1, 1, 128, 128], [1, 1, 128, 128], [1, 1, 64, 128]] == blocks


def test_out_and_lse_are_allocated_as_a_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short way allocates like q, or not; both give what the backends' contract asks for."""
    monkeypatch.setattr(launch, "_plans", {})
    monkeypatch.setattr(launch, "_near", {})
    monkeypatch.setattr(launch, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(launch, "current_device", lambda: -1)  # what a CPU tensor calls its device
    monkeypatch.setattr(launch, "run", lambda plan, tensors, out, lse: None)
    x = torch.zeros(2, 6, 3, 16, dtype=torch.bfloat16)
    for layout in ("bhmd", "bmhd"):
        for q, v in ((x, x), (x, x[..., :8]), (torch.zeros(2, 6, 3, 32, dtype=x.dtype)[..., :16], x)):
            problem, tensors = bind(q, x, v, Options(layout=layout))
            plan = launch.plan_of(problem, tensors)
            assert plan is launch.plan_of(problem, tensors)
            slow = launch.first(plan, problem, tensors)
            plan.fast = lambda *_: None
            for fast, right in zip(launch.forward(problem, tensors), slow, strict=True):
                assert (right.shape, right.stride(), right.dtype) == (fast.shape, fast.stride(), fast.dtype)


def test_equal_problems_share_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile makes the problem anew in every call: each would be compiled and launched the long way."""
    monkeypatch.setattr(launch, "_plans", {})
    monkeypatch.setattr(launch, "_near", {})
    monkeypatch.setattr(launch, "multiprocessors", lambda _: 132)
    x = torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)
    problem, tensors = bind(x, x, x, Options())
    plan = launch.plan_of(problem, tensors)
    for _ in range(3 * launch.MAX_NEAR):
        assert plan is launch.plan_of(replace(problem), tensors)
    assert len(launch._near) <= launch.MAX_NEAR and len(launch._plans) == 1
    wider = torch.zeros(1, 2, 8, 32, dtype=torch.bfloat16)[..., :16]
    assert plan is not launch.plan_of(problem, tensors._replace(k=wider))


def test_tensors_that_cannot_be_described_go_to_triton_with_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.say.cache_clear()
    monkeypatch.setattr(launch, "_plans", {})
    monkeypatch.setattr(launch, "_near", {})
    served: list[Problem] = []
    monkeypatch.setattr(
        launch, "portable", SimpleNamespace(forward=lambda problem, _: (served.append(problem), None))
    )
    q = torch.zeros(1, 1, 8, 24, dtype=torch.bfloat16)[..., 1:17]
    problem, tensors = bind(q, q, q, Options())
    for _ in range(2):
        launch.forward(problem, tensors)
    assert [problem, problem] == served
    assert ["hopper: q: address is not a multiple of 16 bytes; triton serves such calls"] == caplog.messages


# numbers


@pytest.mark.parametrize("scale", [0.125, 0.1, 3.0, -0.5, 0.0, 1e-38])
@pytest.mark.parametrize("softcap", [0.0, 30.0, 300.0])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_scores_times_lift_are_the_logits(scale: float, softcap: float, alibi: bool, causal: bool) -> None:
    """s * scale, capped, minus the distance: whichever part of it waits for the exponent."""
    problem = replace(PROBLEM, scale=scale, softcap=softcap, has_alibi=alibi, right=0 if causal else BIG)
    facts = configs.facts(problem)
    first, cap, unit, wide, lift = (np.float32(x) for x in arguments.factors(problem, facts))
    raw = np.linspace(-40, 40, 8 * 64, dtype=np.float32).reshape(8, 64)
    own, columns = np.arange(8) * 40 + 5, np.arange(64)
    slope = np.float32(0.25)
    score = PIECES.logits(raw, own, columns, first, cap, slope, facts)
    logit = scale * raw.astype(np.float64)
    if softcap:
        logit = softcap * np.tanh(logit / softcap)
    away = own[:, None] - columns[None, :]
    if alibi:
        logit = logit - 0.25 * np.abs(away)
    got = score * lift + (cap if facts.coarse_cap else 0)
    shown = (away >= 0) | (not causal)
    # what is added up is rounded in fp32, whatever is left of it
    rounding = 3e-7 * (abs(scale) * 40 + 80 * alibi) + 1e-36
    assert np.allclose(logit[shown], got[shown], rtol=1e-6, atol=rounding + 2e-5 * facts.coarse_cap)
    assert unit == pytest.approx(lift * np.log2(np.e), rel=1e-6)
    assert unit <= wide < 2 * unit * (1 + 1e-6)
    assert np.log2(wide) == int(np.log2(wide))
    assert lift > 0  # the maximum is taken before it


def test_heads_that_run_side_by_side_fit_the_cache() -> None:
    causal = replace(PROBLEM, right=0)
    assert 1 == arguments.together(PROBLEM)
    assert 8 == arguments.together(causal)
    assert 32 == arguments.together(replace(causal, N=1024))
    assert 1 == arguments.together(replace(causal, N=2**20))
    assert 16 == arguments.together(replace(causal, H=64, Hkv=32, N=8192))


def test_the_arguments_of_a_launch_are_those_of_the_kernel() -> None:
    """Numbers go by position: one too few would shift all that follow."""
    problem = replace(PROBLEM, M=100, N=70, H=6, Hkv=2, left=9, right=3, softcap=2.0, scale=0.5)
    facts = configs.facts(problem)
    tensors = SimpleNamespace(alibi_slopes=torch.zeros(2, 6), sink=torch.zeros(12)[::2])
    values = (*arguments.factors(problem, facts), *arguments.numbers(problem, facts, tensors))
    kernel: Any = launch.forward_kernel
    names = kernel.arg_names
    first = 4 + launch.POINTERS + 2
    arrays = ["q", "k", "v", "out", "lse", "counter", "slopes", "sink", "tiles", "bounds"]
    assert arrays == names[:first]
    assert ["C"] == names[first + len(values) :]
    given = dict(zip(names[first:], values, strict=False))
    expected = {
        "cap": 2.0,
        "lift": 4.0,
        "stride_slopeb": 6,
        "stride_slopeh": 1,
        "stride_sink": 2,
    }
    expected |= {"M": 100, "N": 70, "H": 6, "group": 3, "left": 9, "right": 3, "n_slots": 1, "n_planes": 12}
    assert expected == {name: given[name] for name in expected}


@pytest.mark.parametrize("x", [0.0, 1e-6, 0.1, 0.17, 0.18, 1.0, -3.0, 50.0, -1e30])
def test_tanh_is_exact_to_the_last_bits(x: float) -> None:
    """1 - 2 / (e^2x + 1) cancels near 0, where most scores are."""
    with np.errstate(over="ignore"):
        assert float(PIECES.tanh(np.float32(x))) == pytest.approx(
            np.tanh(np.float64(np.float32(x))), rel=5e-7
        )


# which keys


def seen(problem: Problem) -> np.ndarray:
    """[M, N], by definition."""
    i, j = np.arange(problem.M)[:, None], np.arange(problem.N)[None, :]
    away = j - i - (problem.N - problem.M)
    allowed = (away >= -problem.left) & (away <= problem.right)
    return allowed & (j <= i) if problem.top_left else allowed


BANDS = [
    {},
    {"causal": True},
    {"causal": True, "align": "top_left"},
    {"window": (0, 0)},
    {"window": (70, -1)},
    {"window": (-1, 5)},
    {"window": (200, 3)},
    {"window": (130, 0)},
    {"causal": True, "window": (500, 500)},
    {"causal": True, "align": "top_left", "window": (9, -1)},
]
LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 300, 511]


def tiles_of(problem: Problem, facts: configs.Facts) -> list[tuple[int, tuple[int, ...]]]:
    """(first query, key tiles) of every tile of queries, as the kernel computes them."""
    right = min(problem.right, problem.M - problem.N) if problem.top_left else problem.right
    return [
        (
            first,
            tuple(int(x) for x in PIECES.key_tiles(first, problem.M, problem.N, problem.left, right, facts)),
        )
        for first in range(0, problem.M, facts.block_m)
    ]


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("options", BANDS, ids=str)
def test_every_visible_key_is_visited_and_untested_tiles_are_wholly_visible(
    width: int, options: dict[str, Any]
) -> None:
    """A tile too few loses keys, a full one too many shows keys that are masked."""
    for m, n in itertools.product(LENGTHS, LENGTHS):
        problem = replace(band(**options), M=m, N=n, D=width, Dv=width)
        facts = configs.facts(problem)
        allowed = seen(problem)
        for first, (start, full_start, full_stop, stop) in tiles_of(problem, facts):
            rows = allowed[first : first + facts.block_m]
            assert start <= full_start <= full_stop <= stop
            assert stop > start
            step = facts.block_n
            assert not rows[:, : start * step].any() and not rows[:, stop * step :].any()
            assert rows[:, full_start * step : full_stop * step].all()
            if full_stop > full_start:
                assert full_stop * step <= n
            if not rows.any():
                assert start * step >= n  # a tile of zeros, past the last key
            # whatever needs a test is behind the first tile only on sides that the kernel has loops for
            if not facts.has_right:
                assert stop - full_stop <= 1
            if not facts.has_left:
                assert full_start in (start, full_stop)
            if not facts.masks_first:
                assert (full_start, full_stop) == (start, stop)


@pytest.mark.parametrize("options", BANDS, ids=str)
def test_an_edge_tile_hides_exactly_what_is_not_seen(options: dict[str, Any]) -> None:
    for m, n in [(1, 1), (65, 200), (200, 65), (130, 130)]:
        problem = replace(band(**options), M=m, N=n)
        facts = configs.facts(problem)
        right = min(problem.right, m - n) if problem.top_left else problem.right
        wide = np.concatenate([seen(problem), np.zeros((m, 64), bool)], axis=1)
        for first in range(0, n + 1, 64):
            s = np.zeros((m, 64), np.float32)
            hidden = PIECES.hide(s, np.arange(m), np.arange(64), first, n, n - m, problem.left, right, facts)
            part = wide[:, first : first + 64]
            assert (part == np.isfinite(hidden[:, : part.shape[1]])).all()


@given(
    slots=st.integers(1, 9), planes=st.integers(1, 40), together=st.integers(1, 40), heavy_last=st.booleans()
)
def test_every_tile_is_worked_on_once(slots: int, planes: int, together: int, heavy_last: bool) -> None:
    together = min(together, planes)
    places = {
        tuple(int(x) for x in PIECES.place(tile, slots, planes, together, heavy_last))
        for tile in range(slots * planes)
    }
    assert set(itertools.product(range(slots), range(planes))) == places


# softmax


def attend(s: np.ndarray, seen_by: np.ndarray, unit: float, block: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """(weights, lse) of raw scores by the kernel's own pieces, tiles of keys right to left."""
    unit32 = np.float32(unit * np.log2(np.e))
    wide = np.float32(2.0 ** np.ceil(np.log2(unit32)))
    m = np.full(s.shape[0], -np.inf, np.float32)
    t, sums, all_p = m, None, np.zeros(s.shape, np.float32)
    for first in reversed(range(0, s.shape[1], block)):
        cut = slice(first, first + block)
        part = np.where(seen_by[:, cut], s[:, cut], np.float32(-np.inf))
        p, m, new_t, point = PIECES.weights(part, m, unit32, wide)
        alpha = np.exp2(t - point)
        all_p *= alpha[:, None]
        all_p[:, cut] = p
        partial = p.sum(axis=1, keepdims=True).repeat(4, axis=1) / 4
        sums = partial if sums is None else sums * alpha[:, None] + partial
        t = new_t
    factor, lse = PIECES.finish(m, t, sums, unit32, np.float32(unit), block)
    return all_p * factor[:, None], lse


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 1e4, 1e7, 3e9, 1e20, 3e37])
@pytest.mark.parametrize("shift", [0.0, 1.0, -1.0])
def test_softmax_is_exact_from_the_smallest_to_the_largest_scores(size: float, shift: float) -> None:
    """m * unit is rounded: once scores are large, that alone overflowed or vanished without a unit of its own."""
    rng = np.random.default_rng(1)
    # few values, so that the largest is there many times
    s = (rng.integers(-8, 8, (8, 256)) * (size / 8) + shift * size).astype(np.float32)
    unit = 0.0883883
    p, lse = attend(s, np.ones(s.shape, bool), unit)
    z = s.astype(np.float64) * unit
    right = np.exp(z - z.max(axis=1, keepdims=True))
    right_lse = z.max(axis=1) + np.log(right.sum(axis=1))
    right /= right.sum(axis=1, keepdims=True)
    # neighbouring floats of large scores differ by whole units: the weight of all but the largest is then 0 in both
    assert np.allclose(p, right, rtol=2e-6 * max(1.0, np.abs(z).max() / 100), atol=1e-7)
    assert np.allclose(lse, right_lse, rtol=3e-7, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:divide by zero:RuntimeWarning")
def test_rows_without_a_key_are_dead_and_masked_tiles_before_a_key_make_no_nan() -> None:
    rng = np.random.default_rng(2)
    s = rng.standard_normal((4, 256)).astype(np.float32)
    allowed = np.ones(s.shape, bool)
    allowed[1] = False
    allowed[2, 10:] = False
    p, lse = attend(s, allowed, 1.0)
    assert not p[1].any() and lse[1] == -np.inf
    assert np.isfinite(p).all()
    assert p[2, :10].sum() == pytest.approx(1, abs=1e-6) and not p[2, 10:].any()
    factor, with_sink = PIECES.add_sink(np.ones(4, np.float32), lse, np.float32(0.5))
    assert with_sink[1] == pytest.approx(0.5)
    assert np.allclose(with_sink, np.logaddexp(lse, 0.5), rtol=1e-6)
    assert np.allclose(factor, np.exp(lse - with_sink), rtol=1e-6)
    factor, without = PIECES.add_sink(np.ones(4, np.float32), lse, np.float32(-np.inf))
    assert without[1] == -np.inf and np.allclose(without, lse) and np.isfinite(factor).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinity_reach_their_own_row(value: float) -> None:
    """A maximum that passes over NaN must not turn it into a plausible weight."""
    s = np.zeros((3, 256), np.float32)
    s[1, 100] = value
    p, lse = attend(s, np.ones(s.shape, bool), 1.0)
    assert [True, False, True] == np.isfinite(p).all(axis=1).tolist()
    assert np.isnan(lse[1]) and np.isfinite(lse[[0, 2]]).all()


def test_streams_and_captured_launches_do_not_share_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches that draw from one pair skip tiles of both."""
    state = {"capturing": False}
    cuda = SimpleNamespace(is_current_stream_capturing=lambda: state["capturing"])
    zeros = torch.zeros
    monkeypatch.setattr(
        counters,
        "torch",
        SimpleNamespace(cuda=cuda, int32=torch.int32, zeros=lambda *a, **_: zeros(*a, dtype=torch.int32)),
    )
    monkeypatch.setattr(counters, "_slabs", {})
    monkeypatch.setattr(counters, "_of_stream", {})
    state["capturing"] = True
    early = counters.pair(0, 1)
    state["capturing"] = False
    found = [early]
    for stream in (1, 2):
        found.append(counters.pair(0, stream))
        assert found[-1] is counters.pair(0, stream)
    state["capturing"] = True
    found += [counters.pair(0, 1) for _ in range(3)]
    assert len({x.data_ptr() for x in found}) == len(found)
    assert all(x.numel() >= 2 and not x.any() for x in found)


def test_big_is_what_the_problem_calls_unbounded() -> None:
    assert BIG == PROBLEM.left == PROBLEM.right
    assert not configs.facts(PROBLEM).masks_first
