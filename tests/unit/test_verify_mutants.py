"""The verifier is itself verified: broken kernels die, and the choice of cases follows from which case kills what."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnproof import cases
from attnproof.verify import probes, selftest, suite, tiers
from attnproof.verify.blas import one_thread
from attnproof.verify.mutants import catalogue, compiled, kernel, matrix
from attnproof.verify.mutants.operator import Operator

ANSWERS = suite.Answers()


@pytest.mark.parametrize("operator", catalogue.OPERATORS, ids=lambda operator: operator.name)
def test_every_operator_still_applies_to_the_kernel(operator: Operator) -> None:
    """When the kernel changes, an operator whose text is gone must be rewritten, not silently lost."""
    texts = kernel.edited(operator)
    assert operator.wrap is not None or texts
    kernel.build(texts)


def test_an_operator_whose_text_is_gone_says_so() -> None:
    gone = Operator("gone", "edits a line that is not there", (("streaming", "no such text", "x"),))
    with pytest.raises(
        kernel.DoesNotApply, match="gone: expected 'no such text' once in streaming, found it 0 times"
    ):
        kernel.edited(gone)


def test_there_are_at_least_forty_operators_with_names_of_their_own() -> None:
    names = [operator.name for operator in catalogue.OPERATORS]
    assert len(names) == len(set(names))
    assert sum(bool(operator.edits) for operator in catalogue.OPERATORS) >= 40


def test_the_mistakes_that_the_documents_name_die_in_smoke() -> None:
    """No rescale, mask 0 instead of -inf, read past the tail, half-precision running sum, wrong alignment."""
    score = selftest.classics(ANSWERS)
    assert score.survivors == []
    assert {fate.operator.name for fate in score.fates} == set(catalogue.CLASSICS)


@pytest.mark.parametrize(
    "name",
    [
        "returns-zeros",
        "returns-mean-of-v",
        "returns-last-output",
        "cached-by-shape",
        "cached-by-fingerprint",
        "writes-nothing",
        "writes-v",
        "writes-outside",
        "race",
    ],
)
def test_a_kernel_that_does_not_compute_is_caught_by_name(name: str) -> None:
    smoke = selftest.strongest_first(tiers.cases("smoke"))
    with one_thread():
        fate = matrix.fate(catalogue.find(name), smoke, 0, ANSWERS)
    assert fate.dead, name
    assert fate.how


@pytest.mark.slow
def test_smoke_finds_nine_of_ten_mutants() -> None:
    score = selftest.mutants_of("smoke", ANSWERS)
    assert len(score.survivors) <= 0.1 * len(score.fates), score.survivors


@pytest.mark.slow
def test_standard_finds_every_mutant_that_smoke_does_not() -> None:
    """100% of the shipped mutants die in standard."""
    left = selftest.mutants_of("smoke", ANSWERS).survivors
    rest = [case for case in tiers.cases("standard") if case.id not in tiers.stored()["smoke"]]
    with one_thread():
        fates = matrix.self_test(rest, 0, [catalogue.find(name) for name in left], ANSWERS)
    assert [] == [fate.operator.name for fate in fates if not fate.dead]


@pytest.mark.slow
def test_correct_kernels_are_green_on_smoke_for_three_seeds() -> None:
    """Twenty seeds on standard are a record (results/cpu); this keeps the limits from being tightened blindly."""
    green = matrix.judge_correct(list(selftest.correct_kernels()), tiers.cases("smoke"), range(3))
    assert [] == [
        f"{alarm.candidate} {alarm.case.id} seed {alarm.seed}: {alarm.reason}" for alarm in green.alarms
    ]


def test_the_stored_tiers_name_cases_that_exist_and_belong_to_these_mutants() -> None:
    known = {case.id for case in cases.pool()}
    stored = tiers.stored()
    assert set() == {name for tier in ("smoke", "standard") for name in stored[tier]} - known
    assert set(stored["smoke"]) <= set(stored["standard"])


def test_greedy_takes_the_case_that_kills_most_and_stops_at_the_share() -> None:
    killers = {"a": ["x", "y", "z"], "b": ["z", "w"], "c": ["v"], matrix.GUARDS: ["g"]}
    even = dict.fromkeys(killers, 1.0)
    assert matrix.greedy(killers, even) == ["a", "b", "c"]
    assert matrix.greedy(killers, even, share=0.6) == ["a"]
    assert matrix.greedy(killers, even, start=["c"]) == ["c", "a", "b"]


def test_a_mutant_that_changes_nothing_on_a_case_is_dormant_there() -> None:
    """A dormant mutant is not judged; one that differs in a single bit is."""
    case = cases.find("normal-128/bfloat16")
    killers = matrix.full_matrix(
        [case], 0, [catalogue.find("softcap-ignored"), catalogue.find("no-rescale-sum")]
    )
    assert killers[case.id] == ["no-rescale-sum"]


def test_probes_of_a_correct_kernel_are_all_fine() -> None:
    found = probes.probe(kernel.correct())
    assert {} == probes.failed(found)
    assert found["G10 path witness"].endswith("a kernel that does nothing fails")


def test_peaks_say_how_much_room_the_limits_leave() -> None:
    """The calibration: the largest z and use of the bound that a correct kernel reached, and which check was closest."""
    green = matrix.judge_correct([kernel.correct()], [cases.find("normal-128/bfloat16")], range(2))
    peak = green.peaks["streaming", "bfloat16", "out"]
    assert [] == green.alarms
    assert (2, True, True) == (peak.results, 0.8 < peak.z_rms < 1.25, 0 < peak.closest < 1)


COMPILED = """
import os
import numpy as np
from attnproof.api import attention as right

BROKEN = os.environ.get("ATTNPROOF_MUTANT", "")

def attention(q, k, v, *, causal, scale, mask=None):
    if BROKEN == "crashes":
        os._exit(1)
    out = right(q, k, v, causal=causal, scale=scale, mask=mask, backend="streaming")
    return out * np.float32(1.01) if BROKEN == "one-percent" else out

attention.attnproof = {"arrays": "numpy", "numerics": "precise", "dtypes": ["float16"]}
attention.MUTANTS = {"one-percent": "results are one percent too large", "crashes": "the process ends", "none": "nothing"}
"""


def test_mutants_that_a_kernel_was_built_with_run_in_processes_of_their_own(tmp_path: Path) -> None:
    """A compiled kernel carries its own mistakes, switched on by ATTNPROOF_MUTANT."""
    path = tmp_path / "compiled.py"
    path.write_text(COMPILED)
    fates = compiled.self_test(f"{path}:attention", [cases.find("longer-queries-causal/float16")])
    assert [("one-percent", True), ("crashes", True), ("none", False)] == [
        (fate.operator.name, fate.dead) for fate in fates
    ]
    assert "the child process died" in fates[1].how
    with pytest.raises(ValueError, match="attnproof:streaming has no MUTANTS"):
        compiled.mutants_of("attnproof:streaming")
