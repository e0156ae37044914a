"""Run a candidate over cases and judge each: the loop that everything else is built on.

The candidate always runs before the oracle, on poisoned memory, so nothing that it could find lying about is the
right answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnproof.cases import Case
from attnproof.verify import guards
from attnproof.verify.blas import one_thread
from attnproof.verify.candidate import Candidate, Outputs, Skip
from attnproof.verify.expected import control, expected, sampled_rows
from attnproof.verify.inputs import Inputs, build
from attnproof.verify.judge import TensorReport, judge, setting_for
from attnproof.verify.oracle import Answer

PASS, FAIL, SKIP, INVALID, POWERLESS = "PASS", "FAIL", "SKIP", "INVALID", "POWERLESS"


@dataclass
class Verdict:
    """What became of one case."""

    case: Case
    candidate: str
    status: str
    seed: int = 0
    reason: str = ""
    hint: str = ""
    tensors: list[TensorReport] = field(default_factory=list)
    guards: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Passed, or not asked."""
        return self.status in (PASS, SKIP)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def replay(self) -> str:
        """The command that runs this case alone and shows its worst row."""
        return f"attnproof explain-case {self.case.id} --candidate {self.candidate} --seed {self.seed}"


class Answers:
    """The oracle's answers, kept while they are small: several candidates and many mutants share them."""

    def __init__(self, budget: int = 1 << 30) -> None:
        self.budget, self.used = budget, 0
        self.kept: dict[tuple[Case, int], tuple[Answer, Answer | None]] = {}

    def of(self, inputs: Inputs) -> tuple[Answer, Answer | None]:
        """The answer, and the plain fp32 evaluation for fp32 cases."""
        key = (inputs.case, inputs.seed)
        if key not in self.kept:
            with np.errstate(all="ignore"):
                made = (expected(inputs), control(inputs) if inputs.case.dtype == "float32" else None)
            size = sum(
                np.asarray(part).nbytes for terms in made[0].tensors.values() for part in vars(terms).values()
            )
            if self.used + size > self.budget:
                return made
            self.used += size
            self.kept[key] = made
        return self.kept[key]


def run_case(
    candidate: Candidate, case: Case, seed: int = 0, answers: Answers | None = None, *, explain: bool = True
) -> Verdict:
    """One candidate on one case; `explain` asks for a hint where it fails."""
    reason = candidate.refuse(case)
    if reason:
        return Verdict(case, candidate.name, SKIP, seed, reason)
    started = time.monotonic()
    try:
        inputs = build(case, seed)
    except MemoryError:
        return Verdict(case, candidate.name, SKIP, seed, "not enough memory for the inputs")
    before = guards.fingerprint(inputs)
    try:
        with guards.poisoned(candidate), np.errstate(all="ignore"):
            outputs = candidate.call(inputs)
    except (Skip, NotImplementedError) as refusal:
        return Verdict(case, candidate.name, SKIP, seed, str(refusal).splitlines()[0])
    except Exception as error:  # a foreign kernel may raise anything; that is a verdict, not a crash of ours
        return Verdict(
            case,
            candidate.name,
            FAIL,
            seed,
            f"raised {type(error).__name__}: {_first_line(error)}",
            seconds=time.monotonic() - started,
        )
    changed = guards.changed(inputs, before)
    if changed:
        inputs = build(case, seed)  # the oracle must not see what the candidate made of them
    verdict = judge_outputs(candidate, inputs, outputs, answers or Answers(), explain=explain)
    verdict.seconds = time.monotonic() - started
    verdict.guards["G5 inputs kept"] = f"changed {', '.join(changed)}" if changed else "ok"
    if changed and verdict.status == PASS:
        verdict.status, verdict.reason = INVALID, f"wrote to its inputs: {', '.join(changed)}"
    return verdict


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else ""


def judge_outputs(
    candidate: Candidate, inputs: Inputs, outputs: Outputs, answers: Answers, *, explain: bool = True
) -> Verdict:
    """Compare what came out with the oracle's answer."""
    case = inputs.case
    answer, plain = answers.of(inputs)
    rows = sampled_rows(case, inputs.seed)
    if rows is not None:
        picked = {name: value[:, :, rows] for name, value in outputs.values.items() if name in ("out", "lse")}
        outputs = Outputs(picked, outputs.raw, outputs.notes)
    stored = {}
    if inputs.bias is not None:
        stored["dbias"] = inputs.bias.dtype
    setting = setting_for(case, answer, candidate.kind)
    with np.errstate(all="ignore"):
        reports = judge(outputs.values, answer, setting, plain, stored)
    verdict = Verdict(case, candidate.name, PASS, inputs.seed, tensors=reports, notes=outputs.notes)
    if any(
        not np.isfinite(np.asarray(report.value)).all() and not _expects_nan(case)
        for report in answer.tensors.values()
    ):
        verdict.status, verdict.reason = INVALID, "the oracle's answer is not finite (G2)"
    broken = [report for report in reports if not report.ok]
    if broken:
        verdict.status = FAIL
        verdict.reason = "; ".join(f"{report.tensor}: {_sentence(report)}" for report in broken)
        if not explain:
            return verdict
        from attnproof.verify.diagnose import diagnose

        verdict.hint = diagnose(candidate, inputs, outputs, answer, setting, broken)
    return verdict


def _expects_nan(case: Case) -> bool:
    return "not finite" in case.tags


def _sentence(report: TensorReport) -> str:
    check = report.failures()[0]
    if check.name == "shape":
        return check.why
    if check.limit == 0:
        return f"{int(check.value)} elements wrong ({check.name})"
    return f"{check.name} {check.value:.3g} > {check.limit:.3g}"


def run(
    candidate: Candidate,
    cases: Iterable[Case],
    seed: int = 0,
    answers: Answers | None = None,
    tick: Callable[[str], Any] | None = None,
) -> list[Verdict]:
    """One candidate on many cases; `tick` is called with the id of each case when it is done."""
    answers = answers or Answers()
    verdicts: list[Verdict] = []
    with one_thread():
        for case in cases:
            verdicts.append(run_case(candidate, case, seed, answers))
            if tick is not None:
                tick(case.id)
    return verdicts
