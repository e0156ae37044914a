"""Running a case on a target and holding everything that comes back against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attnproof

from .calls import Call, Result
from .problems import Array, Case
from .targets import Target, kind_of, values
from .tolerance import GRADIENTS, Allowed, assert_close, completed, expected, judge


def check(
    target: Target, case: Case, x: dict[str, Array] | None = None, *, gradients: bool = True
) -> Result | None:
    """Out, lse and every gradient of a case, with its own arrays or with these; None if the target refuses it."""
    x = None if x is None else completed(case, x)
    right = expected(case, target.half_operands) if x is None else judge(case, x, target.half_operands)
    result = check_forward(Call(target, case, x), right)
    if result is None or not (gradients and case.differentiable):
        return result
    return check_gradients(Call(target, case, x), right)


def check_forward(call: Call, right: dict[str, Allowed]) -> Result | None:
    """Out and lse, and how they are stored."""
    if refused(call):
        return None
    result = call.forward()
    check_frame(call.case, call.target, result)
    for name, got in result.named(call.case).items():
        if got is not None:
            assert_close(got, right[name], name)
    return result


def check_gradients(call: Call, right: dict[str, Allowed]) -> Result | None:
    """Every gradient of the inputs that the case has."""
    if refused(call):
        return None
    needs = tuple(name for name in GRADIENTS if name in call.arrays)
    result = call.gradients(needs)
    for name in needs:
        _check_gradient(call, name, result.grads[name], right[name])
    return result


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
    tokens, packed = sum(case.q_lengths) + case.tail[0], case.rows == "packed"
    axes = {"bhmd": (case.B, case.H, case.M, case.Dv), "bmhd": (case.B, case.M, case.H, case.Dv)}
    shape = (tokens, case.H, case.Dv) if packed else axes[case.option("layout", "bhmd")]
    assert target.kind == kind_of(result.out)
    assert shape == tuple(result.out.shape)
    assert case.dtype == str(result.out.dtype).removeprefix("torch.")
    assert is_contiguous(result.out), "out is stored in the layout of q"
    if result.lse is not None:
        assert ((case.H, tokens) if packed else (case.B, case.H, case.M)) == tuple(result.lse.shape)
        assert case.dtype_of("lse") == str(result.lse.dtype).removeprefix("torch.")
        assert is_contiguous(result.lse)


def is_contiguous(x: Any) -> bool:
    return x.flags.c_contiguous if isinstance(x, np.ndarray) else x.is_contiguous()


def _check_gradient(call: Call, name: str, grad: Any, right: Allowed) -> None:
    got, given = values(grad), call.arrays[name]
    if call.target.kind == "torch":
        assert (given.shape, given.dtype) == (grad.shape, grad.dtype)
    elif name in ("q", "k", "v", "bias"):
        assert given.dtype == grad.dtype
    if call.case.option("layout", "bhmd") == "bmhd" and name in ("q", "k", "v"):
        got = got.swapaxes(1, 2)
    if name == "alibi_slopes" and given.ndim == 1 and call.target.kind == "numpy":
        got = got.sum(axis=0)
    assert_close(np.reshape(got, right.value.shape), right, f"d{name}")


def case_of(name: str, x: dict[str, Array], dtype: str = "float32", **options: Any) -> Case:
    """The dense case that arrays in canonical order belong to."""
    B, H, M, D = x["q"].shape
    _, Hkv, N, Dv = x["v"].shape
    bias_dtype = options.pop("bias_dtype", "")
    return Case(
        name, dtype=dtype, B=B, H=H, Hkv=Hkv, M=M, N=N, D=D, Dv=Dv, bias_dtype=bias_dtype, options=options
    )
