"""``scaled_dot_product_attention`` with torch's signature and conventions, computed by attnproof.

Where torch's conventions differ from the core's, they hold here: ``is_causal`` is top-left, and there may be more
or fewer leading axes. What differs from torch, on purpose:

- ``attn_mask`` and ``is_causal`` together: both apply (torch documents an error, and raises it on some paths).
- A query that sees no key gives zeros in every dtype and on every device, and its gradients are zero.
- Fewer key than query heads need ``enable_gqa=True``; one key head is not silently shared by all.
- k and v have the same number of heads.
- Dropout drops other entries than torch would for the same seed, at the same rate.
- A mask has at least two axes and not more than the query; integer masks are a TypeError.
"""

from __future__ import annotations

import math
from typing import Any

from ..api import attention
from ..arrays import dtype_name, is_torch
from ..errors import DtypeError, ShapeError, Unsupported, expected


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention with the signature of ``torch.nn.functional.scaled_dot_product_attention``.

    Args:
        query: [..., H, M, D], or [M, D].
        key: [..., Hkv, N, D]; axes before the heads broadcast against the query's.
        value: [..., Hkv, N, Dv].
        attn_mask: broadcastable to [..., H, M, N]: bool (True = attend), or a bias in the dtype of query or float32.
        dropout_p: applied whenever it is above 0, as in torch: a functional has no training mode.
        is_causal: query i sees keys up to i, counted from the top left.
        scale: factor of q k^T; None is 1 / sqrt(D).
        enable_gqa: allow Hkv to be a divisor of H.

    Returns:
        out [..., H, M, Dv], in the dtype of query.

    Raises:
        ShapeError: shapes do not fit (a ValueError).
        DtypeError: dtypes or kinds do not fit (a TypeError).
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        _check(name, x, query.ndim if is_torch(query) else 0)
    query, key, value = _broadcast_batches(query, key, value)
    q, k, v = (_four_axes(x) for x in (query, key, value))
    if k.shape[1] != q.shape[1] and not enable_gqa:
        raise ShapeError(
            expected("key", f"{q.shape[1]} heads to match query (or enable_gqa=True)", k.shape[1])
        )
    mask, bias = _mask(attn_mask, query)
    out = attention(
        q, k, v, causal=is_causal, align="top_left", mask=mask, bias=bias, dropout_p=dropout_p, scale=scale
    )
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _check(name: str, x: Any, axes: int) -> None:
    if not is_torch(x):
        raise DtypeError(expected(name, "a torch tensor", type(x).__name__))
    if x.is_nested:
        raise Unsupported("sdpa", f"{name} is a nested tensor; use attention_varlen with cu_seqlens")
    if x.ndim != axes or axes < 2:
        raise ShapeError(expected(name, f"{max(axes, 2)} axes", f"shape {tuple(x.shape)}"))


def _batch(x: Any) -> Any:
    """The axes before the heads."""
    return tuple(x.shape[:-3])


def _broadcast_batches(*arrays: Any) -> tuple[Any, ...]:
    """Axes before the heads stretched to a common shape, by stride 0."""
    shapes: set[Any] = {_batch(x) for x in arrays}
    if len(shapes) == 1:
        return arrays
    import torch

    try:
        batch: Any = torch.broadcast_shapes(*shapes)  # pyright: ignore[reportUnknownVariableType]
    except RuntimeError:
        raise ShapeError(
            expected("key", f"batch axes that broadcast with {_batch(arrays[0])}", shapes)
        ) from None
    return tuple(x.expand(*batch, *x.shape[-3:]) for x in arrays)


def _four_axes(x: Any) -> Any:
    """[..., H, L, D] as [B, H, L, D]."""
    if x.ndim == 4:
        return x
    if x.ndim < 4:
        return x[(None,) * (4 - x.ndim)]
    return x.flatten(0, -4)


def _mask(x: Any, query: Any) -> tuple[Any, Any]:
    """(mask, bias), one of them None."""
    if x is None:
        return None, None
    if not is_torch(x):
        raise DtypeError(expected("attn_mask", "a torch tensor", type(x).__name__))
    if not 2 <= x.ndim <= max(query.ndim, 2):
        raise ShapeError(expected("attn_mask", f"2 to {query.ndim} axes", f"shape {tuple(x.shape)}"))
    if query.ndim > 4 and x.ndim > 3:
        alone = math.prod(x.shape[:-3]) == 1
        x = (x if alone else x.expand(*_batch(query), *x.shape[-3:])).flatten(0, -4)
    return (x, None) if dtype_name(x) == "bool" else (None, x)
