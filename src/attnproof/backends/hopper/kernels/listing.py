"""Lists of tiles for kernels that own tiles of queries, where the call's numbers alone do not say which tiles there are.

A list is int32: a head of ``HEAD`` numbers (tiles per list, lists), then ``WIDTH`` numbers for each tile of each list:

    0 sequence    1 whether it is one, not the tokens past the last    2 first query of the tile
    3 queries of the sequence    4 its first row of q and of bounds    5 its keys    6 its first row of k
    7 start    8 full_start    9 full_stop    10 stop of the tiles of keys, as in ``pieces.Keys``

Where there are bounds, the intervals that are left of them within the band and the keys are made as well: kernels look at
nothing else then to hide a pair.

Dense rows have one list per sequence that bounds tell apart; packed rows have one list for all sequences, without empty
tiles between others: entries behind the last tile are of a sequence without rows and keys, and say that its one tile of
keys, all zeros, is visited. Warps that walk the same tiles read the same numbers, so that they cannot come to disagree.
"""

import triton
import triton.language as tl

from ...triton.kernels.pieces import (
    band_right,
    cut_tiles,
    key_interval,
    load_bounds,
    narrow_interval,
    sequence_rows,
)
from ...triton.kernels.summary import row_interval

HEAD = 16
WIDTH = 16
HEAD_NUMBERS = tl.constexpr(HEAD)
ENTRY = tl.constexpr(WIDTH)


@triton.jit
def find_tile(slot, cu, B, total, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """(sequence, tile in it, tiles of all sequences) of the ``slot``-th tile; sequence ``B`` is the tail past ``cu[B]``.

    The number of a sequence is that of those that end before it, all looked at: no step waits for the one before.
    """
    b = 0
    before = 0
    n_tiles = 0
    for first in tl.range(0, B + 1, CHUNK):
        sequence = first + tl.arange(0, CHUNK)
        low = tl.load(cu + sequence, mask=sequence <= B, other=0)
        high = tl.load(cu + sequence + 1, mask=sequence < B, other=0)
        high = tl.where(sequence == B, total, high)
        length = tl.where(sequence <= B, tl.maximum(high - low, 0), 0)
        each = (length + BLOCK - 1) // BLOCK
        end = n_tiles + tl.cumsum(each, 0)
        behind = (end <= slot) & (sequence <= B)
        b += tl.sum(behind.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(behind, end, 0), 0))
        n_tiles += tl.sum(each, 0)
    return b, slot - before, n_tiles


@triton.jit
def seen_tiles(
    first, rows, n_rows, n_keys, left, right, row_lo, row_hi,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_BOUNDS: tl.constexpr,
):  # fmt: skip
    """(start, full_start, full_stop, stop) of a tile of queries; never empty, see ``pieces.key_tiles``."""
    lo, full_lo, full_hi, hi = first * 0, first * 0, n_keys, n_keys
    if HAS_BOUNDS:
        lo, full_lo, full_hi, hi = narrow_interval(lo, full_lo, full_hi, hi, row_lo, row_hi, rows < n_rows)
    elif HAS_LEFT or HAS_RIGHT:
        last = tl.minimum(first + BLOCK_M, n_rows) - 1
        lo, full_lo, full_hi, hi = key_interval(first, last, n_keys - n_rows, left, right, n_keys)
    start, full_start, full_stop, stop = cut_tiles(lo, full_lo, full_hi, hi, n_keys, BLOCK_N, True)
    dead = stop <= start
    if HAS_LEFT and HAS_RIGHT:
        dead = dead | (left + right < 0)  # what is left of a window behind a top-left corner
    past = (n_keys + BLOCK_N - 1) // BLOCK_N
    return (
        tl.where(dead, past, start),
        tl.where(dead, past, full_start),
        tl.where(dead, past, full_stop),
        tl.where(dead, past + 1, stop),
    )


@triton.jit(do_not_specialize=["M", "N", "B", "left", "right", "n_slots"])
def list_tiles_kernel(
    tiles, seen, bounds, cu_q, cu_k,
    M, N, B, left, right, n_slots,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, TOP_LEFT: tl.constexpr,
    HAS_BOUNDS: tl.constexpr,
):  # fmt: skip
    """Computes: the lists of a call.

    Grid: one program per (tile of BLOCK_M queries, list); packed ``n_slots`` is a bound that needs no length.
    Shapes: bounds and seen int32 [lists * M, 2], packed [M, 2] with M and N token counts; cu int32 [B + 1]; tiles as above.
    Invariants: ROWS >= BLOCK_M is a power of two.
    Mirror: masks.classify.
    """
    slot = tl.program_id(0) % n_slots
    which = tl.program_id(0) // n_slots
    rows = tl.arange(0, ROWS)
    if PACKED:
        b, tile, n_tiles = find_tile(slot, cu_q, B, M, BLOCK_M, 256)
        b = tl.minimum(b, B)
        row, n_rows = sequence_rows(cu_q, b, B, M)
        k_row, n_keys = sequence_rows(cu_k, b, B, N)
        real = b < B
        n_keys = tl.where(real, n_keys, 0)
    else:
        b, tile, n_tiles = which, slot, n_slots
        row, n_rows, k_row, n_keys = which * M, M, 0, N
        real = b >= 0
    first = tile * BLOCK_M
    offset = n_keys - n_rows
    right = band_right(right, offset, TOP_LEFT)
    inside = tl.where(rows < BLOCK_M, first + rows, n_rows)
    row_lo, row_hi = inside, inside
    if HAS_BOUNDS:
        start = row.to(tl.int64) * 2
        row_lo, row_hi = load_bounds(bounds + start, inside, n_rows, 2)
        row_lo, row_hi = row_interval(
            inside, row_lo, row_hi, offset, left, right, n_keys, HAS_LEFT or HAS_RIGHT
        )
        tl.store(seen + start + inside * 2, row_lo, mask=inside < n_rows)
        tl.store(seen + start + inside * 2 + 1, row_hi, mask=inside < n_rows)
    start, full_start, full_stop, stop = seen_tiles(
        first, inside, n_rows, n_keys, left, right, row_lo, row_hi, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, HAS_BOUNDS
    )  # fmt: skip
    if tl.program_id(0) == 0:
        tl.store(tiles, tl.minimum(n_tiles, n_slots))
        tl.store(tiles + 1, tl.num_programs(0) // n_slots)
    exists = slot < n_tiles
    entry = tiles + HEAD_NUMBERS + tl.program_id(0) * ENTRY
    tl.store(entry, tl.minimum(b, tl.maximum(B - 1, 0)))
    tl.store(entry + 1, (real & exists).to(tl.int32))
    tl.store(entry + 2, tl.where(exists, first, 0))
    tl.store(entry + 3, tl.where(exists, n_rows, 0))
    tl.store(entry + 4, tl.where(exists, row, 0))
    tl.store(entry + 5, tl.where(exists, n_keys, 0))
    tl.store(entry + 6, tl.where(exists, k_row, 0))
    tl.store(entry + 7, tl.where(exists, start, 0))
    tl.store(entry + 8, tl.where(exists, full_start, 0))
    tl.store(entry + 9, tl.where(exists, full_stop, 0))
    tl.store(entry + 10, tl.where(exists, stop, 1))
