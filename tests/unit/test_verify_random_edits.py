"""Random one-line mistakes: the edits are well made, and a handful drawn at random is found."""

from __future__ import annotations

import ast
import random
from typing import Any

import pytest

from attnproof.errors import Unsupported
from attnproof.verify import suite, tiers
from attnproof.verify.blas import one_thread
from attnproof.verify.mutants import kernel
from attnproof.verify.mutants.random_edits import edits

TEXT = '''
def step(rows, cols, q, k):
    """A docstring with - and 1 in it."""
    if rows > 0:
        total = q - k * 2
    total += np.maximum(q, -k)
    return total[rows]
'''


def test_each_edit_changes_one_place_of_one_line_and_still_parses() -> None:
    for edit in edits(TEXT):
        changed = edit.apply(TEXT)
        ast.parse(changed)
        differing = [
            index
            for index, pair in enumerate(zip(TEXT.splitlines(), changed.splitlines(), strict=True))
            if pair[0] != pair[1]
        ]
        assert [edit.line - 1] == differing, edit.says


def test_operators_constants_names_conditions_calls_and_statements_are_all_tried() -> None:
    said = {edit.says for edit in edits(TEXT)}
    assert {
        "> becomes >=",
        "0 becomes 1",
        "- becomes +",
        "* becomes +",
        "2 becomes 3",
        "maximum becomes minimum",
        "a minus sign is lost",
        "rows becomes cols",
        "q becomes k",
        "`if rows > 0` is negated",
        "`total += np.maximum(q, -k)` is lost",
    } <= said
    assert not any("docstring" in words for words in said)


@pytest.mark.slow
def test_random_mistakes_in_the_streaming_kernel_are_found() -> None:
    """Six of them here; thirty are a record (results/cpu/random-mutations.json, tools/random_mutations.py)."""
    drawn = edits(kernel.source("streaming"))
    random.Random(2024).shuffle(drawn)
    standard, answers = tiers.cases("standard"), suite.Answers()
    fates: list[tuple[str, bool]] = []
    with one_thread():
        for edit in drawn:
            fate = _fate(edit, standard, answers)
            if fate is not None:
                fates.append((edit.says, fate))
            if len(fates) == 6:
                break
    assert [] == [says for says, found in fates if not found]


def _fate(edit: Any, standard: list[Any], answers: suite.Answers) -> bool | None:
    """True when a case fails by its numbers; None when the edit crashes, refuses a call or changes nothing."""
    try:
        module = kernel.build({"streaming": edit.apply(kernel.source("streaming"))})
    except (SyntaxError, NameError, TypeError, AttributeError):
        return None
    mutant = kernel.candidate("random", lambda inputs: kernel.run_streaming(module, inputs))
    for case in standard:
        verdict = suite.run_case(mutant, case, 0, answers, explain=False)
        if not verdict.ok:
            return None if verdict.reason.startswith("raised") else True
    try:
        return None if _same_everywhere(mutant, standard[:20]) else False
    except Unsupported:  # a call skipped is no call passed, and the coverage says so
        return None


def _same_everywhere(mutant: Any, cases: list[Any]) -> bool:
    import numpy as np

    from attnproof.verify.inputs import build

    right = kernel.correct()
    with np.errstate(all="ignore"):
        return all(
            np.array_equal(
                mutant.call(build(case, 0)).values["out"],
                right.call(build(case, 0)).values["out"],
                equal_nan=True,
            )
            for case in cases
        )
