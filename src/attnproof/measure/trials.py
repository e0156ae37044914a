"""How good is the gate on this machine, now? Trials with identical code, and with a spin of known size planted in B.

The planted slowdown lasts a share of the call it follows, as slower code would: it stretches with the machine's load.
Inputs are the same arrays for A, its twin and B, so that where they lie makes no difference between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Literal

from . import implementations
from .bench import Bench
from .gate import Gate, compare
from .journal import Journal
from .protocol import Subject
from .shapes import Shape, parse
from .timer import HostTimer, Timer

Kind = Literal["same", "slower"]
SHAPE = parse("N128 H1 D64")
DIFFERENT = ("REGRESSED", "IMPROVED")
# calls of tens of microseconds: a second holds thousands of pairs, and few calls are interrupted at all
GATE = Gate(budget=20_000, seconds=4.0)


def spun(call: Callable[[], Any], share: float) -> Callable[[], Any]:
    """``call``, followed by a spin that takes ``share`` of the time that it took."""

    def slower() -> Any:
        start = perf_counter_ns()
        result = call()
        extra = int((perf_counter_ns() - start) * share)
        # from here on, so that the spin comes on top of the wrapping that A has too
        stop = perf_counter_ns() + extra
        while perf_counter_ns() < stop:
            pass
        return result

    return slower


def planted(subject: Subject, share: float, name: str) -> Subject:
    """A subject that is slower by ``share``; with 0 it has all of the wrapping and none of the spin."""
    return Subject(name, lambda slot: spun(subject.prepare(slot), share))


@dataclass(frozen=True)
class Plan:
    """Trials of each kind, the planted share, and what is called."""

    trials: int
    share: float = 0.03
    name: str = "sdpa:flash"
    shape: Shape = SHAPE
    gate: Gate = GATE


def run(
    plan: Plan,
    journal: Journal,
    *,
    timer: Timer | None = None,
    tick: Callable[[str], Any] = lambda text: None,
) -> list[dict[str, Any]]:
    """All trials, kinds in turn; those that the journal holds are not repeated."""
    bench = Bench(plan.shape, "cpu", plan.gate.protocol.slots)
    one = implementations.load(plan.name)
    found = bench.verdict(one)
    if not found.green:
        raise ValueError(f"trials: expected a call with a green verdict, got {plan.name}: {found.reason}")
    call = bench.subject(one)
    a = planted(call, 0.0, "A")
    kinds: Mapping[Kind, Subject] = {
        "same": planted(call, 0.0, "B"),
        "slower": planted(call, plan.share, "B"),
    }
    rows: list[dict[str, Any]] = []
    for number in range(plan.trials):
        for kind, b in kinds.items():
            step = f"{kind} {number}"
            if step not in journal:
                journal.put(step, compare(a, b, timer or HostTimer(), plan.gate).as_dict())
            rows.append({"kind": kind, "trial": number, **journal[step]})
            tick(f"{step}: {rows[-1]['verdict']}")
    return rows


def score(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of each verdict, and the two shares that the bars are about; AMBIGUOUS is neither."""
    counts: dict[str, dict[str, int]] = {"same": {}, "slower": {}}
    spent = 0.0
    for row in rows:
        mine = counts[row["kind"]]
        mine[row["verdict"]] = mine.get(row["verdict"], 0) + 1
        spent += row["seconds"]
    same, slower = (sum(counts[kind].values()) for kind in ("same", "slower"))
    return {
        "verdicts": counts,
        "called_different": sum(counts["same"].get(verdict, 0) for verdict in DIFFERENT) / max(same, 1),
        "found": counts["slower"].get("REGRESSED", 0) / max(slower, 1),
        "seconds_per_trial": spent / max(same + slower, 1),
    }
