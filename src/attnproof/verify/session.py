"""A verify run from beginning to end: is the judge sharp, are the cases strong, what do the kernels do, in one record."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from attnproof.cases import Case
from attnproof.verify import isolation, loaders, power, probes, records, selftest, suite
from attnproof.verify.blas import one_thread
from attnproof.verify.candidate import Candidate, Skip

FINDING = "FINDING"
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
    """

    tier: str
    cases: tuple[Case, ...]
    seed: int = 0
    sharpness: str = "classics"
    adversarial: bool = False


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
        candidate.peer = peer
        found.append(candidate)
    if not found:
        raise ValueError("; ".join(f"{name}: {why}" for name, why in absent) or "nothing to judge")
    return Chosen(found, absent)


def run(chosen: Chosen, plan: Plan, progress: Progress | None = None) -> dict[str, Any]:
    """The record of the whole run."""
    answers = suite.Answers()
    candidates = chosen.candidates
    if plan.adversarial:
        plan = isolation.hidden(plan)
        candidates = [isolation.isolated(candidate) for candidate in candidates]
    steps = len(candidates) * (len(plan.cases) + 1) + len(plan.cases) + 1
    results: list[dict[str, Any]] = []
    with one_thread(), (progress or _silent)("verify", steps) as tick:
        score = _sharpness(plan, answers)
        tick("self-test")
        for candidate in candidates:
            cases = [served(case, candidate) for case in plan.cases]
            results += [
                _entry(verdict, candidate)
                for verdict in suite.run(candidate, cases, plan.seed, answers, tick)
            ]
            results += _guard_entry(candidate, plan)
            tick(f"guards of {candidate.name}")
        results += _powerless(candidates, plan, answers, results, tick)
    for candidate in candidates:
        isolation.close(candidate)
    protocol = {
        "tier": plan.tier,
        "seed": plan.seed,
        "adversarial": plan.adversarial,
        "cases": len(plan.cases),
        "candidates": [_about(candidate, results) for candidate in candidates],
        "absent": [{"name": name, "why": why} for name, why in chosen.absent],
        **score,
    }
    return records.record("verify", protocol, results, candidates[0].device)


@contextmanager
def _silent(title: str, steps: int) -> Generator[Tick, None, None]:
    yield lambda label: None


def served(case: Case, candidate: Candidate) -> Case:
    """The case in a dtype that the candidate takes: a kernel for one dtype is not asked for less because of that."""
    dtypes = candidate.traits.dtypes
    return case if not dtypes or case.dtype in dtypes else replace(case, dtype=dtypes[0])


def _sharpness(plan: Plan, answers: suite.Answers) -> dict[str, Any]:
    """The self-test that goes into the record: a verdict is worth what its judge finds."""
    if not plan.sharpness:
        return {"sharpness": "not measured in this run"}
    score = (
        selftest.classics(answers) if plan.sharpness == "classics" else selftest.mutants_of("smoke", answers)
    )
    return {
        "sharpness": score.sentence,
        "mutant_set": selftest.catalogue.digest(),
        "mutants": len(score.fates),
        "mutants_found": score.dead,
        "mutants_missed": score.survivors,
        "selftest": selftest.entries(score),
    }


def _entry(verdict: suite.Verdict, candidate: Candidate) -> dict[str, Any]:
    if verdict.status in (suite.FAIL, suite.INVALID) and candidate.peer:
        verdict.status = FINDING
    return records.from_verdict(verdict)


def _guard_entry(candidate: Candidate, plan: Plan) -> list[dict[str, Any]]:
    """The probes of a candidate as one more result."""
    found = probes.probe(candidate)
    if not found:
        return []
    broken = probes.failed(found)
    case = Case(name="guards", group="guards", dtype="any")
    status = suite.PASS if not broken else FINDING if candidate.peer else suite.INVALID
    reason = "; ".join(f"{name}: {text}" for name, text in broken.items())
    verdict = suite.Verdict(case, candidate.name, status, plan.seed, reason, guards=found)
    entry = records.from_verdict(verdict)
    return [
        entry
        | {
            "case": "guards",
            "describe": "probes of the kernel as a whole",
            "replay": f"attnproof verify -c {candidate.name} --tier smoke",
        }
    ]


def _powerless(
    asked: list[Candidate], plan: Plan, answers: suite.Answers, results: list[dict[str, Any]], tick: Tick
) -> list[dict[str, Any]]:
    """Cases that would accept a decoy; their passes prove nothing, and the run says so (G3)."""
    judged = {result["case"] for result in results if result["status"] != suite.SKIP}
    entries: list[dict[str, Any]] = []
    for case in {
        served(case, candidate).id: served(case, candidate) for candidate in asked for case in plan.cases
    }.values():
        if case.id in judged and not case.diagnostic:
            passing = power.accepted(case, plan.seed, answers)
            if passing:
                reason = f"accepts {', '.join(passing)} as the output"
                entries.append(
                    records.from_verdict(suite.Verdict(case, "decoy", suite.POWERLESS, plan.seed, reason))
                )
        tick(f"power of {case.id}")
    return entries


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


def with_seed(plan: Plan, seed: int) -> Plan:
    """The same run on other values."""
    return replace(plan, seed=seed)
