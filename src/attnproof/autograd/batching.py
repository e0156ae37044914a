"""A call under vmap: a mapped axis is folded into the batch axis where there is one, else calls are looped.

Folding serves dense calls. A sink has no batch axis, packed and cached rows have their own, and dropout is keyed by the
batch index: with ``randomness="same"`` every sample has to drop the same entries. Those run sample by sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..problem import GRADIENTS, Tensors

Call = Callable[..., Sequence[Tensor]]

_COUNT = len(Tensors._fields)
_GIVEN = 4  # out, lse, dout, dlse of backward
_BROADCAST = ("bias", "keep", "alibi_slopes", "bounds")  # axis 0 is the batch, or 1


def forward(call: Call, info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
    """The rule of ``call``, which is ``attnproof::forward`` in some form."""
    arrays, settings = args[:_COUNT], args[_COUNT:]
    tensors = Tensors(*_to_front(arrays, in_dims))
    mapped = Tensors(*(dim is not None for dim in in_dims[:_COUNT]))
    if not _folds(tensors, mapped, settings, ()):
        results = [call(*at, *settings) for at in _samples(info.batch_size, tensors, mapped)]
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0, 0)
    size = info.batch_size
    folded = _fold(tensors, mapped, size)
    return tuple(_unfold(x, size) for x in call(*folded, *settings)), (0, 0)


def backward(call: Call, info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
    """The rule of ``call``, which is ``attnproof::backward`` in some form."""
    stop, size = _COUNT + _GIVEN, info.batch_size
    arrays, settings = args[:stop], args[stop:-1]
    needs: list[str] = args[-1].split(",") if args[-1] else []
    moved = _to_front(arrays, in_dims)
    flags = [dim is not None for dim in in_dims[:stop]]
    tensors, mapped = Tensors(*moved[:_COUNT]), Tensors(*flags[:_COUNT])
    dims = tuple(0 if name in needs else None for name in GRADIENTS)
    if not _folds(tensors, mapped, settings, needs):
        results = [call(*at, *settings, args[-1]) for at in _samples(size, moved, flags)]
        columns = zip(dims, zip(*results, strict=True), strict=True)
        return tuple(parts[0] if dim is None else torch.stack(parts) for dim, parts in columns), dims
    folded = _fold(tensors, mapped, size, apart=needs)
    given = [_fold_rows(x, flag, size) for x, flag in zip(moved[_COUNT:], flags[_COUNT:], strict=True)]
    grads = call(*folded, *given, *settings, args[-1])
    return tuple(
        _gather(_unfold(x, size), getattr(tensors, name), getattr(mapped, name)) if name in needs else x
        for name, x in zip(GRADIENTS, grads, strict=True)
    ), dims


def _to_front(arrays: Sequence[Any], in_dims: Sequence[int | None]) -> list[Any]:
    """Mapped axes first."""
    return [x if dim is None else x.movedim(dim, 0) for x, dim in zip(arrays, in_dims, strict=False)]


def _folds(tensors: Tensors, mapped: Tensors, settings: Sequence[Any], needs: Sequence[str]) -> bool:
    dense = settings[2] == "dense"
    return dense and not mapped.sink and tensors.rng is None and "sink" not in needs


def _samples(size: int, arrays: Sequence[Any], mapped: Sequence[Any]) -> list[list[Any]]:
    """The arguments of each sample."""
    return [[x[n] if flag else x for x, flag in zip(arrays, mapped, strict=True)] for n in range(size)]


def _fold_rows(x: Any, mapped: bool, size: int) -> Any:
    """[V, B, ...] as [V * B, ...]; what is not mapped is repeated."""
    if x is None:
        return None
    return (x if mapped else x.expand(size, *x.shape)).flatten(0, 1)


def _fold(tensors: Tensors, mapped: Tensors, size: int, apart: Sequence[str] = ()) -> Tensors:
    """Every tensor with the mapped axis in its batch axis; inputs in ``apart`` get a gradient for each sample."""
    batch = tensors.q.shape[1 if mapped.q else 0]
    fields: dict[str, Any] = {
        name: _fold_rows(getattr(tensors, name), getattr(mapped, name), size) for name in "qkv"
    }
    for name in _BROADCAST:
        x, flag = getattr(tensors, name), getattr(mapped, name)
        if x is None or (not flag and x.shape[0] == 1 and name not in apart):
            continue
        x = x if flag else x.expand(size, *x.shape)
        fields[name] = x.expand(size, batch, *x.shape[2:]).flatten(0, 1)
    return tensors._replace(**fields)


def _unfold(x: Tensor, size: int) -> Tensor:
    return torch.unflatten(x, 0, (size, x.shape[0] // max(size, 1)))


def _gather(grad: Tensor, x: Tensor, mapped: bool) -> Tensor:
    """The gradient of an input that was repeated along the batch: summed over it, wide, for each sample."""
    own = x.shape[1 if mapped else 0]
    if grad.shape[1] == own:
        return grad
    wide = torch.promote_types(grad.dtype, torch.float32)
    return grad.sum(1, keepdim=True, dtype=wide).to(grad.dtype)
