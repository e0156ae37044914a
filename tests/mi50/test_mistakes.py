"""The test of the tests: every planted mistake is found, and by the check that is meant to find it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import attnproof
from attnproof import gcn
from attnproof.backends import dot2

from .calls import distances, judge, suite
from .interpreter import Interpreter
from .mistakes import CONFLICTS, LSE, MISTAKES, RESULT, Mistake, without_wait

__all__ = ["suite"]


@pytest.mark.usefixtures("suite")
@pytest.mark.parametrize(
    "mistake", [each for each in MISTAKES if each.found_by not in (CONFLICTS, LSE)], ids=str
)
def test_a_planted_mistake_is_found_by_its_check(mistake: Mistake) -> None:
    run = Interpreter(edit=mistake.edit)
    wanted = (AssertionError,) if mistake.found_by == RESULT else mistake.found_by
    with pytest.raises(wanted) as caught:
        judge(mistake.case, run, gradients=mistake.gradients)
    print(f"{mistake.name}: {type(caught.value).__name__}: {str(caught.value)[:160]}")


def excess(run: Interpreter) -> float:
    """LDS read cycles over those without conflicts."""
    _, counts = run.counts[0]
    return counts.lds_read_cycles / counts.lds_read_cycles_free


@pytest.mark.usefixtures("suite")
def test_rows_without_padding_are_found_by_the_count_of_conflicts() -> None:
    """The results are right, so only the bank model sees it."""
    (mistake,) = (each for each in MISTAKES if each.found_by == CONFLICTS)
    runs = Interpreter(counting=True), Interpreter(counting=True, edit=mistake.edit)
    for run in runs:
        judge(mistake.case, run, gradients=False)
    shipped, unpadded = map(excess, runs)
    print(f"{mistake.name}: LDS read cycles {unpadded:.2f} of conflict-free, shipped {shipped:.3f}")
    assert shipped <= 1.05
    assert unpadded > 1.5


def test_weights_summed_in_half_precision_are_found_by_the_bound_of_lse() -> None:
    """The suite's tolerance lets fp16 weights be; the sum of them is another matter."""
    (mistake,) = (each for each in MISTAKES if each.found_by == LSE)
    rng = np.random.default_rng(2)
    inputs = [rng.standard_normal((n, 32)) for n in (40, 70, 70)]
    _, shipped = distances(*inputs)
    _, wrong = distances(*inputs, Interpreter(edit=mistake.edit))
    print(f"{mistake.name}: lse error {wrong:.1e}, shipped {shipped:.1e}")
    assert shipped <= 2e-6 < wrong


def test_a_missing_wait_is_found_by_the_scoreboard() -> None:
    q = torch.zeros(1, 1, 16, 16, dtype=torch.float16)
    with pytest.raises(gcn.Hazard, match="vmcnt"), dot2.running_on(Interpreter(patch=without_wait)):
        attnproof.attention(q, q, q, backend="dot2")
