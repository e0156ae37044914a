"""Plain eager calls, where the host's own time counts: no operator is dispatched, and no graph node is made in vain."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import dispatch
from ..backends import Backend
from ..errors import Unsupported
from ..problem import Problem, Tensors
from . import operators, transforms

# what eager torch hands out; a subclass may be a fake, functional or distributed tensor and goes through the operators
PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})


def attend(backend: Backend, problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Forward in torch, differentiable in ``problem.GRADIENTS`` and through lse."""
    if not problem.deterministic:
        refuse_if_unordered(backend)
    if _forward_mode(tensors):
        from ..backends.math import differentiable

        return differentiable(problem, tensors)
    if not _plain(tensors):
        call = transforms.Forward.apply if _transforming() else torch.ops.attnproof.forward
        return call(*tensors, *operators.settings_of(backend.name, problem))  # type: ignore[no-any-return]
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return _Attention.apply(backend, problem, *tensors)  # type: ignore[no-any-return]
    return dispatch.forward(backend, problem, tensors)


def _plain(tensors: Tensors) -> bool:
    """Whether this is an ordinary call: nobody is tracing, transforming or watching operators."""
    return (
        PLAIN.issuperset(map(type, tensors))
        and not _transforming()
        and not torch._C._len_torch_dispatch_stack()
        and tensors.q.device.type != "meta"
    )


def _transforming() -> bool:
    """Whether a ``torch.func`` transform is active."""
    return torch._C._are_functorch_transforms_active()


def _forward_mode(tensors: Tensors) -> bool:
    """Whether tangents are being pushed forward: kernels have no rule for that, plain operations do."""
    if getattr(forward_ad, "_current_level", -1) < 0:
        return False
    if _transforming():
        return True
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def refuse_if_unordered(backend: Backend) -> None:
    """``deterministic=False`` may only change something, and is only refused, where a backend has such a path.

    Raises:
        Unsupported: the backend would sum gradients in an order that varies, while torch promises determinism.
    """
    if not getattr(backend, "unordered_backward", False) or not torch.are_deterministic_algorithms_enabled():
        return
    reason = "deterministic=False sums gradients in an order that varies, and torch's deterministic mode is on"
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise Unsupported(backend.name, f"{reason}; leave deterministic=True")
    import warnings

    warnings.warn(f"{backend.name}: {reason}", stacklevel=2)


class _Attention(torch.autograd.Function):
    """One node for the whole call; its backward runs the backend's for the gradients that are asked for."""

    @staticmethod
    def forward(ctx: Any, backend: Backend, problem: Problem, *arrays: Any) -> tuple[Tensor, Tensor]:  # noqa: D102
        out, lse = dispatch.forward(backend, problem, Tensors(*arrays))
        ctx.backend, ctx.problem = backend, problem
        ctx.save_for_backward(*arrays, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:  # noqa: D102
        none: tuple[Any, ...] = (None, None)
        if dout is None and dlse is None:
            return none + (None,) * len(Tensors._fields)
        *arrays, out, lse = ctx.saved_tensors
        tensors = Tensors(*arrays)
        needs = operators.needed(ctx.needs_input_grad[2:])
        if torch.is_grad_enabled():
            # somebody will differentiate this gradient
            settings = operators.settings_of(ctx.backend.name, ctx.problem)
            grads = transforms.Backward.apply(*tensors, out, lse, dout, dlse, *settings, ",".join(needs))
        else:
            found = operators.run_backward(ctx.backend, ctx.problem, tensors, out, lse, dout, dlse, needs)
            grads = [x for x in found if x is not None]
        by_name = dict(zip(needs, grads, strict=True))
        return none + tuple(by_name.get(name) for name in Tensors._fields)

