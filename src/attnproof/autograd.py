"""Gradients in torch. Imported only when a torch tensor comes in."""

from __future__ import annotations

from typing import Any

import torch

from . import dispatch
from .backends import Backend
from .problem import GRADIENTS, Problem, Tensors


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backend: Backend, problem: Problem, *arrays: Any) -> tuple[Any, Any]:
        tensors = Tensors(*arrays)
        out, lse = dispatch.forward(backend, problem, tensors)
        ctx.backend, ctx.problem = backend, problem
        ctx.save_for_backward(*arrays, out, lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dout, dlse = grads
        *arrays, out, lse = ctx.saved_tensors
        needed = dict(zip(Tensors._fields, ctx.needs_input_grad[2:], strict=True))
        needs = frozenset(name for name in GRADIENTS if needed[name])
        given = Tensors(*arrays)
        found = dispatch.backward(ctx.backend, ctx.problem, given, out, lse, dout, dlse, needs)
        by_name: dict[str, Any] = dict(zip(GRADIENTS, found, strict=True))
        if by_name["alibi_slopes"] is not None and given.alibi_slopes.shape[0] == 1:
            by_name["alibi_slopes"] = by_name["alibi_slopes"].sum(0, keepdim=True)
        return (None, None, *(by_name.get(name) for name in Tensors._fields))


def attend(backend: Backend, problem: Problem, tensors: Tensors) -> tuple[Any, Any]:
    """Forward in torch, differentiable in ``problem.GRADIENTS`` and through lse."""
    return _Attention.apply(backend, problem, *tensors)  # type: ignore[no-any-return]
