"""The kill matrix: which case kills which mutant, and the tiers that follow from it.

A mutant dies on a case when the case does not pass; it dies by a guard when a probe of the candidate fails. Mutants
whose output on a case is bit for bit that of the correct kernel are dormant there and are not judged again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnproof.cases import Case
from attnproof.verify import probes
from attnproof.verify.blas import one_thread
from attnproof.verify.candidate import Candidate
from attnproof.verify.guards import poisoned
from attnproof.verify.inputs import build
from attnproof.verify.judge import TensorReport
from attnproof.verify.mutants import kernel
from attnproof.verify.mutants.catalogue import OPERATORS
from attnproof.verify.mutants.operator import Operator
from attnproof.verify.suite import PASS, SKIP, Answers, Verdict, judge_outputs, run_case

GUARDS = "guards"  # the column of the probes


@dataclass
class Fate:
    """What became of one mutant: the cases that killed it, how the first one did, and what the fixed thresholds of the
    second opinion said of all cases up to then.
    """

    operator: Operator
    killed_by: list[str] = field(default_factory=list)
    how: str = ""
    classic: str = "PASS"
    seconds: float = 0.0

    @property
    def dead(self) -> bool:
        """Whether anything killed it."""
        return bool(self.killed_by)


def fate(
    operator: Operator, cases: Iterable[Case], seed: int, answers: Answers, *, first_only: bool = True
) -> Fate:
    """Run a mutant until a case kills it, or over all cases."""
    started = time.monotonic()
    found = Fate(operator)
    mutant = kernel.mutate(operator)
    for case in cases:
        verdict = run_case(mutant, case, seed, answers, explain=False)
        if not all(report.classic_ok for report in verdict.tensors if report.tensor == "out"):
            found.classic = "FAIL"
        if verdict.status not in (PASS, SKIP):
            _kill(found, case.id, verdict.reason)
            if first_only:
                break
    if not found.dead or not first_only:
        broken = probes.failed(probes.probe(kernel.mutate(operator)))
        if broken:
            _kill(found, GUARDS, "; ".join(f"{name}: {text}" for name, text in broken.items()))
    found.seconds = time.monotonic() - started
    return found


def _kill(found: Fate, by: str, how: str) -> None:
    found.killed_by.append(by)
    if not found.how:
        found.how = f"{by}: {how}"


def self_test(
    cases: Sequence[Case],
    seed: int = 0,
    operators: Sequence[Operator] = OPERATORS,
    answers: Answers | None = None,
    tick: Callable[[str], Any] | None = None,
) -> list[Fate]:
    """The fate of every mutant, each until its first kill."""
    answers = answers or Answers()
    fates: list[Fate] = []
    with one_thread():
        for operator in operators:
            fates.append(fate(operator, cases, seed, answers))
            if tick is not None:
                tick(operator.name)
    return fates


def full_matrix(
    cases: Sequence[Case],
    seed: int = 0,
    operators: Sequence[Operator] = OPERATORS,
    tick: Callable[[str], Any] | None = None,
) -> dict[str, list[str]]:
    """Every case against every mutant: names of the mutants that each case (and the guards) kill."""
    killers: dict[str, list[str]] = {case.id: [] for case in cases} | {GUARDS: []}
    with one_thread():
        mutants = [(operator, kernel.mutate(operator)) for operator in operators]
        for case in cases:
            killers[case.id] = _column(case, seed, mutants)
            if tick is not None:
                tick(case.id)
        for operator in operators:
            if probes.failed(probes.probe(kernel.mutate(operator))):
                killers[GUARDS].append(operator.name)
    return killers


def _column(case: Case, seed: int, mutants: Sequence[tuple[Operator, Candidate]]) -> list[str]:
    """Names of the mutants that one case kills."""
    answers = Answers()
    with np.errstate(all="ignore"):
        baseline = kernel.correct().call(build(case, seed)).values
    return [
        operator.name
        for operator, mutant in mutants
        if _dies(operator, mutant, case, seed, baseline, answers)
    ]


def _dies(
    operator: Operator, mutant: Candidate, case: Case, seed: int, baseline: dict[str, Any], answers: Answers
) -> bool:
    if operator.wrap:
        return run_case(mutant, case, seed, answers, explain=False).status not in (PASS, SKIP)
    inputs = build(case, seed)
    try:
        with poisoned(mutant), np.errstate(all="ignore"):
            outputs = mutant.call(inputs)
    except Exception:  # a mutant that crashes is a dead one
        return True
    if all(np.array_equal(outputs.values[name], value, equal_nan=True) for name, value in baseline.items()):
        return False
    return judge_outputs(mutant, inputs, outputs, answers, explain=False).status not in (PASS, SKIP)


def greedy(
    killers: dict[str, list[str]],
    cost: dict[str, float],
    share: float = 1.0,
    times: int = 1,
    start: Sequence[str] = (),
) -> list[str]:
    """Cases that kill `share` of the mutants at least `times` each, chosen by kills per second."""
    mutants = sorted({name for names in killers.values() for name in names})
    possible = {
        name: sum(name in names for case, names in killers.items() if case != GUARDS) for name in mutants
    }
    need = {
        name: min(times, possible[name])
        for name in mutants
        if name not in killers.get(GUARDS, ()) or times > 1
    }
    chosen = list(start)
    for case in chosen:
        for name in killers.get(case, ()):
            need[name] = need.get(name, 0) - 1
    goal = sum(min(times, possible[name]) for name in need) * (1 - share)
    while sum(max(left, 0) for left in need.values()) > goal:
        gains = {
            case: sum(need.get(name, 0) > 0 for name in names) / cost.get(case, 1.0)
            for case, names in killers.items()
            if case not in chosen and case != GUARDS
        }
        best = max(gains, key=lambda case: gains[case], default=None)
        if best is None or gains[best] == 0:
            break
        chosen.append(best)
        for name in killers[best]:
            need[name] = need.get(name, 0) - 1
    return chosen


@dataclass
class Peak:
    """The largest numbers that a correct kernel reached: how much room the limits leave (the calibration)."""

    results: int = 0
    z_rms: float = 0.0
    z_max: float = 0.0
    used: float = 0.0
    closest: float = 0.0
    check: str = ""

    def add(self, report: TensorReport, case: Case) -> None:
        """Look at one more tensor."""
        self.results += 1
        self.used = max(self.used, report.bound_used)
        if case.statistical:
            self.z_rms = max(self.z_rms, report.z_rms or 0.0)
            self.z_max = max(self.z_max, report.z_max or 0.0)
        for check in report.checks:
            if check.limit and check.value / check.limit > self.closest:
                self.closest, self.check = check.value / check.limit, f"{check.name} of {case.id}"

    def with_peak(self, other: Peak) -> Peak:
        """The larger of both in everything."""
        first = max(self, other, key=lambda peak: peak.closest)
        return Peak(
            self.results + other.results,
            max(self.z_rms, other.z_rms),
            max(self.z_max, other.z_max),
            max(self.used, other.used),
            first.closest,
            first.check,
        )


@dataclass
class Green:
    """Correct kernels over many seeds: alarms, of which there must be none, and peaks by (kernel, dtype, tensor)."""

    alarms: list[Verdict] = field(default_factory=list)
    peaks: dict[tuple[str, str, str], Peak] = field(default_factory=dict)
    judged: Counter[tuple[str, str]] = field(default_factory=Counter)
    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, verdict: Verdict) -> None:
        """Count one verdict."""
        key = (verdict.candidate, verdict.case.dtype)
        (self.skipped if verdict.status == SKIP else self.judged)[key] += 1
        if verdict.status not in (PASS, SKIP):
            self.alarms.append(verdict)
        for report in verdict.tensors:
            peak = self.peaks.setdefault((verdict.candidate, verdict.case.dtype, report.tensor), Peak())
            peak.add(report, verdict.case)

    def merge(self, other: Green) -> None:
        """Add what another process found."""
        self.alarms += other.alarms
        self.judged.update(other.judged)
        self.skipped.update(other.skipped)
        for key, peak in other.peaks.items():
            self.peaks[key] = self.peaks.get(key, Peak()).with_peak(peak)


def judge_correct(
    candidates: Sequence[Candidate],
    cases: Iterable[Case],
    seeds: Iterable[int],
    tick: Callable[[str], Any] | None = None,
) -> Green:
    """Every correct kernel on every case and seed; the oracle answers each question once."""
    found, seeds = Green(), list(seeds)
    with one_thread():
        for case in cases:
            for seed in seeds:
                answers = Answers()
                for candidate in candidates:
                    found.add(run_case(candidate, case, seed, answers, explain=False))
            if tick is not None:
                tick(f"correct kernels on {case.id}")
    return found
