"""A verify run from beginning to end: is the judge sharp, are the cases strong, what do the kernels do, in one record."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from attnproof.cases import Case
from attnproof.verify import isolation, loaders, records, steps, suite, workers
from attnproof.verify.blas import one_thread
from attnproof.verify.candidate import Candidate, Skip

Tick = Callable[[str], Any]
Progress = Callable[[str, int], AbstractContextManager[Tick]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run.

    Attributes:
        tier: name of the tier, for the record.
        cases: the cases, in order.
        seed: seed of the inputs.
        sharpness: "classics" for the mistakes that the documents name, "smoke" for every mutant, "" for none.
        adversarial: child processes, hidden seeds and shapes that nobody saw before.
        jobs: worker processes that share the cases; 0 judges in this process.
        patience: seconds until a silent worker is taken for dead.
        budget: seconds after which workers begin no further case of a kernel; what is left is skipped.
    """

    tier: str
    cases: tuple[Case, ...]
    seed: int = 0
    sharpness: str = "classics"
    adversarial: bool = False
    jobs: int = 0
    patience: float = isolation.PATIENCE
    budget: float = inf


@dataclass(frozen=True)
class Chosen:
    """The kernels of a run, and those that were asked for and are not here."""

    candidates: list[Candidate]
    absent: list[tuple[str, str]]


def choose(words: Sequence[str], backends: Sequence[str], device: str | None) -> Chosen:
    """The named kernels, or ours and, as peers, torch's.

    Raises:
        ValueError: nothing that was asked for can be judged here.
    """
    from attnproof.verify.adapters import ours, sdpa

    asked = [(word, False) for word in (*words, *(f"attnproof:{name}" for name in backends))]
    found: list[Candidate] = []
    absent: list[tuple[str, str]] = []
    if not words:
        able = {} if backends else ours.here()
        asked += [(f"attnproof:{name}", False) for name, reason in able.items() if reason is None]
        absent += [(f"attnproof:{name}", reason) for name, reason in able.items() if reason is not None]
        # a deviation of a kernel that we only look at is a finding about it, not a failure of ours
        asked += [(f"sdpa:{name}", True) for name in sdpa.names()]
    for word, peer in asked:
        try:
            candidate = loaders.load(word, device)
        except Skip as reason:
            absent.append((word, str(reason)))
            continue
        candidate.peer, candidate.word = peer, word
        found.append(candidate)
    if not found:
        raise ValueError("; ".join(f"{name}: {why}" for name, why in absent) or "nothing to judge")
    return Chosen(found, absent)


def run(chosen: Chosen, plan: Plan, progress: Progress | None = None) -> dict[str, Any]:
    """The record of the whole run.

    Raises:
        ValueError: workers for an adversarial plan, which has processes of its own.
    """
    if plan.adversarial and plan.jobs:
        raise ValueError(f"jobs: expected 0 in an adversarial run, got {plan.jobs}")
    started = time.monotonic()
    candidates = chosen.candidates
    if plan.adversarial:
        plan = isolation.hidden(plan)
        candidates = [isolation.isolated(candidate) for candidate in candidates]
    count = len(candidates) * (len(plan.cases) + 1) + len(plan.cases) + 1
    with one_thread(), (progress or _silent)("verify", count) as tick:
        results, score = (workers.run if plan.jobs else _here)(candidates, plan, tick)
    for candidate in candidates:
        isolation.close(candidate)
    protocol = {
        "tier": plan.tier,
        "seed": plan.seed,
        "adversarial": plan.adversarial,
        "cases": len(plan.cases),
        "seconds": round(time.monotonic() - started, 1),
        "candidates": [_about(candidate, results) for candidate in candidates],
        "absent": [{"name": name, "why": why} for name, why in chosen.absent],
        **score,
    }
    return records.record("verify", protocol, results, candidates[0].device)


def _here(
    candidates: Sequence[Candidate], plan: Plan, tick: Tick
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Results and the self-test's part of the protocol, all in this process."""
    answers = suite.Answers()
    score = steps.sharpness(plan, answers)
    tick("self-test")
    results: list[dict[str, Any]] = []
    for candidate in candidates:
        cases = [steps.served(case, candidate) for case in plan.cases]
        verdicts = suite.run(candidate, cases, plan.seed, answers, tick)
        results += [steps.entry(verdict, candidate) for verdict in verdicts]
        results += steps.guard_entry(candidate, plan.seed)
        tick(f"guards of {candidate.name}")
    judged = {result["case"] for result in results if result["status"] != suite.SKIP}
    asked = {case.id: case for one in candidates for case in (steps.served(c, one) for c in plan.cases)}
    for name, case in asked.items():
        if name in judged:
            results += steps.powerless(case, plan.seed, answers)
        tick(f"power of {name}")
    return results, score


@contextmanager
def _silent(title: str, steps: int) -> Generator[Tick, None, None]:
    yield lambda label: None


def _about(candidate: Candidate, results: list[dict[str, Any]]) -> dict[str, Any]:
    """What a candidate says about itself, and how much of the tier it was asked."""
    mine = [
        result for result in results if result["candidate"] == candidate.name and result["group"] != "guards"
    ]
    judged = [result for result in mine if result["status"] != suite.SKIP]
    tensors = {tensor["tensor"] for result in judged for tensor in result["tensors"]}
    missing = [word for word, name in (("lse", "lse"), ("backward", "dq")) if name not in tensors]
    coverage = f"checked {len(judged)} of {len(mine)}" + "".join(f", no {word}" for word in missing)
    return {
        "name": candidate.name,
        "own": candidate.own,
        "peer": candidate.peer,
        "numerics": candidate.kind.name,
        "align": candidate.traits.align,
        "device": candidate.device,
        "source_hash": candidate.source_hash,
        "coverage": coverage,
    }


def default_jobs(chosen: Chosen, adversarial: bool) -> int:
    """Workers where nobody named a number: on a GPU a bad kernel ends its process, and compiling takes the time."""
    on_gpu = any(candidate.device != "cpu" for candidate in chosen.candidates)
    return min(4, os.cpu_count() or 1) if on_gpu and not adversarial else 0


def with_seed(plan: Plan, seed: int) -> Plan:
    """The same run on other values."""
    return replace(plan, seed=seed)
