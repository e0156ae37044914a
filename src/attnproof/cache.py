"""Appending new keys and values to a cache, in place, before attention reads it."""

from __future__ import annotations

from typing import Any

from . import checks
from .arrays import as_int32, is_torch, transpose
from .errors import ShapeError, expected


def append(
    k_cache: Any, v_cache: Any, lengths: Any, k_new: Any, v_new: Any, block_table: Any, layout: str
) -> Any:
    """Write k_new and v_new behind the valid tokens of each sequence; nothing is written if anything does not fit.

    Args:
        k_cache: [B, Hkv, capacity, D] or pages [P, Hkv, page, D] (``layout="bmhd"``: axes 1 and 2 swapped).
        v_cache: like k_cache.
        lengths: int [B], valid tokens before the append.
        k_new: [B, Hkv, L, D] or None.
        v_new: [B, Hkv, L, Dv] or None.
        block_table: int [B, width] or None.

    Returns:
        int32 [B], valid tokens after the append.

    Raises:
        ShapeError: too many tokens for the capacity, or shapes that do not fit the cache.
    """
    lengths = as_int32("cache_seqlens", lengths, k_cache)
    if (k_new is None) != (v_new is None):
        missing = "k_new" if k_new is None else "v_new"
        raise ShapeError(expected(missing, "both k_new and v_new, or neither", None))
    if k_new is None:
        return lengths
    checks.data(k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new)
    checks.axes(4, k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new)
    caches, new = (k_cache, v_cache), (k_new, v_new)
    if layout == "bmhd":
        caches, new = (tuple(transpose(x, 1, 2) for x in pair) for pair in (caches, new))
    for name, cache, x in zip(("k_new", "v_new"), caches, new, strict=True):
        wanted = (lengths.shape[0], cache.shape[1], new[0].shape[2], cache.shape[3])
        checks.same(f"shape {wanted}", wanted, **{name: tuple(x.shape)})
    if is_torch(k_cache) and k_cache.device.type != "cpu":
        return _append_on_device(caches, new, lengths, block_table)
    return _append_on_host(caches, new, lengths, block_table)


def _append_on_host(caches: Any, new: Any, lengths: Any, block_table: Any) -> Any:
    count, page = new[0].shape[2], caches[0].shape[2]
    old = lengths.tolist()
    table = None if block_table is None else as_int32("block_table", block_table, caches[0])
    if table is not None:
        table = checks.table(table, len(old), caches[0])
    capacity = page if table is None else page * table.shape[1]
    need = max(old, default=0) + count
    if need > capacity:
        raise ShapeError(expected("k_new", f"room in the cache capacity of {capacity} tokens", f"{need} needed"))
    checks.lengths("cache_seqlens", lengths, len(old), capacity, caches[0])
    after = lengths + count
    if table is not None:
        checks.pages(table, after, page, caches[0].shape[0])
    for b, start in enumerate(old):
        for t in range(count):
            slot, row = (b, start + t) if table is None else (int(table[b, (start + t) // page]), (start + t) % page)
            for cache, x in zip(caches, new, strict=True):
                cache[slot, :, row] = x[b, :, t]
    return after


def _append_on_device(caches: Any, new: Any, lengths: Any, block_table: Any) -> Any:
    """Lengths stay on the device: one indexed write per cache, rows past the capacity dropped by a clamp to self."""
    import torch

    count, page = new[0].shape[2], caches[0].shape[2]
    batch = torch.arange(lengths.shape[0], device=lengths.device)[:, None]
    at = lengths[:, None].long() + torch.arange(count, device=lengths.device)[None, :]
    if block_table is None:
        slots, rows, fits = batch.expand_as(at), at.clamp(max=page - 1), at < page
    else:
        width = block_table.shape[1]
        entry = torch.gather(block_table.long(), 1, (at // page).clamp(max=width - 1))
        fits = (at < width * page) & (entry >= 0) & (entry < caches[0].shape[0])
        slots, rows = torch.where(fits, entry, torch.zeros_like(entry)), at % page
    for cache, x in zip(caches, new, strict=True):
        present = cache[slots, :, rows]  # [B, L, Hkv, D]
        cache[slots, :, rows] = torch.where(fits[..., None, None], x.transpose(1, 2), present)
    return lengths + count
