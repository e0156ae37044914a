"""The small jit functions every kernel here is made of: rows, intervals, scores, masks, dropout.

A piece does one thing and knows nothing about the loop around it. Index pieces take ``i`` (query positions) and ``j``
(key positions) already shaped to broadcast, so that the same line serves a [BLOCK_M, BLOCK_N] tile and its transpose.
Mirror: ``rows``, ``masks``, ``scores``, ``philox`` and ``online_softmax``, which say the same in NumPy.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # 1 / ln 2
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
BIG = tl.constexpr(2**30)  # as masks.BIG: a band side that is unbounded


# ---- schedule ----


@triton.jit
def schedule(pid, n_tiles, n_planes, swizzle, HEAVY_LAST: tl.constexpr):
    """(tile, plane) of a program: tiles of ``swizzle`` planes run together so that their keys stay in L2.

    With ``HEAVY_LAST`` the last tile, which causal masks make the longest, is started first.
    """
    per_group = swizzle * n_tiles
    group = pid // per_group
    inside = pid % per_group
    width = tl.minimum(swizzle, n_planes - group * swizzle)
    tile = inside // width
    plane = group * swizzle + inside % width
    if HEAVY_LAST:
        tile = n_tiles - 1 - tile
    return tile, plane


@triton.jit
def find_sequence(slot, cu, B, BLOCK: tl.constexpr):
    """Sequence of a tile slot, and the slot's tile inside it; sequence ``B`` is the tail past ``cu[B]``.

    Sequence b owns the slots from ``cu[b] // BLOCK + b``, one more than it can need, so no length has to reach the
    host and the number of slots is bounded by the number of tokens.
    """
    low = 0
    high = B
    while low < high:
        middle = (low + high + 1) // 2
        inside = tl.load(cu + middle) // BLOCK + middle <= slot
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, middle - 1)
    return low, slot - (tl.load(cu + low) // BLOCK + low)


@triton.jit
def locate(slot, plane, cu_own, cu_other, lengths, own, other, B, H, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Where a tile lives: (sequence, head, tile in it, own rows, first own row, other rows, first other row).

    "own" is the side that is cut into tiles (queries, or keys in the dk and dv kernel), "other" the side streamed past
    it; ``H`` counts the own side's heads. The packed tail past the last sequence sees no row of the other side.
    """
    if ROWS == "packed":
        h = plane
        b, tile = find_sequence(slot, cu_own, B, BLOCK)
        first, n_own = sequence_rows(cu_own, b, B, own)
        first_other, n_other = sequence_rows(cu_other, b, B, other)
        n_other = tl.where(b < B, n_other, 0)
    else:
        h = plane % H
        b = plane // H
        tile = slot
        first = 0
        first_other = 0
        n_own = own
        n_other = other
        if ROWS != "dense":
            n_other = tl.load(lengths + b)
    return b, h, tile, n_own, first, n_other, first_other


@triton.jit
def locate_sequence(b, cu_q, cu_k, M, N, B, ROWS: tl.constexpr):
    """(query rows, first query row, keys, first key) of dense or packed sequence ``b`` < ``B``."""
    n_rows, q_row, n_keys, k_row = M, 0, N, 0
    if ROWS == "packed":
        q_row, n_rows = sequence_rows(cu_q, b, B, 0)
        k_row, n_keys = sequence_rows(cu_k, b, B, 0)
    return n_rows, q_row, n_keys, k_row


@triton.jit
def plane_base(x, b, h, row, stride_b, stride_h, stride_row):
    """Pointer to row ``row`` of one head of one sequence, in 64-bit arithmetic."""
    wide = b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    return x + (wide + tl.full([], row, tl.int64) * stride_row)


@triton.jit
def sequence_rows(cu, b, B, total):
    """(first token, number of tokens) of packed sequence ``b``; the tail for ``b == B``."""
    first = tl.load(cu + b)
    last = tl.load(cu + b + 1, mask=b < B, other=total)
    return first, tl.maximum(last - first, 0)


# ---- loads ----


@triton.jit
def pointers(base, rows, cols, stride_row, stride_col, WIDE: tl.constexpr):
    """[rows, cols] pointers; ``WIDE`` where even the offset inside one tile can pass 2^31."""
    if WIDE:
        rows = rows.to(tl.int64)
        cols = cols.to(tl.int64)
    return base + rows[:, None] * stride_row + cols[None, :] * stride_col


@triton.jit
def load_rows(ptrs, rows, n_rows, cols, WIDTH: tl.constexpr, PADDED: tl.constexpr, CHECK: tl.constexpr):
    """[rows, PADDED] with zeros past ``WIDTH`` columns and, if ``CHECK``, past ``n_rows`` rows."""
    if CHECK and WIDTH != PADDED:
        tile = tl.load(ptrs, mask=(rows < n_rows)[:, None] & (cols < WIDTH)[None, :], other=0.0)
    elif CHECK:
        tile = tl.load(ptrs, mask=(rows < n_rows)[:, None], other=0.0)
    elif WIDTH != PADDED:
        tile = tl.load(ptrs, mask=(cols < WIDTH)[None, :], other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def store_rows(base, tile, rows, n_rows, cols, stride_row, stride_col, WIDTH: tl.constexpr):
    """Store [rows, cols] inside ``n_rows`` x ``WIDTH`` in the dtype of ``base``."""
    ptrs = base + rows.to(tl.int64)[:, None] * stride_row + cols.to(tl.int64)[None, :] * stride_col
    inside = (rows < n_rows)[:, None] & (cols < WIDTH)[None, :]
    tl.store(ptrs, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_streamed(
    x, base, b, h, row, first, rows, n_rows, cols, stride_row, stride_col,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    CHECK: tl.constexpr, WIDE: tl.constexpr, TMA: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """[BLOCK, PADDED] rows of a plane from ``first`` on, zeros past ``n_rows`` if ``CHECK``.

    Args:
        x: with ``TMA``, the descriptor [batch, head, row, column]; it fills zeros past the tensor's end.
        base: without, a pointer to the plane's first row.
        row: where the plane starts on the descriptor's row axis; not 0 for packed rows, which have no batch axis.
    """
    if TMA:
        if ROWS == "packed":
            tile = x.load([0, h, row + first, 0]).reshape(BLOCK, PADDED)
        else:
            tile = x.load([b, h, first, 0]).reshape(BLOCK, PADDED)
        if CHECK and ROWS != "dense":
            # the next sequence, or the cache's tail, may hold anything, and 0 * NaN is NaN
            tile = tl.where((first + rows < n_rows)[:, None], tile, 0.0)
    else:
        ptrs = pointers(base + first.to(tl.int64) * stride_row, rows, cols, stride_row, stride_col, WIDE)
        tile = load_rows(ptrs, first + rows, n_rows, cols, WIDTH, PADDED, CHECK)
    return tile


@triton.jit
def page_pointers(pool, table, keys, n_keys, cols, stride_page, stride_row, stride_col, PAGE: tl.constexpr):
    """[keys, cols] pointers into a page pool through one row of the block table; keys past the end read page 0."""
    page = tl.load(table + keys // PAGE, mask=keys < n_keys, other=0).to(tl.int64)
    row = pool + page * stride_page + (keys % PAGE).to(tl.int64) * stride_row
    return row[:, None] + cols.to(tl.int64)[None, :] * stride_col


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """fp32 ``a @ b``; "upcast" is for interpreters that multiply bfloat16 as raw bits."""
    if PRECISION == "upcast":
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a, b, input_precision=PRECISION)
    return product


@triton.jit
def dot_add(a, b, acc, PRECISION: tl.constexpr):
    """fp32 ``acc + a @ b``."""
    if PRECISION == "upcast":
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


# ---- intervals ----


@triton.jit
def band_right(right, offset, TOP_LEFT: tl.constexpr):
    """Right side of the band around ``i + offset``; ``j <= i`` is one more bound on it."""
    if TOP_LEFT:
        right = tl.minimum(right, -offset)
    return right


@triton.jit
def key_interval(row, last_row, offset, left, right, n_keys):
    """Keys seen by any, and by every, of the rows ``row .. last_row`` of a band: (lo, full_lo, full_hi, hi)."""
    lo = tl.maximum(row + offset - left, 0)
    full_lo = tl.maximum(last_row + offset - left, 0)
    full_hi = tl.minimum(row + offset + right + 1, n_keys)
    hi = tl.minimum(last_row + offset + right + 1, n_keys)
    return lo, full_lo, full_hi, hi


@triton.jit
def query_interval(key, last_key, offset, left, right, n_rows):
    """Rows that see any, and every, of the keys ``key .. last_key`` of a band: (lo, full_lo, full_hi, hi)."""
    lo = tl.maximum(key - right - offset, 0)
    full_lo = tl.maximum(last_key - right - offset, 0)
    full_hi = tl.minimum(key + left - offset + 1, n_rows)
    hi = tl.minimum(last_key + left - offset + 1, n_rows)
    return lo, full_lo, full_hi, hi


@triton.jit
def cut_tiles(lo, full_lo, full_hi, hi, n, BLOCK: tl.constexpr, TAIL_IS_EDGE: tl.constexpr):
    """Tile numbers (start, full_start, full_stop, stop) of four positions among ``n``; full tiles need no test."""
    start = lo // BLOCK
    stop = tl.maximum((hi + BLOCK - 1) // BLOCK, start)
    full_start = tl.minimum(tl.maximum((full_lo + BLOCK - 1) // BLOCK, start), stop)
    if TAIL_IS_EDGE:
        full_stop = full_hi // BLOCK
    else:
        full_stop = tl.where(full_hi == n, (full_hi + BLOCK - 1) // BLOCK, full_hi // BLOCK)
    full_stop = tl.minimum(tl.maximum(full_stop, full_start), stop)
    # an empty interval may have lo past hi
    some = hi > lo
    return (
        tl.where(some, start, stop),
        tl.where(some, full_start, stop),
        tl.where(some, full_stop, stop),
        stop,
    )


@triton.jit
def tile_number(step, start, full_start, full_stop, EDGE: tl.constexpr):
    """The ``step``-th full tile, or the ``step``-th of the edge tiles on both sides of the full ones."""
    if EDGE:
        tile = start + step
        tile = tl.where(tile < full_start, tile, tile + (full_stop - full_start))
    else:
        tile = full_start + step
    return tile


@triton.jit
def listed_tile(step, row, width, EDGE: tl.constexpr):
    """The ``step``-th tile of a summary row: counts in front, full tiles after them, edge tiles from the end."""
    if EDGE:
        tile = tl.load(row + width - 1 - step)
    else:
        tile = tl.load(row + 2 + step)
    return tile


@triton.jit
def load_bounds(bounds, rows, n_rows, stride_row):
    """Explicit [lo, hi) of each row; rows past the end see nothing."""
    lo = tl.load(bounds + rows.to(tl.int64) * stride_row, mask=rows < n_rows, other=0)
    hi = tl.load(bounds + rows.to(tl.int64) * stride_row + 1, mask=rows < n_rows, other=0)
    return lo, hi


@triton.jit
def narrow_interval(lo, full_lo, full_hi, hi, row_lo, row_hi, inside):
    """The interval of a tile cut down to its rows' explicit bounds; a row that sees nothing makes no tile full."""
    some = inside & (row_hi > row_lo)
    lo = tl.maximum(lo, tl.min(tl.where(some, row_lo, BIG), 0))
    hi = tl.minimum(hi, tl.max(tl.where(some, row_hi, 0), 0))
    full_lo = tl.maximum(full_lo, tl.max(tl.where(some, row_lo, tl.where(inside, BIG, 0)), 0))
    full_hi = tl.minimum(full_hi, tl.min(tl.where(some, row_hi, tl.where(inside, 0, BIG)), 0))
    return lo, full_lo, full_hi, hi


@triton.jit
def visible(
    i, j, n_rows, n_keys, offset, left, right, row_lo, row_hi, keep, stride_m, stride_n,
    BANDED: tl.constexpr, HAS_BOUNDS: tl.constexpr, HAS_KEEP: tl.constexpr,
):  # fmt: skip
    """Which pairs of an edge tile may attend: keys that exist, in the band, in the bounds, kept by the mask."""
    allowed = j < n_keys
    if BANDED:
        allowed = allowed & in_band(i, j, offset, left, right)
    if HAS_BOUNDS:
        allowed = allowed & (j >= row_lo) & (j < row_hi)
    if HAS_KEEP:
        allowed = allowed & load_pairs(keep, i, j, n_rows, n_keys, stride_m, stride_n).to(tl.int1)
    return allowed


@triton.jit
def in_band(i, j, offset, left, right):
    """Whether key ``j`` is in the band of query ``i``."""
    distance = j - i - offset
    return (distance >= -left) & (distance <= right)


@triton.jit
def load_pairs(base, i, j, n_rows, n_cols, stride_m, stride_n):
    """A tile of a per-pair tensor (bias or boolean mask) by stride, so that a broadcast axis costs nothing."""
    ptrs = base + i.to(tl.int64) * stride_m + j.to(tl.int64) * stride_n
    return tl.load(ptrs, mask=(i < n_rows) & (j < n_cols), other=0)


# ---- scores ----


@triton.jit
def scores(
    s, i, j, n_rows, n_keys, offset, scale, cap, slope, bias, stride_m, stride_n,
    FOLD: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """(logits, capped scores) of raw products, in the fixed order; folded scores stay raw products."""
    if not FOLD:
        s = s * scale
    if HAS_SOFTCAP:
        s = softcap(s, cap)
    capped = s
    if HAS_ALIBI:
        s = s - slope * distance(i, j, offset)
    if HAS_BIAS:
        s = s + load_pairs(bias, i, j, n_rows, n_keys, stride_m, stride_n).to(tl.float32)
    return s, capped


@triton.jit
def softcap(s, cap):
    """``cap * tanh(s / cap)``; a short series near 0, where 1 - 2 / (e^2x + 1) cancels."""
    x = s / cap
    square = x * x
    series = x * (1.0 + square * (-0.33333333 + square * (0.13333333 - square * 0.053968254)))
    ratio = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    return cap * tl.where(square < 0.03, series, ratio)


@triton.jit
def softcap_derivative(y, cap):
    """d softcap / ds from the capped value."""
    ratio = y / cap
    return 1.0 - ratio * ratio


@triton.jit
def distance(i, j, offset):
    """``|i + N - M - j|`` in fp32."""
    return tl.abs(i + offset - j).to(tl.float32)


# ---- dropout ----


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Ten rounds of Philox4x32 on uint32 counters; see ``attnproof.philox``."""
    for _ in tl.static_range(10):
        low = c0
        high = c2
        c0 = tl.umulhi(high, 0xCD9E8D57) ^ c1 ^ k0
        c1 = high * 0xCD9E8D57
        c2 = tl.umulhi(low, 0xD2511F53) ^ c3 ^ k1
        c3 = low * 0xD2511F53
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def kept(
    rng, plane, i, first_key, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr
):  # fmt: skip
    """Which pairs of a tile survive dropout: [BLOCK_M, BLOCK_N], or its transpose.

    Args:
        i: query positions, [BLOCK_M].
        first_key: first key of the tile, a multiple of 4.
        threshold: int32 holding the bits of the uint32 threshold.
    """
    seed = tl.load(rng)
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    stream = tl.load(rng + 1).to(tl.uint32)
    quads = first_key // 4 + tl.arange(0, BLOCK_N // 4)
    if TRANSPOSED:
        zero = tl.zeros([BLOCK_N // 4, BLOCK_M], tl.uint32)
        c0 = zero + quads.to(tl.uint32)[:, None]
        c1 = zero + i.to(tl.uint32)[None, :]
    else:
        zero = tl.zeros([BLOCK_M, BLOCK_N // 4], tl.uint32)
        c0 = zero + quads.to(tl.uint32)[None, :]
        c1 = zero + i.to(tl.uint32)[:, None]
    w0, w1, w2, w3 = philox(c0, c1, zero + plane.to(tl.uint32), zero + stream, k0, k1)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    if TRANSPOSED:
        words = tl.reshape(tl.permute(words, (0, 2, 3, 1)), (BLOCK_N, BLOCK_M))
    else:
        words = tl.reshape(words, (BLOCK_M, BLOCK_N))
    return words >= threshold.to(tl.uint32, bitcast=True)
