"""Statistics against known answers, the gate on synthetic samples, the protocol under a fake clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from attnproof.measure import stats, trials
from attnproof.measure.gate import Comparison, Gate, compare, decide, judge, together
from attnproof.measure.protocol import Protocol, Subject, interleave
from attnproof.measure.stats import Interval
from attnproof.measure.timer import Call, HostTimer


class Model:
    """A timer without a clock: seconds by subject name, with drift, shared load and interrupted calls."""

    name, flushed = "model", 0.0

    def __init__(
        self, ratios: dict[str, float], *, seed: int, jitter: float = 0.01, tail: float = 0.05
    ) -> None:
        self.rng, self.ratios, self.jitter, self.tail, self.calls = (
            np.random.default_rng(seed),
            ratios,
            jitter,
            tail,
            0,
        )

    def run(self, calls: Sequence[Call], *, cold: bool) -> tuple[list[float], list[Any]]:
        seconds: list[float] = []
        for call in calls:
            load = 1 + 0.3 * np.sin(self.calls / 40)  # a neighbour comes and goes
            noise = np.exp(self.jitter * self.rng.standard_normal())
            late = 1 + (self.rng.random() < self.tail) * self.rng.exponential(5.0)
            seconds.append(1e-4 * self.ratios[call()] * load * noise * late)
            self.calls += 1
        return seconds, [None] * len(seconds)


def subject(name: str) -> Subject:
    return Subject(name, lambda slot: lambda: name)


def model(b: float, seed: int, **noise: float) -> Model:
    return Model({"a": 1.0, "a again": 1.0, "b": b}, seed=seed, **noise)


def test_a_summary_of_1_to_101_is_known() -> None:
    found = stats.summarise(range(1, 102))
    assert (101, 51.0, 25.0, 6.0, 96.0) == (found.n, found.median, found.mad, found.p05, found.p95)


def test_no_samples_have_no_summary() -> None:
    with pytest.raises(ValueError, match="at least one"):
        stats.summarise([])


def test_paired_ratios_do_not_see_what_both_calls_share() -> None:
    """A load that triples everything for a while must leave the ratio alone."""
    load = np.repeat([1.0, 3.0, 1.5, 2.0], 2)
    assert np.allclose(np.log(1.1), stats.paired_log_ratio(1.1 * load, load))


def test_paired_ratios_refuse_a_group_that_is_not_whole() -> None:
    with pytest.raises(ValueError, match="two of each"):
        stats.paired_log_ratio([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])


def test_the_interval_of_a_median_covers_the_truth_as_often_as_it_says() -> None:
    """99% intervals of correlated samples: without blocks they would be far too narrow."""
    covered = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        white = rng.standard_normal(404)
        series = white[4:] + white[3:-1] + white[2:-2] + white[1:-3] + white[:-4]
        found = stats.median_interval(series, block=20, seed=seed)
        covered += found.low <= 0 <= found.high
    assert covered >= 95


def test_the_exponent_of_a_square_law_is_2() -> None:
    n = np.array([1024, 2048, 4096, 8192])
    found = stats.fit_exponent(n, 3.0 * n**2)
    assert (2.0, 2.0, 2.0) == pytest.approx((found.value, found.low, found.high))
    noisy = stats.fit_exponent(n, n**1.0 * [1.02, 0.98, 1.01, 0.99])
    assert noisy.low < 1.0 < noisy.high


def test_an_exponent_needs_three_points() -> None:
    with pytest.raises(ValueError, match="at least 3"):
        stats.fit_exponent([1, 2], [1, 2])


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.02, 0.04, "REGRESSED"),
        (-0.04, -0.02, "IMPROVED"),
        (-0.005, 0.005, "SAME"),
        (0.0, 0.02, "AMBIGUOUS"),
        (-0.02, 0.02, "AMBIGUOUS"),
    ],
)
def test_a_verdict_follows_from_where_the_interval_lies(low: float, high: float, verdict: str) -> None:
    assert verdict == decide(Interval((low + high) / 2, low, high), 0.01)


def test_identical_code_is_not_called_different() -> None:
    verdicts = [compare(subject("a"), subject("b"), model(1.0, seed), Gate()).verdict for seed in range(40)]
    assert [] == [verdict for verdict in verdicts if verdict in trials.DIFFERENT]
    assert verdicts.count("SAME") >= 36


@pytest.mark.parametrize(("ratio", "verdict"), [(1.03, "REGRESSED"), (1 / 1.03, "IMPROVED")])
def test_a_change_of_3_percent_is_found_in_both_directions(ratio: float, verdict: str) -> None:
    verdicts = [compare(subject("a"), subject("b"), model(ratio, seed), Gate()).verdict for seed in range(40)]
    assert verdicts.count(verdict) >= 39


def test_noise_that_the_budget_cannot_settle_is_ambiguous_and_not_equal() -> None:
    """On a machine that cannot tell, the gate must not say SAME."""
    found = compare(subject("a"), subject("b"), model(1.0, 1, jitter=0.5), Gate(budget=400))
    assert ("AMBIGUOUS", 400) == (found.verdict, found.samples)


def test_a_difference_that_only_the_first_half_shows_is_no_verdict() -> None:
    """A neighbour that leaves once is not a regression."""
    rng = np.random.default_rng(0)
    own = 0.001 * rng.standard_normal(400)
    diff = np.concatenate([np.full(480, 0.05), np.full(320, 0.0)]) + 0.001 * rng.standard_normal(800)
    verdict, found, *_ = judge(own, diff, 0.01)
    assert found.value > 0.04
    assert "AMBIGUOUS" == verdict


def test_an_error_of_a_against_itself_raises_the_resolution() -> None:
    own, diff = np.full(400, 0.02), np.full(800, 0.03)
    verdict, _, delta, error = judge(own, diff, 0.01)
    assert ("AMBIGUOUS", 0.04, 0.02) == (verdict, pytest.approx(delta), pytest.approx(error))


@pytest.mark.parametrize(("median", "spent"), [(0.0, 30.0), (0.009, 30.0), (0.03, 80.0)])
def test_wall_time_ends_a_comparison_later_where_it_looks_like_a_difference(
    median: float, spent: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    undecided = ("AMBIGUOUS", Interval(median, -1.0, 1.0), 0.01, 0.0)
    monkeypatch.setattr("attnproof.measure.gate.judge", lambda *_: undecided)
    clock = iter(np.arange(0.0, 1000.0, 10.0))
    gate = Gate(seconds=25.0, budget=10**6, batch=10)
    found = compare(subject("a"), subject("b"), model(1.0, 1), gate, clock=lambda: float(next(clock)))
    assert ("AMBIGUOUS", spent) == (found.verdict, found.seconds)


def test_scatter_of_a_against_itself_does_not_raise_the_resolution() -> None:
    """It is in the interval of B over A already, and would hide a real change on a noisy machine."""
    rng = np.random.default_rng(6)
    own, diff = 0.2 * rng.standard_normal(200), 0.03 + 0.001 * rng.standard_normal(400)
    verdict, _, delta, error = judge(own, diff, 0.01)
    assert 2 * error > np.log1p(0.01)
    assert ("REGRESSED", np.log1p(0.01)) == (verdict, delta)


@pytest.mark.parametrize(
    ("verdicts", "together_"),
    [
        (("REGRESSED", "REGRESSED", "AMBIGUOUS"), "REGRESSED"),
        (("REGRESSED", "REGRESSED", "IMPROVED"), "AMBIGUOUS"),
        (("SAME", "SAME", "AMBIGUOUS"), "SAME"),
        (("SAME", "SAME", "REGRESSED"), "AMBIGUOUS"),
        (("AMBIGUOUS", "AMBIGUOUS", "SAME"), "AMBIGUOUS"),
        (("IMPROVED",), "IMPROVED"),
    ],
)
def test_processes_that_contradict_each_other_give_no_verdict(
    verdicts: tuple[Any, ...], together_: str
) -> None:
    found = [Comparison(verdict, Interval(1, 1, 1), 0.01, 0.0, 10, 1.0) for verdict in verdicts]
    assert together_ == together(found)


def test_calls_are_interleaved_forth_and_back_and_rotate_through_the_inputs() -> None:
    """Without the mirrored half a drift would favour whoever runs first."""
    order: list[tuple[str, int]] = []

    def recorder(name: str) -> Subject:
        return Subject(name, lambda slot: lambda: order.append((name, slot)))

    taken = interleave(
        [recorder("a"), recorder("b")], HostTimer(), Protocol(warmup=2, timed=4, cold=False, slots=2)
    )
    assert [("a", 0), ("a", 1), ("b", 0), ("b", 1)] == order[:4]
    names = [name for name, _ in order[4:]]
    for group in range(0, len(names), 4):
        assert names[group : group + 4] in (["a", "b", "b", "a"], ["b", "a", "a", "b"])
    assert {0, 1} == {slot for _, slot in order[4:]}
    assert [4, 4] == [len(samples.seconds) for samples in taken.values()]


def test_what_a_place_in_the_group_does_falls_on_everyone_alike() -> None:
    """The first call after a pause is slow and one that follows itself fast: identical code must still have ratio 1."""

    class Places:
        name, flushed = "places", 0.0

        def run(self, calls: Sequence[Call], *, cold: bool) -> tuple[list[float], list[Any]]:
            names = [call() for call in calls]
            return [
                1 + 0.2 * (at == 0) - 0.1 * (at > 0 and names[at - 1] == names[at])
                for at in range(len(names))
            ], names

    taken = interleave([subject(name) for name in "abc"], Places(), Protocol(0, 6000, False, 1, chunk=1))
    for pair in ("ab", "bc", "ac"):
        ratios = stats.paired_log_ratio(*(taken[name].seconds for name in pair))
        assert abs(np.mean(np.sign(ratios))) < 0.05


def test_two_subjects_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="different names"):
        interleave([subject("a"), subject("a")], HostTimer(), Protocol())


def test_the_clock_of_the_timer_cannot_be_exchanged_by_what_it_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that replaces the clock would look as fast as it likes."""
    import time

    monkeypatch.setattr(time, "perf_counter_ns", lambda: 0)
    seconds, results = HostTimer().run([lambda: sum(range(2000))], cold=False)
    assert seconds[0] > 0
    assert [sum(range(2000))] == results


def test_a_cold_call_is_preceded_by_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnproof.measure import timer

    monkeypatch.setattr(timer, "FLUSH_BYTES_CPU", 4096)
    seen: list[float] = []
    clock = HostTimer()
    clock.run([lambda: seen.append(float(clock._flush[0]))] * 2, cold=True)
    assert [1.0, 2.0] == seen


def test_a_planted_slowdown_takes_its_share() -> None:
    """The trials' power is only worth what the plant really is."""
    work = HostTimer()
    spin = trials.spun(lambda: sum(range(20000)), 1.0)
    plain = min(work.run([lambda: sum(range(20000))] * 20, cold=False)[0])
    assert min(work.run([spin] * 20, cold=False)[0]) >= 1.5 * plain


def test_the_score_of_trials_counts_ambiguous_as_neither() -> None:
    rows = [{"kind": "same", "verdict": v, "seconds": 1.0} for v in ("SAME", "AMBIGUOUS", "IMPROVED", "SAME")]
    rows += [{"kind": "slower", "verdict": v, "seconds": 3.0} for v in ("REGRESSED", "AMBIGUOUS")]
    found = trials.score(rows)
    assert (0.25, 0.5) == (found["called_different"], found["found"])
    assert pytest.approx(10 / 6) == found["seconds_per_trial"]
