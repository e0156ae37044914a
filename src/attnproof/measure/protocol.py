"""The measuring protocol: warm up, then interleave the candidates and keep every sample.

One *group* runs the candidates in a random order and then in reverse (A B B A for two): a drift that is linear over a
group cancels in the paired ratio, and whatever a place in the group does to a call (the first one is slow, one that
follows itself is fast) falls on every candidate alike, so that identical code has a median ratio of 1. Each call gets
its inputs from a small pool, so that pointers move and no candidate can answer from a cache; outputs of timed calls are
handed to a check.

Defaults are the documents' protocol: 10 warm-up calls and 50 timed ones, median and 95th percentile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
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
        chunk: groups that run without a look at their results in between; they are held until then.
    """

    warmup: int = 10
    timed: int = 50
    cold: bool = True
    slots: int = 3
    chunk: int = 1

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


@dataclass
class Spent:
    """Seconds of an interleaving, its warm-up left out: by the wall's clock, and inside samples and flushes."""

    wall: float = 0.0
    busy: float = 0.0

    @property
    def between(self) -> float:
        """Host work between samples, over what the samples took."""
        return max(self.wall / self.busy - 1, 0.0) if self.busy > 0 else 0.0


def interleave(
    subjects: Sequence[Subject],
    timer: Timer,
    protocol: Protocol,
    *,
    check: Check | None = None,
    progress: Callable[[int, int], None] | None = None,
    spent: Spent | None = None,
    seed: int = 0,
) -> dict[str, Samples]:
    """Time the subjects side by side.

    Args:
        subjects: at least one; names must differ.
        timer: see ``timer.timer_for``.
        protocol: numbers of calls and the cache mode.
        check: called with (name, slot, result) for some of the timed results, after their group.
        progress: called with (groups done, groups in all).
        spent: what the timed part took is added to it.
        seed: of the order of the candidates within each group.

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
    rng = np.random.default_rng(seed)
    began, flushed = perf_counter(), 0.0 if spent is None else timer.flushed
    for start in range(0, groups, protocol.chunk):
        plan: list[tuple[str, int]] = []
        for group in range(start, min(start + protocol.chunk, groups)):
            names = [str(name) for name in rng.permutation(list(calls))]
            plan += [(name, 2 * group % protocol.slots) for name in names]
            plan += [(name, (2 * group + 1) % protocol.slots) for name in names[::-1]]
        seconds, results = timer.run([calls[name][slot] for name, slot in plan], cold=protocol.cold)
        for (name, _), each in zip(plan, seconds, strict=True):
            taken[name].append(each)
        if check is not None:
            pick = int(rng.integers(len(plan)))
            check(*plan[pick], results[pick])
        if progress is not None:
            progress(min(start + protocol.chunk, groups), groups)
    if spent is not None:
        spent.wall += perf_counter() - began
        spent.busy += timer.flushed - flushed + sum(map(sum, taken.values()))
    return {name: Samples(name, tuple(seconds)) for name, seconds in taken.items()}
