r"""Statistics that hold on noisy machines.

Samples of one process share that process's luck (placement, clocks, neighbours), so two runs of the same code differ
by tens of per cent on a shared machine, and a rank test calls them different. Two calls made back to back share nearly
all of it. Hence: candidates are interleaved, a *pair* is the unit, and what is estimated is the median of paired
log-ratios with an interval from a block bootstrap (neighbouring pairs are correlated).

References: Bulej et al., "Duet benchmarking", ICPE 2020, section 3 (paired execution); Kuensch, "The jackknife and the
bootstrap for general stationary observations", Annals of Statistics 17(3), 1989 (block bootstrap).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

BLOCK = 5  # ABBA groups per bootstrap block
RESAMPLES = 2000
ELEMENTS = 1_000_000  # resampled values in all: long series get fewer resamples, never below 400


@dataclass(frozen=True)
class Summary:
    """Location and spread of one candidate's samples, in the unit of the samples.

    ``p95`` of 50 samples is its third largest: publish it, do not gate on it.
    """

    n: int
    median: float
    mad: float
    p05: float
    p95: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return asdict(self)


def summarise(samples: npt.ArrayLike) -> Summary:
    """Median, median absolute deviation and the 5th and 95th percentile."""
    x = np.asarray(samples, dtype=np.float64)
    if x.size == 0:
        raise ValueError("samples: expected at least one, got none")
    median = float(np.median(x))
    return Summary(
        x.size, median, float(np.median(np.abs(x - median))), *map(float, np.percentile(x, (5, 95)))
    )


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the length of the interval."""
        return (self.high - self.low) / 2

    def exp(self) -> Interval:
        """From log-ratio to ratio."""
        return Interval(*(float(np.exp(x)) for x in (self.value, self.low, self.high)))


def paired_log_ratio(a: npt.ArrayLike, b: npt.ArrayLike) -> Array:
    """log(a / b) of interleaved samples, one value per pair of neighbouring calls.

    Each half of an ABBA group is a pair of its own: a drift favours A in one half and B in the other, so it widens
    the distribution and leaves its median. Averaging the two halves first would let one interrupted call spoil both;
    on a busy two-core machine that doubles the error of the median.

    Args:
        a: samples of A in the order they were taken; group g holds slots 2g and 2g + 1.
        b: samples of B likewise.
    """
    log_a, log_b = (np.log(np.asarray(x, dtype=np.float64)) for x in (a, b))
    if log_a.size != log_b.size or log_a.size % 2:
        raise ValueError(f"samples: expected two of each per group, got {log_a.size} and {log_b.size}")
    return log_a - log_b


def median_interval(
    x: npt.ArrayLike, *, confidence: float = 0.99, seed: int = 0, block: int = 2 * BLOCK
) -> Interval:
    """Median with a moving-block bootstrap percentile interval; ``block`` neighbouring values stay together."""
    values = np.asarray(x, dtype=np.float64)
    if values.size < block:
        raise ValueError(f"pairs: expected at least {block}, got {values.size}")
    rng = np.random.default_rng(seed)
    blocks = -(-values.size // block)
    resamples = max(400, min(RESAMPLES, ELEMENTS // values.size))
    starts = rng.integers(0, values.size - block + 1, size=(resamples, blocks))
    picks = (starts[:, :, None] + np.arange(block)).reshape(resamples, -1)[:, : values.size]
    medians = np.median(values[picks], axis=1)
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(medians, (tail, 100 - tail))
    return Interval(float(np.median(values)), float(low), float(high))


def fit_exponent(n: npt.ArrayLike, y: npt.ArrayLike) -> Interval:
    """Slope of log y over log n with its 95% interval: 1 is linear, 2 quadratic.

    Three points or more; the interval is Student's t over the residuals.
    """
    log_n, log_y = (np.log(np.asarray(x, dtype=np.float64)) for x in (n, y))
    if log_n.size < 3:
        raise ValueError(f"points: expected at least 3, got {log_n.size}")
    centred = log_n - log_n.mean()
    slope = float(centred @ log_y / (centred @ centred))
    residual = log_y - log_y.mean() - slope * centred
    error = float(np.sqrt(residual @ residual / (log_n.size - 2) / (centred @ centred)))
    margin = _t975(log_n.size - 2) * error
    return Interval(slope, slope - margin, slope + margin)


# Student's t, 97.5% quantile for 1 to 10 degrees of freedom; beyond that the normal one is within 10%
_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def _t975(degrees: int) -> float:
    return _T975[degrees - 1] if degrees <= len(_T975) else 1.96 + 2.4 / degrees
