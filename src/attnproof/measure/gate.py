"""Gate A: is B slower than A? Paired, in one process, with the resolution of this very run beside the answer.

A, its twin (the same code again) and B are interleaved in the same groups. The ratio of A to its twin says what this
machine, now, cannot tell from nothing; the ratio of B to both is the answer. Samples are added until the 99% interval
of the median log-ratio decides, or the budget ends.

    REGRESSED   the interval lies above +delta        IMPROVED   it lies below -delta
    SAME        it lies within +-delta                AMBIGUOUS  the budget ended first

``delta`` is the asked-for threshold, or twice the error between A and its twin where that error's own 99% interval leaves
out 0 and it is larger. A difference must
also show in the second half of the samples alone: a neighbour that comes or goes once is no regression.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from .protocol import Protocol, Subject, interleave
from .stats import BLOCK, Array, Interval, median_interval, paired_log_ratio
from .timer import Timer

Verdict = Literal["SAME", "IMPROVED", "REGRESSED", "AMBIGUOUS"]
EXTENSION = 3
PER_GROUP = 4  # log-ratios of B in a group: two slots against A and its twin each


@dataclass(frozen=True)
class Gate:
    """Thresholds and budget.

    Attributes:
        threshold: smallest relative change worth reporting.
        batch: samples of each candidate before the first look; each later look adds half of what there is, since a look
            costs a bootstrap.
        budget: samples of each candidate at most.
        seconds: wall time at most, looked at between batches; ``EXTENSION`` times as long where the median so far lies
            beyond delta, since leaving a likely difference open is the dearer mistake.
        protocol: warm-up, cache mode and input slots.
    """

    threshold: float = 0.01
    batch: int = 200
    budget: int = 8000
    seconds: float = 60.0
    protocol: Protocol = Protocol(warmup=10, cold=False, chunk=10)  # noqa: RUF009  frozen


@dataclass(frozen=True)
class Comparison:
    """What gate A found. Ratios are time of B over time of A; ``samples`` of each were taken in ``seconds``."""

    verdict: Verdict
    ratio: Interval
    delta: float
    aa_error: float
    samples: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return asdict(self)

    def __str__(self) -> str:
        ratio = self.ratio
        return (
            f"{self.verdict}: B / A = {ratio.value:.4f} [{ratio.low:.4f}, {ratio.high:.4f}] "
            f"(99%, {self.samples} samples of each in {self.seconds:.1f} s; A against A {self.aa_error:.2%}, "
            f"resolution {self.delta:.2%})"
        )


def compare(
    a: Subject,
    b: Subject,
    timer: Timer,
    gate: Gate = Gate(),
    *,
    progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Comparison:
    """Run gate A on two subjects."""
    twin = replace(a, name=f"{a.name} again")
    own, diff = np.empty(0), np.empty(0)
    started, warmup = clock(), gate.protocol.warmup
    while True:
        more = min(max(gate.batch, len(own) // 4 * 2), max(gate.budget - len(own), gate.batch))
        how = replace(gate.protocol, timed=more, warmup=warmup)
        taken = interleave([a, twin, b], timer, how, seed=len(own))
        warmup = 0  # the next batch follows at once
        seconds = {name: samples.seconds for name, samples in taken.items()}
        own = np.concatenate([own, paired_log_ratio(seconds[twin.name], seconds[a.name])])
        # each of the two is symmetric around 0 when B equals A; their mean would not be, since slow outliers are
        # one-sided and an average of two baselines meets them more often
        both = [paired_log_ratio(seconds[b.name], seconds[x.name]) for x in (a, twin)]
        diff = np.concatenate([diff, np.stack(both, axis=1).ravel()])
        verdict, found, delta, aa_error = judge(own, diff, gate.threshold)
        if progress is not None:
            progress(len(own), gate.budget)
        spent = clock() - started
        limit = gate.seconds * (EXTENSION if abs(found.value) > delta else 1)
        if verdict != "AMBIGUOUS" or len(own) >= gate.budget or spent >= limit:
            return Comparison(verdict, found.exp(), float(np.expm1(delta)), aa_error, len(own), spent)


def judge(own: Array, diff: Array, threshold: float) -> tuple[Verdict, Interval, float, float]:
    """Verdict, interval of log(B / A), delta and error of A against its twin, from the log-ratios so far."""
    found = median_interval(diff, block=PER_GROUP * BLOCK)
    twins = median_interval(own, block=2 * BLOCK)
    aa_error, delta = abs(twins.value), float(np.log1p(threshold))
    if twins.low > 0 or twins.high < 0:
        # scatter around 0 is in the interval of B over A already; an error that excludes 0 is this machine's own
        delta = max(delta, 2 * aa_error)
    verdict = decide(found, delta)
    if verdict == "SAME" and delta > 1.5 * threshold:
        verdict = "AMBIGUOUS"  # a coarse resolution must not pass for equality
    if verdict in ("REGRESSED", "IMPROVED"):
        late = float(np.median(diff[diff.size // 2 :]))
        if abs(late) <= delta or (late > 0) != (found.value > 0):
            verdict = "AMBIGUOUS"
    return verdict, found, delta, aa_error


def decide(log_ratio: Interval, delta: float) -> Verdict:
    """The verdict of an interval of log(B / A)."""
    if log_ratio.low > delta:
        return "REGRESSED"
    if log_ratio.high < -delta:
        return "IMPROVED"
    if -delta <= log_ratio.low and log_ratio.high <= delta:
        return "SAME"
    return "AMBIGUOUS"


def together(found: Sequence[Comparison]) -> Verdict:
    """One verdict of several processes: a difference that most of them see and none contradicts, else no verdict."""
    verdicts = [one.verdict for one in found]
    pairs: tuple[tuple[Verdict, Verdict], ...] = (("REGRESSED", "IMPROVED"), ("IMPROVED", "REGRESSED"))
    for verdict, opposite in pairs:
        if 2 * verdicts.count(verdict) > len(verdicts) and opposite not in verdicts:
            return verdict
    return (
        "SAME"
        if 2 * verdicts.count("SAME") > len(verdicts) and set(verdicts) <= {"SAME", "AMBIGUOUS"}
        else "AMBIGUOUS"
    )
