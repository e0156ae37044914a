"""Is the verifier itself to be trusted? Broken kernels must die, correct ones must live.

The score of a self-test says how many broken kernels the cases of a tier find; it is stored in every verify record, so
a verdict carries the proof of how sharp the judge was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnproof.cases import Case
from attnproof.verify import controls, tiers
from attnproof.verify.candidate import Candidate, Outputs, Traits
from attnproof.verify.inputs import Inputs
from attnproof.verify.mutants import catalogue, kernel, matrix
from attnproof.verify.suite import Answers

PEERS = ("sdpa:math", "torch:eager")  # correct in every case that they take, on CPUs and GPUs


@dataclass
class Score:
    """The outcome of a self-test."""

    tier: str
    fates: list[matrix.Fate]
    green: matrix.Green
    good: list[str]

    @property
    def alarms(self) -> list[Any]:
        """Verdicts of correct kernels that are not passes."""
        return self.green.alarms

    @property
    def dead(self) -> int:
        """Broken kernels that were found."""
        return sum(fate.dead for fate in self.fates)

    @property
    def survivors(self) -> list[str]:
        """Broken kernels that were not."""
        return [fate.operator.name for fate in self.fates if not fate.dead]

    @property
    def sentence(self) -> str:
        """For records and reports."""
        found = f"{self.dead} of {len(self.fates)} broken kernels found by tier {self.tier}"
        if self.good:
            found += f", {len(self.alarms)} false alarms on {len(self.good)} correct ones"
        return f"{found} (mutant set {catalogue.digest()})"


def correct_kernels() -> Iterator[Candidate]:
    """Kernels that must pass: ours that run here, independent ones of every class, and torch's unfused forms."""
    yield kernel.correct()
    for control in controls.CONTROLS:
        yield from_control(control)
    from attnproof.verify import loaders
    from attnproof.verify.adapters import ours
    from attnproof.verify.candidate import Skip

    for word in (*(f"attnproof:{name}" for name in ours.names() if name != "streaming"), *PEERS):
        try:
            yield loaders.load(word)
        except Skip:
            continue


def from_control(control: controls.Control) -> Candidate:
    """An independent correct kernel as a candidate."""

    def call(inputs: Inputs) -> Outputs:
        with np.errstate(all="ignore"):
            values = controls.run(control, inputs)
        return Outputs(values, dict(values))

    traits = Traits(numerics=control.kind, arrays="numpy")
    return Candidate(
        f"control {control.name}", call, traits, refuse=lambda case: controls.serves(control, case)
    )


def run(
    tier: str,
    *,
    seed: int = 0,
    seeds: int = 1,
    names: Sequence[str] = (),
    tick: Callable[[str], Any] | None = None,
    answers: Answers | None = None,
) -> Score:
    """Mutants against the cases of a tier, then correct kernels over `seeds` seeds."""
    cases = strongest_first(tiers.cases(tier))
    operators = [catalogue.find(name) for name in names] or list(catalogue.OPERATORS)
    fates = matrix.self_test(cases, seed, operators, answers, tick)
    candidates = list(correct_kernels())
    green = matrix.judge_correct(candidates, cases, range(seed, seed + seeds), tick)
    return Score(tier, fates, green, [candidate.name for candidate in candidates])


def strongest_first(cases: Sequence[Case]) -> list[Case]:
    """The cases that kill most mutants come first, so that most mutants die at once."""
    order = {identifier: index for index, identifier in enumerate(tiers.stored()["smoke"])}
    return sorted(cases, key=lambda case: order.get(case.id, len(order)))


def classics(answers: Answers | None = None) -> Score:
    """A quick look at the sharpness: the mistakes that the source documents name, on the smoke tier."""
    cases = strongest_first(tiers.cases("smoke"))
    operators = [catalogue.find(name) for name in catalogue.CLASSICS]
    return Score("smoke", matrix.self_test(cases, 0, operators, answers), matrix.Green(), [])


def mutants_of(tier: str, answers: Answers | None = None) -> Score:
    """Every broken kernel against a tier, without the correct ones."""
    return Score(
        tier, matrix.self_test(strongest_first(tiers.cases(tier)), 0, answers=answers), matrix.Green(), []
    )


def of_compiled(word: str, tier: str, tick: Callable[[str], Any] | None = None) -> Score:
    """The mutants that a kernel was built with, each in a process of its own."""
    from attnproof.verify.mutants import compiled

    fates = compiled.self_test(word, strongest_first(tiers.cases(tier)), tick=tick)
    return Score(tier, fates, matrix.Green(), [])


def steps(tier: str, names: Sequence[str], word: str = "") -> int:
    """How often the self-test calls its tick."""
    if word:
        from attnproof.verify.mutants import compiled

        return len(compiled.mutants_of(word))
    return (len(names) or len(catalogue.OPERATORS)) + len(tiers.cases(tier))


def entries(score: Score) -> list[dict[str, Any]]:
    """The score as results of a record."""
    rows: list[dict[str, Any]] = []
    for fate in score.fates:
        rows.append(
            {
                "candidate": fate.operator.name,
                "says": fate.operator.says,
                "group": "mutant",
                "status": "KILLED" if fate.dead else "SURVIVED",
                "by": fate.killed_by[0] if fate.dead else "",
                "how": fate.how,
                "classic": fate.classic,
                "seconds": round(fate.seconds, 3),
            }
        )
    for name in score.good:
        alarmed = any(alarm.candidate == name for alarm in score.alarms)
        rows.append({"candidate": name, "group": "correct kernel", "status": "ALARM" if alarmed else "GREEN"})
    for (name, dtype, tensor), peak in sorted(score.green.peaks.items()):
        rows.append(
            {"candidate": name, "group": "calibration", "dtype": dtype, "tensor": tensor, **vars(peak)}
        )
    return rows
