"""The measuring protocol: warm up, then interleave the candidates and keep every sample.

One *group* runs the candidates in order and then in reverse (A B B A for two): a drift that is linear over a group
cancels in the paired ratio. Each call gets its inputs from a small pool, so that pointers move and no candidate can
answer from a cache; outputs of timed calls are handed to a check.

Defaults are the documents' protocol: 10 warm-up calls and 50 timed ones, median and 95th percentile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .stats import Summary, summarise
from .timer import Timer

Prepare = Callable[[int], Callable[[], Any]]
Check = Callable[[str, int, Any], None]


@dataclass(frozen=True)
class Protocol:
    """How samples are taken.

    Attributes:
        warmup: calls of each candidate before the first sample.
        timed: samples of each candidate, rounded up to an even number (two per group).
        cold: empty the caches before each call; the record names the mode.
        slots: how many sets of inputs the calls rotate through.
    """

    warmup: int = 10
    timed: int = 50
    cold: bool = True
    slots: int = 3

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record, the cache mode by name."""
        return asdict(self) | {"cache": "cold" if self.cold else "warm", "order": "ABBA"}


@dataclass(frozen=True)
class Subject:
    """Something to time: ``prepare(slot)`` returns the call for one set of inputs, outside the timed span."""

    name: str
    prepare: Prepare


@dataclass(frozen=True)
class Samples:
    """Seconds of each timed call of one candidate, in the order they were taken."""

    name: str
    seconds: tuple[float, ...]

    @property
    def summary(self) -> Summary:
        """Median and spread in seconds."""
        return summarise(self.seconds)


def interleave(
    subjects: Sequence[Subject],
    timer: Timer,
    protocol: Protocol,
    *,
    check: Check | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Samples]:
    """Time the subjects side by side.

    Args:
        subjects: at least one; names must differ.
        timer: see ``timer.timer_for``.
        protocol: numbers of calls and the cache mode.
        check: called with (name, slot, result) for some of the timed results, after their group.
        progress: called with (groups done, groups in all).

    Returns:
        Samples by name; entries 2g and 2g + 1 of every candidate belong to group g.
    """
    if len({subject.name for subject in subjects}) != len(subjects):
        raise ValueError(f"subjects: expected different names, got {[s.name for s in subjects]}")
    calls = {s.name: [s.prepare(slot) for slot in range(protocol.slots)] for s in subjects}
    for name in calls:
        timer.run([calls[name][i % protocol.slots] for i in range(protocol.warmup)], cold=protocol.cold)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    groups = -(-protocol.timed // 2)
    rng = np.random.default_rng(0)
    for group in range(groups):
        # each group starts elsewhere, so that no candidate always follows the same neighbour
        names = list(np.roll(list(calls), group))
        order = names + names[::-1]
        slots = [(2 * group + (i >= len(names))) % protocol.slots for i in range(len(order))]
        seconds, results = timer.run(
            [calls[name][slot] for name, slot in zip(order, slots, strict=True)], cold=protocol.cold
        )
        for name, spent in zip(order, seconds, strict=True):
            taken[name].append(spent)
        if check is not None:
            pick = int(rng.integers(len(order)))
            check(order[pick], slots[pick], results[pick])
        if progress is not None:
            progress(group + 1, groups)
    return {name: Samples(name, tuple(seconds)) for name, seconds in taken.items()}
