"""Every backend against the oracle, on every case it does not refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attnproof

from .calls import Call, Result, case_lse
from .problems import CASES, DIFFERENTIABLE, SHARED, Case
from .targets import Target, every_target_and_case, kind_of, values
from .tolerance import GRADIENTS, Allowed, assert_close, expected


def refused(call: Call) -> bool:
    """True if the backend refuses the case, as it may; calling it must then raise with that reason."""
    reason = call.reason()
    if reason is None:
        return False
    assert call.target.may_refuse(call.bound().problem), f"{call.target} refuses {call.case}: {reason}"
    with pytest.raises(attnproof.Unsupported) as caught:
        call.forward()
    assert (call.target.backend, reason) == (caught.value.backend, caught.value.reason)
    assert len(reason.split()) >= 3, "a refusal is a sentence"
    return True


def check_frame(case: Case, target: Target, result: Result) -> None:
    """Kind, dtype, shape and storage of what came back."""
    layout = case.option("layout", "bhmd")
    shape = {
        "bhmd": (case.B, case.H, case.M, case.Dv),
        "bmhd": (case.B, case.M, case.H, case.Dv),
    }[layout]
    tokens = sum(case.q_lengths) + case.tail[0]
    packed = case.rows == "packed"
    assert target.kind == kind_of(result.out)
    assert ((tokens, case.H, case.Dv) if packed else shape) == tuple(result.out.shape)
    assert case.dtype == str(result.out.dtype).removeprefix("torch.")
    contiguous = result.out.flags.c_contiguous if target.kind == "numpy" else result.out.is_contiguous()
    assert contiguous, "out is stored in the layout of q"
    if result.lse is not None:
        assert ((case.H, tokens) if packed else (case.B, case.H, case.M)) == tuple(result.lse.shape)
        assert case_lse(case) == str(result.lse.dtype).removeprefix("torch.")
        assert result.lse.flags.c_contiguous if target.kind == "numpy" else result.lse.is_contiguous()


class TestParity:
    """One set of tests for all backends; what a backend may refuse is in targets.py."""

    @every_target_and_case(CASES, SHARED)
    def test_out_and_lse_are_right(self, target: Target, case: Case) -> None:
        """Any fault in a forward pass: a mask, a modifier, a tile edge, a stride, a dead row."""
        call = Call(target, case)
        if refused(call):
            return
        result = call.forward()
        check_frame(case, target, result)
        right = expected(case, target.half_operands)
        for name, got in result.named(case).items():
            if got is not None:
                assert_close(got, right[name], name)

    @every_target_and_case(DIFFERENTIABLE, [case for case in SHARED if case.differentiable])
    def test_every_gradient_is_right(self, target: Target, case: Case) -> None:
        """Any fault in a backward pass, the gradient through lse included."""
        call = Call(target, case)
        if refused(call):
            return
        needs = tuple(name for name in GRADIENTS if name in call.arrays)
        result = call.gradients(needs)
        right = expected(case, target.half_operands)
        for name in needs:
            self.check_gradient(call, name, result.grads[name], right)

    @staticmethod
    def check_gradient(call: Call, name: str, grad: Any, right: dict[str, Allowed]) -> None:
        got = values(grad)
        assert got is not None
        given = call.arrays[name]
        if call.target.kind == "torch":
            assert (given.shape, given.dtype) == (grad.shape, grad.dtype)
        elif name in ("q", "k", "v", "bias"):
            assert given.dtype == grad.dtype
        if call.case.option("layout", "bhmd") == "bmhd" and name in ("q", "k", "v"):
            got = got.swapaxes(1, 2)
        if name == "alibi_slopes" and given.ndim == 1 and call.target.kind == "numpy":
            got = got.sum(axis=0)
        assert_close(np.reshape(got, right[name].value.shape), right[name], f"d{name}")
