"""Every backend against the oracle, on every case it does not refuse; what it may refuse is in targets.py."""

from __future__ import annotations

import pytest

import attnproof

from .calls import Call
from .checking import check_forward, check_gradients
from .problems import CASES, DIFFERENTIABLE, SHARED, Case
from .targets import DEVICE, Target, absent, every_target_and_case, natural_kind, targets
from .tolerance import expected


@pytest.mark.parametrize("backend", attnproof.backends())
def test_a_backend_takes_part_or_says_why_it_cannot_run_here(backend: str) -> None:
    """One that drops out silently would count as passed."""
    reason = absent(backend, natural_kind(backend), DEVICE)
    if reason is not None:
        pytest.skip(f"{backend} is not tested here: {reason}")
    assert backend in {target.backend for target in targets()}


@every_target_and_case(CASES, SHARED)
def test_out_and_lse_are_right(target: Target, case: Case) -> None:
    """Any fault in a forward pass: a mask, a modifier, a tile edge, a stride, a dead row."""
    check_forward(Call(target, case), expected(case, target.half_operands))


@every_target_and_case(DIFFERENTIABLE, [case for case in SHARED if case.differentiable])
def test_every_gradient_is_right(target: Target, case: Case) -> None:
    """Any fault in a backward pass, the gradient through lse included."""
    check_gradients(Call(target, case), expected(case, target.half_operands))
