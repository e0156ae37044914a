"""Every backend against the oracle, on every case it does not refuse; what it may refuse is in targets.py."""

from __future__ import annotations

from .calls import Call
from .checking import check_forward, check_gradients
from .problems import CASES, DIFFERENTIABLE, SHARED, Case
from .targets import Target, every_target_and_case
from .tolerance import expected


@every_target_and_case(CASES, SHARED)
def test_out_and_lse_are_right(target: Target, case: Case) -> None:
    """Any fault in a forward pass: a mask, a modifier, a tile edge, a stride, a dead row."""
    check_forward(Call(target, case), expected(case, target.half_operands))


@every_target_and_case(DIFFERENTIABLE, [case for case in SHARED if case.differentiable])
def test_every_gradient_is_right(target: Target, case: Case) -> None:
    """Any fault in a backward pass, the gradient through lse included."""
    check_gradients(Call(target, case), expected(case, target.half_operands))
