"""Plain eager calls, where the host's own time counts: no operator is dispatched, and no graph node is made in vain."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from .. import dispatch
from ..backends import Backend
from ..problem import GRADIENTS, Problem, Tensors
from . import operators, transforms

# what eager torch hands out; a subclass may be a fake, functional or distributed tensor and goes through the operators
TENSORS = frozenset({Tensor, torch.nn.Parameter})
_PLAIN = TENSORS | {type(None)}


def attend(
    backend: Backend, problem: Problem, tensors: Tensors, *, ordinary: bool = False
) -> tuple[Tensor, Tensor]:
    """Forward in torch, differentiable in ``problem.GRADIENTS`` and through lse.

    ``ordinary`` says that every tensor is known to be one of ``TENSORS``.
    """
    if not problem.deterministic:
        operators.refuse_if_unordered(backend)
    if _forward_mode(tensors):
        from ..backends.math import differentiable

        return differentiable(problem, tensors)
    if tensors.q.is_meta or not (_unwatched() if ordinary else _plain(tensors)):
        return transforms.forward()(*tensors, *operators.settings_of(backend.name, problem))
    if torch.is_grad_enabled() and _any_requires_grad(tensors):
        # an argument of a Function costs time whatever it is: what is None at the end is left out
        count = len(tensors)
        while tensors[count - 1] is None:
            count -= 1
        return _Attention.apply(backend, problem, *tensors[:count])  # type: ignore[no-any-return]
    return dispatch.forward(backend, problem, tensors)


def _plain(tensors: tuple[Any, ...]) -> bool:
    """Whether this is an ordinary call: ordinary tensors, and nobody looks."""
    return _unwatched() and _PLAIN.issuperset(map(type, tensors))


def _unwatched() -> bool:
    """Whether nobody is tracing, transforming or watching operators."""
    return not transforms.active() and not torch._C._len_torch_dispatch_stack()


def _any_requires_grad(tensors: Tensors) -> bool:
    for x in tensors:  # noqa: SIM110 (a generator would cost as much again)
        if x is not None and x.requires_grad:
            return True
    return False


def _batched(x: Any) -> bool:
    """Whether ``torch.autograd.grad(is_grads_batched=True)`` maps over this gradient, with its own, older vmap."""
    return x is not None and is_legacy_batchedtensor(x)


def _forward_mode(tensors: Tensors) -> bool:
    """Whether tangents are being pushed forward: kernels have no rule for that, plain operations do."""
    if getattr(forward_ad, "_current_level", -1) < 0:
        return False
    if transforms.active():
        return True
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


class _Attention(torch.autograd.Function):
    """One node for the whole call; its backward runs the backend's for the gradients that are asked for."""

    @staticmethod
    def forward(ctx: Any, backend: Backend, problem: Problem, *arrays: Any) -> Any:
        out, lse = dispatch.forward(backend, problem, Tensors(*arrays))
        ctx.backend, ctx.problem = backend, problem
        ctx.save_for_backward(*arrays, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dout, dlse = grads
        *arrays, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * (2 + len(arrays))
        backend, problem, tensors = ctx.backend, ctx.problem, Tensors(*arrays)
        flags = dict(zip(Tensors._fields, ctx.needs_input_grad[2:], strict=False))
        needs = [name for name in GRADIENTS if flags.get(name)]
        if torch.is_grad_enabled() or not _plain(grads) or _batched(dout) or _batched(dlse):
            # somebody will differentiate this gradient, or maps over many of them
            settings = operators.settings_of(backend.name, problem)
            found = transforms.backward()(*tensors, out, lse, dout, dlse, *settings, ",".join(needs))
        else:
            found = operators.run_backward(backend, problem, tensors, out, lse, dout, dlse, needs)
        return (None, None, *operators.pick(found, needs)[: len(arrays)])
