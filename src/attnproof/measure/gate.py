"""Gate A: is B slower than A? Paired, in one process, with the resolution of this very run beside the answer.

A, its twin (the same code again) and B are interleaved in the same groups. The ratio of A to its twin says what this
machine, now, cannot tell from nothing; the ratio of B to both is the answer. Samples are added until the 99% interval
of the median log-ratio decides, or the budget ends.

    REGRESSED   the interval lies above +delta        IMPROVED   it lies below -delta
    SAME        it lies within +-delta                AMBIGUOUS  the budget ended first

``delta`` is the larger of the asked-for threshold and twice the error seen between A and its twin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from .protocol import Protocol, Subject, interleave
from .stats import Interval, median_interval, paired_log_ratio
from .timer import Timer

Verdict = Literal["SAME", "IMPROVED", "REGRESSED", "AMBIGUOUS"]


@dataclass(frozen=True)
class Gate:
    """Thresholds and budget.

    Attributes:
        threshold: smallest relative change worth reporting.
        batch: samples of each candidate added at a time.
        budget: samples of each candidate at most.
        protocol: warm-up, cache mode and input slots.
    """

    threshold: float = 0.01
    batch: int = 100
    budget: int = 2000
    protocol: Protocol = Protocol(warmup=10, cold=False)  # noqa: RUF009  frozen


@dataclass(frozen=True)
class Comparison:
    """What gate A found. Ratios are time of B over time of A."""

    verdict: Verdict
    ratio: Interval
    delta: float
    aa_error: float
    pairs: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return asdict(self)

    def __str__(self) -> str:
        ratio = self.ratio
        return (
            f"{self.verdict}: B / A = {ratio.value:.4f} [{ratio.low:.4f}, {ratio.high:.4f}] "
            f"(99%, {self.pairs} pairs; resolution {self.delta:.2%})"
        )


def compare(
    a: Subject,
    b: Subject,
    timer: Timer,
    gate: Gate = Gate(),
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Run gate A on two subjects."""
    twin = replace(a, name=f"{a.name} again")
    own, diff = np.empty(0), np.empty(0)
    while True:
        taken = interleave([a, twin, b], timer, replace(gate.protocol, timed=gate.batch))
        seconds = {name: samples.seconds for name, samples in taken.items()}
        own = np.concatenate([own, paired_log_ratio(seconds[twin.name], seconds[a.name])])
        # each of the two is symmetric around 0 when B equals A; their mean would not be, since slow outliers are
        # one-sided and an average of two baselines meets them more often
        both = [paired_log_ratio(seconds[b.name], seconds[x.name]) for x in (a, twin)]
        diff = np.concatenate([diff, np.stack(both, axis=1).ravel()])
        found = median_interval(diff)
        aa_error = abs(float(np.median(own)))
        delta = max(float(np.log1p(gate.threshold)), 2 * aa_error)
        verdict = decide(found, delta)
        if verdict == "SAME" and delta > 1.5 * gate.threshold:
            verdict = "AMBIGUOUS"  # a coarse resolution must not pass for equality
        if progress is not None:
            progress(len(diff), gate.budget)
        if verdict != "AMBIGUOUS" or len(diff) >= gate.budget:
            return Comparison(verdict, found.exp(), float(np.expm1(delta)), aa_error, len(own))


def decide(log_ratio: Interval, delta: float) -> Verdict:
    """The verdict of an interval of log(B / A)."""
    if log_ratio.low > delta:
        return "REGRESSED"
    if log_ratio.high < -delta:
        return "IMPROVED"
    if -delta <= log_ratio.low and log_ratio.high <= delta:
        return "SAME"
    return "AMBIGUOUS"
