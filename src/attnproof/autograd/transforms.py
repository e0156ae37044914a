"""The operators as ``autograd.Function`` pairs, for ``torch.func`` transforms.

An operator's own autograd formula serves one level of differentiation. Transforms nest (vmap of grad of vmap), and for
that torch has this form: forward without a context, ``setup_context``, and a rule for vmap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import batching, operators


def active() -> bool:
    """Whether a ``torch.func`` transform is."""
    return torch._C._are_functorch_transforms_active()


def forward() -> Callable[..., Any]:
    """``attnproof::forward`` in the form that is needed now."""
    return _apply(Forward) if active() else torch.ops.attnproof.forward


def backward() -> Callable[..., Any]:
    """``attnproof::backward`` in the form that is needed now."""
    return _apply(Backward) if active() else torch.ops.attnproof.backward


def _apply(function: Any) -> Callable[..., Any]:
    # torch leaves its type open
    return function.apply


class Forward(torch.autograd.Function):
    """``attnproof::forward``."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:  # noqa: D102
        return torch.ops.attnproof.forward(*args)  # type: ignore[no-any-return]

    setup_context = staticmethod(operators.save_forward)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: D102
        return operators.first_order(_apply(Backward), ctx, *grads)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:  # noqa: D102
        return batching.forward(_apply(Forward), info, in_dims, *args)


class Backward(torch.autograd.Function):
    """``attnproof::backward``."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:  # noqa: D102
        return torch.ops.attnproof.backward(*args)  # type: ignore[no-any-return]

    setup_context = staticmethod(operators.save_backward)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: D102
        return operators.second_order(ctx, *grads)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:  # noqa: D102
        return batching.backward(_apply(Backward), info, in_dims, *args)
