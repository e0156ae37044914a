"""Tile classes of masks that no formula describes: which tiles to skip, to run untested, and to test pair by pair.

One row per tile of the owning side: ``[full, edge, full tiles ..., ..., edge tiles from the end]``. Computed once per
pass; the attention kernels then walk the two lists, so a skipped tile costs nothing. Mirror: ``masks.classify``.
"""

import triton
import triton.language as tl

from .pieces import (
    band_right,
    cut_tiles,
    key_interval,
    load_bounds,
    locate,
    plane_base,
    query_interval,
    schedule,
    visible,
)


@triton.jit(
    do_not_specialize=[
        *("M", "N", "B", "H", "left", "right", "n_slots", "n_planes"),
        *("stride_listb", "stride_listh", "list_width"),
    ]
)
def summary_kernel(
    lists, keep, bounds, cu_q, cu_k, lengths,
    stride_keepb, stride_keeph, stride_keepm, stride_keepn,
    stride_boundb, stride_boundm,
    stride_listb, stride_listh, list_width,
    M, N, B, H, left, right, n_slots, n_planes,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr, BANDED: tl.constexpr, TOP_LEFT: tl.constexpr,
    HAS_KEEP: tl.constexpr, HAS_BOUNDS: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    """Computes: the summary row of one tile, of queries or (``BY_KEY``) of keys.

    Grid: one program per (slot, plane); planes are only the sequences and heads whose masks differ.
    Shapes: lists int32 [planes, slots, list_width].
    Invariants: a full tile has every pair allowed whose owning row exists; a streamed tail is always an edge.
    Mirror: masks.classify.
    """
    slot, plane = schedule(tl.program_id(0), n_slots, n_planes, 1, False)
    if BY_KEY:
        b, h, tile, n_keys, k_row, n_rows, q_row = locate(
            slot, plane, cu_k, cu_q, lengths, N, M, B, H, BLOCK_N, ROWS
        )
        own_first = tile * BLOCK_N
        n_own = n_keys
    else:
        b, h, tile, n_rows, q_row, n_keys, k_row = locate(
            slot, plane, cu_q, cu_k, lengths, M, N, B, H, BLOCK_M, ROWS
        )
        own_first = tile * BLOCK_M
        n_own = n_rows
    offset = n_keys - n_rows
    right = band_right(right, offset, TOP_LEFT)
    if BY_KEY:
        own_last = tl.minimum(own_first + BLOCK_N, n_own) - 1
        lo, full_lo, full_hi, hi = query_interval(own_first, own_last, offset, left, right, n_rows)
        start, full_start, full_stop, stop = cut_tiles(lo, full_lo, full_hi, hi, n_rows, BLOCK_M, True)
    else:
        own_last = tl.minimum(own_first + BLOCK_M, n_own) - 1
        lo, full_lo, full_hi, hi = key_interval(own_first, own_last, offset, left, right, n_keys)
        start, full_start, full_stop, stop = cut_tiles(lo, full_lo, full_hi, hi, n_keys, BLOCK_N, True)
    if HAS_KEEP:
        keep = plane_base(keep, b, h, 0, stride_keepb, stride_keeph, 0)
    if HAS_BOUNDS:
        bounds = plane_base(bounds, b, h, q_row, stride_boundb, 0, stride_boundm)
    lists = plane_base(lists, b, h, slot, stride_listb, stride_listh, list_width)
    n_full = 0
    n_edge = 0
    for other in tl.range(start, stop):
        if BY_KEY:
            rows = other * BLOCK_M + tl.arange(0, BLOCK_M)
            keys = own_first + tl.arange(0, BLOCK_N)
        else:
            rows = own_first + tl.arange(0, BLOCK_M)
            keys = other * BLOCK_N + tl.arange(0, BLOCK_N)
        row_lo, row_hi = rows, rows
        if HAS_BOUNDS:
            row_lo, row_hi = load_bounds(bounds, rows, n_rows, stride_boundm)
        i = rows[:, None]
        j = keys[None, :]
        allowed = (i < n_rows) & visible(
            i, j, n_rows, n_keys, offset, left, right, row_lo[:, None], row_hi[:, None],
            keep, stride_keepm, stride_keepn, BANDED, HAS_BOUNDS, HAS_KEEP,
        )  # fmt: skip
        if BY_KEY:
            excused = allowed | (j >= n_keys)
        else:
            excused = allowed | (i >= n_rows)
        full = tl.min(tl.min(excused.to(tl.int32), 1), 0)
        edge = tl.max(tl.max(allowed.to(tl.int32), 1), 0) * (1 - full)
        tl.store(lists + 2 + n_full, other, mask=full != 0)
        tl.store(lists + list_width - 1 - n_edge, other, mask=edge != 0)
        n_full += full
        n_edge += edge
    tl.store(lists, n_full)
    tl.store(lists + 1, n_edge)
