"""Tile classes of masks that no formula describes: which tiles to skip, to run untested, and to test pair by pair.

``classify_kernel`` looks at every tile once, all of them side by side; ``compact_kernel`` turns each row of classes into
``[full, edge, full tiles ..., ..., edge tiles from the end]``. The attention kernels walk those two lists, so a skipped
tile costs nothing. Mirror: ``masks.classify``.
"""

import triton
import triton.language as tl

from .pieces import (
    band_right,
    load_bounds,
    locate,
    plane_base,
    schedule,
    visible,
)

SKIP = tl.constexpr(0)
EDGE = tl.constexpr(1)  # as masks.EDGE and masks.FULL
FULL = tl.constexpr(2)


@triton.jit
def row_interval(rows, row_lo, row_hi, offset, left, right, n_keys, BANDED: tl.constexpr):
    """[lo, hi) of the keys that each row sees: its explicit bounds, cut by the band."""
    hi = tl.minimum(row_hi, n_keys)
    lo = tl.maximum(row_lo, 0)
    if BANDED:
        lo = tl.maximum(lo, rows + offset - left)
        hi = tl.minimum(hi, rows + offset + right + 1)
    return lo, hi


@triton.jit(
    do_not_specialize=[
        *("M", "N", "B", "H", "left", "right", "n_slots", "n_planes", "n_other"),
        *("stride_listb", "stride_listh", "list_width"),
    ]
)
def classify_kernel(
    kinds, keep, bounds, cu_q, cu_k, lengths,
    stride_keepb, stride_keeph, stride_keepm, stride_keepn,
    stride_boundb, stride_boundm,
    M, N, B, H, left, right, n_slots, n_planes, n_other,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr, BANDED: tl.constexpr, TOP_LEFT: tl.constexpr,
    HAS_KEEP: tl.constexpr, HAS_BOUNDS: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    """Computes: the class of one tile; slots are tiles of queries, or (``BY_KEY``) of keys.

    Grid: one program per (streamed tile, slot, plane); planes are only the sequences and heads whose masks differ.
    Shapes: kinds int8 [planes, slots, n_other].
    Invariants: a full tile has every pair allowed whose owning row exists; a streamed tail is always an edge.
    Mirror: masks.classify.
    """
    pid = tl.program_id(0)
    other = pid % n_other
    slot, plane = schedule(pid // n_other, n_slots, n_planes, 1, False)
    if BY_KEY:
        b, h, tile, n_keys, _, n_rows, q_row = locate(
            slot, plane, cu_k, cu_q, lengths, N, M, B, H, BLOCK_N, ROWS
        )
        rows = other * BLOCK_M + tl.arange(0, BLOCK_M)
        keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    else:
        b, h, tile, n_rows, q_row, n_keys, _ = locate(
            slot, plane, cu_q, cu_k, lengths, M, N, B, H, BLOCK_M, ROWS
        )
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        keys = other * BLOCK_N + tl.arange(0, BLOCK_N)
    offset = n_keys - n_rows
    right = band_right(right, offset, TOP_LEFT)
    row_lo, row_hi = rows, rows
    if HAS_BOUNDS:
        bounds = plane_base(bounds, b, h, q_row, stride_boundb, 0, stride_boundm)
        row_lo, row_hi = load_bounds(bounds, rows, n_rows, stride_boundm)
    if HAS_KEEP:
        keep = plane_base(keep, b, h, 0, stride_keepb, stride_keeph, 0)
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
        whole = tl.min(tl.min(excused.to(tl.int32), 1), 0)
        touched = tl.max(tl.max(allowed.to(tl.int32), 1), 0)
    else:
        # each row sees one interval: its ends against the tile's are as good as looking at every pair
        lo, hi = row_interval(rows, row_lo, row_hi, offset, left, right, n_keys, BANDED)
        first = tl.min(keys, 0)
        stop = first + BLOCK_N
        inside = rows < n_rows
        if BY_KEY:
            # keys past the end are no pairs that are missing; queries past the end are
            whole = tl.min((inside & (lo <= first) & (hi >= tl.minimum(stop, n_keys))).to(tl.int32), 0)
        else:
            whole = tl.min(((~inside) | ((lo <= first) & (hi >= stop))).to(tl.int32), 0)
        touched = tl.max((inside & (tl.maximum(lo, first) < tl.minimum(hi, stop))).to(tl.int32), 0)
    # a tile of rows that do not exist at all is whole, and touched by nothing
    kind = tl.where(touched == 0, SKIP, tl.where(whole != 0, FULL, EDGE))
    at = (plane.to(tl.int64) * n_slots + slot) * n_other + other
    tl.store(kinds + at, kind.to(tl.int8))


@triton.jit(do_not_specialize=["n_other", "list_width"])
def compact_kernel(lists, kinds, n_other, list_width, BLOCK: tl.constexpr):
    """Computes: one row of tile lists from its classes.

    Grid: one program per (slot, plane).
    Shapes: kinds int8 [rows, n_other], lists int32 [rows, list_width].
    Invariants: after each chunk, n_full and n_edge tiles of the earlier chunks are listed in order.
    Mirror: none; the order of a list is the order of the keys.
    """
    row = tl.program_id(0).to(tl.int64)
    lists += row * list_width
    kinds += row * n_other
    n_full = 0
    n_edge = 0
    for start in tl.range(0, n_other, BLOCK):
        tiles = start + tl.arange(0, BLOCK)
        kind = tl.load(kinds + tiles, mask=tiles < n_other, other=0)
        full = (kind == FULL).to(tl.int32)
        edge = (kind == EDGE).to(tl.int32)
        before_full = tl.cumsum(full, 0) - full
        before_edge = tl.cumsum(edge, 0) - edge
        tl.store(lists + 2 + n_full + before_full, tiles, mask=full != 0)
        tl.store(lists + list_width - 1 - n_edge - before_edge, tiles, mask=edge != 0)
        n_full += tl.sum(full, 0)
        n_edge += tl.sum(edge, 0)
    tl.store(lists, n_full)
    tl.store(lists + 1, n_edge)
