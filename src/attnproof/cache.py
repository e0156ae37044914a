"""Appending new keys and values to a cache, in place, before attention reads it.

Planned first and written later: nothing is written before the whole call has been validated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import checks
from .arrays import as_int32, transpose
from .errors import ShapeError, expected


@dataclass(frozen=True)
class Append:
    """What is to be written, and the valid tokens of each sequence before and after it.

    Attributes:
        caches: k and v in canonical axis order, [B, Hkv, capacity, D] or pages [P, Hkv, page, D].
        new: what to write, [B, Hkv, L, D] each; empty if there is nothing.
        before: int32 [B].
        after: int32 [B].
        table: int32 [B, width] or None.
    """

    caches: tuple[Any, ...]
    new: tuple[Any, ...]
    before: Any
    after: Any
    table: Any = None

    def write(self) -> None:
        """Store the new tokens behind the valid ones of each sequence."""
        if not self.new or 0 in self.new[0].shape[:3:2]:
            return
        if not checks.host_known(self.before):
            self._write_on_device()
            return
        for b, start in enumerate(self.before.tolist()):
            for slot, rows, tokens in self._runs(b, start):
                for cache, x in zip(self.caches, self.new, strict=True):
                    cache[slot, :, rows] = x[b, :, tokens]

    def _runs(self, b: int, start: int) -> list[tuple[int, slice, slice]]:
        """(batch entry or page, its rows, the new tokens that go there), without a gap."""
        count, page = self.new[0].shape[2], self.caches[0].shape[2]
        if self.table is None:
            return [(b, slice(start, start + count), slice(0, count))]
        runs, done = [], 0
        while done < count:
            entry, row = divmod(start + done, page)
            fits = min(page - row, count - done)
            runs.append((int(self.table[b, entry]), slice(row, row + fits), slice(done, done + fits)))
            done += fits
        return runs

    def _write_on_device(self) -> None:
        """Lengths stay on the device: one indexed write per cache; what does not fit is dropped.

        A token that does not fit is written where one that fits goes, with that token's value: two writes to one
        place must agree, because their order is not defined. If none fits, a slot is written with what it holds.
        """
        import torch

        count, page = self.new[0].shape[2], self.caches[0].shape[2]
        device = self.before.device
        at = self.before[:, None].long() + torch.arange(count, device=device)[None, :]
        if self.table is None:
            slots = torch.arange(self.before.shape[0], device=device)[:, None].expand_as(at)
            fits, rows = at < page, at
        else:
            width = self.table.shape[1]
            slots = torch.gather(self.table.long(), 1, (at // page).clamp(max=width - 1))
            fits = (at < width * page) & (slots >= 0) & (slots < self.caches[0].shape[0])
            rows = at % page
        fits, slots, rows = fits.flatten(), slots.flatten(), rows.flatten()
        some, first = fits.any(), fits.int().argmax()
        source = torch.where(fits, torch.arange(fits.numel(), device=device), first)
        zero = torch.zeros_like(source)
        slots, rows = (torch.where(some, x[source], zero) for x in (slots, rows))
        for cache, x in zip(self.caches, self.new, strict=True):
            tokens = x.transpose(1, 2).flatten(0, 1)[source]  # [B * L, Hkv, D]
            cache[slots, :, rows] = torch.where(some, tokens, cache[slots, :, rows])


def plan(
    k_cache: Any, v_cache: Any, lengths: Any, k_new: Any, v_new: Any, block_table: Any, layout: str
) -> Append:
    """Validate an append; the caches themselves are validated by ``problem.bind_decode``.

    Args:
        k_cache: [B, Hkv, capacity, D] or pages [P, Hkv, page, D] (``layout="bmhd"``: axes 1 and 2 swapped).
        v_cache: like k_cache.
        lengths: int [B], valid tokens before the append.
        k_new: [B, Hkv, L, D] or None.
        v_new: [B, Hkv, L, Dv] or None.
        block_table: int [B, width] or None.
        layout: "bhmd" or "bmhd".

    Raises:
        ShapeError: too many tokens for the capacity, or shapes that do not fit the cache.
    """
    lengths = as_int32("cache_seqlens", lengths, k_cache)
    if (k_new is None) != (v_new is None):
        missing = "k_new" if k_new is None else "v_new"
        raise ShapeError(expected(missing, "both k_new and v_new, or neither", None))
    if k_new is None:
        return Append((), (), lengths, lengths)
    checks.data(k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new)
    checks.axes(4, k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new)
    caches, new = (k_cache, v_cache), (k_new, v_new)
    if layout == "bmhd":
        caches, new = (tuple(transpose(x, 1, 2) for x in pair) for pair in (caches, new))
    k, count = caches[0], new[0].shape[2]
    batch, capacity, table = k.shape[0], k.shape[2], None
    if block_table is not None:
        table = as_int32("block_table", block_table, k)
        batch = table.shape[0] if table.ndim == 2 else lengths.shape[0]
        table = checks.table(table, batch, k)
        capacity = k.shape[2] * table.shape[1]
    for name, cache, x in zip(("k_new", "v_new"), caches, new, strict=True):
        wanted = (batch, cache.shape[1], count, cache.shape[3])
        checks.same(f"shape {wanted}", wanted, **{name: tuple(x.shape)})
    lengths = checks.lengths("cache_seqlens", lengths, batch, capacity, k)
    return Append(caches, new, lengths, _after(lengths, count, capacity), table)


def _after(lengths: Any, count: int, capacity: int) -> Any:
    """Valid tokens after the append; on a device, where nobody waits for them, never past the capacity."""
    if not checks.host_known(lengths):
        return (lengths + count).clamp(max=capacity)
    need = max(lengths.tolist(), default=0) + count
    if need > capacity:
        raise ShapeError(
            expected("k_new", f"room in the cache capacity of {capacity} tokens", f"{need} needed")
        )
    return lengths + count
