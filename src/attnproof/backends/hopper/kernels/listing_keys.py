"""Lists of tiles for kernels that own tiles of keys.

The head is as in ``listing``; then for each tile of each list:

    0 sequence    1 first key of the tile    2 keys of the sequence    3 its first row of k
    4 its queries    5 its first row of q    6 the tile where its row statistics begin
    7 start    8 full_start    9 full_stop    10 stop of the tiles of queries that see keys of it

Row statistics of packed rows lie by tiles of QUERIES, as the list of ``listing`` counts them: a sequence begins at a tile,
and past its last query they are those of dead rows. The last tile of all has no query: what sees nothing visits that.
"""

import triton
import triton.language as tl

from ...triton.kernels.pieces import (
    BIG,
    band_right,
    cut_tiles,
    load_bounds,
    query_interval,
    sequence_rows,
)
from ...triton.kernels.summary import row_interval
from .listing import ENTRY, HEAD_NUMBERS, find_tile


@triton.jit
def tiles_before(cu, b, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Tiles of all sequences before ``b``."""
    n_tiles = 0
    for first in tl.range(0, b, CHUNK):
        sequence = first + tl.arange(0, CHUNK)
        low = tl.load(cu + sequence, mask=sequence < b, other=0)
        high = tl.load(cu + sequence + 1, mask=sequence < b, other=0)
        n_tiles += tl.sum((tl.maximum(high - low, 0) + BLOCK - 1) // BLOCK, 0)
    return n_tiles


@triton.jit
def rows_that_see(
    bounds, first, stop, n_rows, n_keys, offset, left, right, BANDED: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """(lo, full_lo, full_hi, hi) of the rows that see a key in ``first .. stop``: all of them, and a run that sees every one.

    Any order of bounds is right; the run is the first one, which is all there is where documents lie behind each other.
    """
    lo, hi, full_lo = BIG, 0, BIG
    for start in tl.range(0, n_rows, CHUNK):
        rows = start + tl.arange(0, CHUNK)
        row_lo, row_hi = load_bounds(bounds, rows, n_rows, 2)
        row_lo, row_hi = row_interval(rows, row_lo, row_hi, offset, left, right, n_keys, BANDED)
        inside = rows < n_rows
        touched = inside & (tl.maximum(row_lo, first) < tl.minimum(row_hi, stop))
        whole = touched & (row_lo <= first) & (row_hi >= stop)
        lo = tl.minimum(lo, tl.min(tl.where(touched, rows, BIG), 0))
        hi = tl.maximum(hi, tl.max(tl.where(touched, rows + 1, 0), 0))
        full_lo = tl.minimum(full_lo, tl.min(tl.where(whole, rows, BIG), 0))
    full_hi = n_rows
    for start in tl.range(0, n_rows, CHUNK):
        rows = start + tl.arange(0, CHUNK)
        row_lo, row_hi = load_bounds(bounds, rows, n_rows, 2)
        row_lo, row_hi = row_interval(rows, row_lo, row_hi, offset, left, right, n_keys, BANDED)
        partly = (rows < n_rows) & (rows > full_lo) & ((row_lo > first) | (row_hi < stop))
        full_hi = tl.minimum(full_hi, tl.min(tl.where(partly, rows, n_rows), 0))
    return lo, full_lo, full_hi, hi


@triton.jit(do_not_specialize=["M", "N", "B", "left", "right", "n_slots", "nothing"])
def list_keys_kernel(
    tiles, bounds, cu_q, cu_k,
    M, N, B, left, right, n_slots, nothing,
    KEYS: tl.constexpr, BLOCK_M: tl.constexpr, QUERIES: tl.constexpr,
    PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, TOP_LEFT: tl.constexpr,
    HAS_BOUNDS: tl.constexpr,
):  # fmt: skip
    """Computes: the lists of a call.

    Grid: one program per (tile of KEYS keys, list); packed ``n_slots`` is a bound that needs no length.
    Shapes: as ``listing.list_tiles_kernel``; ``nothing`` is the tile with the statistics of no row.
    Mirror: masks.classify, by key.
    """
    slot = tl.program_id(0) % n_slots
    which = tl.program_id(0) // n_slots
    if PACKED:
        b, tile, n_tiles = find_tile(slot, cu_k, B, N, KEYS, 256)
        b = tl.minimum(b, B)
        row, n_rows = sequence_rows(cu_q, b, B, M)
        k_row, n_keys = sequence_rows(cu_k, b, B, N)
        n_rows = tl.where(b < B, n_rows, 0)
        stat = tiles_before(cu_q, b, QUERIES, 256)
    else:
        b, tile, n_tiles = which, slot, n_slots
        row, n_rows, k_row, n_keys, stat = which * M, M, 0, N, 0
    first = tile * KEYS
    stop_key = tl.minimum(first + KEYS, n_keys)
    offset = n_keys - n_rows
    right = band_right(right, offset, TOP_LEFT)
    lo, full_lo, full_hi, hi = first * 0, first * 0, n_rows, n_rows
    if HAS_BOUNDS:
        lo, full_lo, full_hi, hi = rows_that_see(
            bounds + row.to(tl.int64) * 2, first, stop_key, n_rows, n_keys, offset, left, right,
            HAS_LEFT or HAS_RIGHT, 1024,
        )  # fmt: skip
    elif HAS_LEFT or HAS_RIGHT:
        lo, full_lo, full_hi, hi = query_interval(first, stop_key - 1, offset, left, right, n_rows)
    start, full_start, full_stop, stop = cut_tiles(lo, full_lo, full_hi, hi, n_rows, BLOCK_M, False)
    exists = slot < n_tiles
    if PACKED:
        alive = exists & (stop > start)
        n_rows = tl.where(alive, n_rows, 0)
        row = tl.where(alive, row, 0)
        stat = tl.where(alive, stat, nothing)
        start = tl.where(alive, start, 0)
        full_start = tl.where(alive, full_start, 0)
        full_stop = tl.where(alive, full_stop, 0)
        stop = tl.where(alive, stop, 1)
    if tl.program_id(0) == 0:
        tl.store(tiles, tl.minimum(n_tiles, n_slots))
        tl.store(tiles + 1, tl.num_programs(0) // n_slots)
    entry = tiles + HEAD_NUMBERS + tl.program_id(0) * ENTRY
    tl.store(entry, tl.minimum(b, tl.maximum(B - 1, 0)))
    tl.store(entry + 1, tl.where(exists, first, 0))
    tl.store(entry + 2, tl.where(exists, n_keys, 0))
    tl.store(entry + 3, tl.where(exists, k_row, 0))
    tl.store(entry + 4, n_rows)
    tl.store(entry + 5, row)
    tl.store(entry + 6, stat)
    tl.store(entry + 7, start)
    tl.store(entry + 8, full_start)
    tl.store(entry + 9, full_stop)
    tl.store(entry + 10, stop)
