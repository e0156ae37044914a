"""The single steps of a verify run, as entries of its record: what a run in one process and a pool of workers share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnproof.cases import Case
from attnproof.verify import power, probes, records, selftest, suite
from attnproof.verify.candidate import Candidate

if TYPE_CHECKING:
    from attnproof.verify.session import Plan

FINDING = "FINDING"


def served(case: Case, candidate: Candidate) -> Case:
    """The case in a dtype that the candidate takes: a kernel for one dtype is not asked for less because of that."""
    dtypes = candidate.traits.dtypes
    return case if not dtypes or case.dtype in dtypes else replace(case, dtype=dtypes[0])


def sharpness(plan: Plan, answers: suite.Answers) -> dict[str, Any]:
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


def entry(verdict: suite.Verdict, candidate: Candidate) -> dict[str, Any]:
    """A verdict; what is wrong with a kernel that we only look at is a finding."""
    if verdict.status in (suite.FAIL, suite.INVALID) and candidate.peer:
        verdict.status = FINDING
    return records.from_verdict(verdict)


def guard_entry(candidate: Candidate, seed: int) -> list[dict[str, Any]]:
    """The probes of a candidate as one more result; none where it takes none of their cases."""
    found = probes.probe(candidate)
    if not found:
        return []
    broken = probes.failed(found)
    reason = "; ".join(f"{name}: {text}" for name, text in broken.items())
    return [guards_of(candidate, seed, suite.INVALID if broken else suite.PASS, reason, found)]


def guards_of(
    candidate: Candidate, seed: int, status: str, reason: str, found: dict[str, str]
) -> dict[str, Any]:
    """The result that stands for all probes of a candidate."""
    case = Case(name="guards", group="guards", dtype="any")
    verdict = suite.Verdict(case, candidate.name, status, seed, reason, guards=found)
    return entry(verdict, candidate) | {
        "case": "guards",
        "describe": "probes of the kernel as a whole",
        "replay": f"attnproof verify -c {candidate.name} --tier smoke",
    }


def powerless(case: Case, seed: int, answers: suite.Answers) -> list[dict[str, Any]]:
    """A case that would accept a decoy: its passes prove nothing, and the run says so (G3)."""
    passing = [] if case.diagnostic else power.accepted(case, seed, answers)
    if not passing:
        return []
    reason = f"accepts {', '.join(passing)} as the output"
    return [records.from_verdict(suite.Verdict(case, "decoy", suite.POWERLESS, seed, reason))]
