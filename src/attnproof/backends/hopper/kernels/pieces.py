"""The small Gluon functions that Hopper kernels are made of: layouts, tiles of the band, scores, softmax rows.

A warpgroup is 128 threads that own 64 rows of a product. ``C`` is always the kernel's compile-time ``configs.Facts``.
Mirror: ``triton.kernels.pieces``.
"""

from ..compat import aggregate, gl, gluon, warpgroup_mma

LOG2E = gl.constexpr(1.4426950408889634)  # 1 / ln 2
LN2 = gl.constexpr(0.6931471805599453)
INF = gl.constexpr(float("inf"))
# from here on the rounding of m * unit is no longer small against 1, and neighbouring scores are 16 octaves apart
HUGE = gl.constexpr(2.0**28)


# ---- compile-time helpers ----


@gluon.constexpr_function
def product_layout(columns):
    """Registers of a [64, columns] fp32 product of one warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def rows_layout(columns):
    """One number per row of such a product."""
    return gl.SliceLayout(1, product_layout(columns))


@gluon.constexpr_function
def columns_layout(columns):
    """One number per column of such a product."""
    return gl.SliceLayout(0, product_layout(columns))


@gluon.constexpr_function
def operand_layout(columns):
    """Registers of the left operand of a product with this many columns."""
    return gl.DotOperandLayout(0, product_layout(columns), 2)


# ---- which keys ----


@aggregate
class Keys:
    """Tiles of keys of a tile of queries: ``stop - 1`` down to ``start``, with no test from ``full_start`` to ``full_stop``."""

    start: gl.tensor
    full_start: gl.tensor
    full_stop: gl.tensor
    stop: gl.tensor

    @gluon.constexpr_function
    def __init__(self, start, full_start, full_stop, stop):
        self.start = start
        self.full_start = full_start
        self.full_stop = full_stop
        self.stop = stop


@gluon.jit
def key_tiles(first, M, N, left, right, C: gl.constexpr):
    """(start, full_start, full_stop, stop) for the query rows from ``first`` on; never empty.

    Rows that see no key get one tile past the last key, which is all zeros and masked: no copy of the loop has to know
    them, and nothing that the data holds can reach them.
    """
    offset = N - M
    last = gl.minimum(first + C.block_m, M) - 1
    lo = first * 0
    full_lo = lo
    hi = lo + N
    full_hi = hi
    if C.has_left:
        lo = gl.maximum(first + offset - left, 0)
        full_lo = gl.maximum(last + offset - left, 0)
    if C.has_right:
        hi = gl.maximum(gl.minimum(last + offset + right + 1, N), 0)
        full_hi = gl.maximum(gl.minimum(first + offset + right + 1, N), 0)
    past = (N + C.block_n - 1) // C.block_n
    dead = hi <= lo
    if C.has_left and C.has_right:
        dead = dead | (left + right < 0)  # what is left of a window behind a top-left corner
    start = gl.where(dead, past, lo // C.block_n)
    stop = gl.where(dead, past + 1, (hi + C.block_n - 1) // C.block_n)
    full_start = gl.minimum(gl.maximum((full_lo + C.block_n - 1) // C.block_n, start), stop)
    full_stop = gl.minimum(gl.maximum(full_hi // C.block_n, full_start), stop)
    return start, full_start, full_stop, stop


@gluon.jit
def place(tile, n_slots, n_planes, together, HEAVY_LAST: gl.constexpr):
    """(slot, plane) of a tile: slots of ``together`` planes run side by side so that their keys stay in L2.

    With ``HEAVY_LAST`` the last slot, which causal masks make the longest, comes first. A tile past the last one is
    somewhere, too.
    """
    group = tile // (together * n_slots)
    inside = tile % (together * n_slots)
    width = gl.maximum(gl.minimum(together, n_planes - group * together), 1)
    slot = inside // width
    plane = group * together + inside % width
    if HEAVY_LAST:
        slot = n_slots - 1 - slot
    return slot, plane


@gluon.jit
def show_below(s, j, limit):
    """s where ``j < limit``, else -inf.

    Written as two instructions per pair, because the compiler makes all comparisons of a tile first, and then packs and
    unpacks predicates that it has no room for, at twice the cost.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r",
        [s, j[None, :], limit[:, None]],
        gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def show_between(s, j, floor, limit):
    """s where ``floor <= j < limit``, else -inf."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.s32 p, $2, $4; setp.ge.and.s32 p, $2, $3, p; selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r,r",
        [s, j[None, :], floor[:, None], limit[:, None]],
        gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def hide(s, i, columns, first, N, offset, left, right, C: gl.constexpr):
    """Scores with -inf where query ``i`` does not see key ``first + columns``."""
    limit = i * 0 + (N - first)
    if C.has_right:
        limit = gl.minimum(i + (offset + right + 1 - first), limit)
    if C.has_left:
        s = show_between(s, columns, i + (offset - left - first), limit)
    else:
        s = show_below(s, columns, limit)
    return s


@gluon.jit
def hide_listed(s, i, columns, first, tile, sizes, C: gl.constexpr):
    """``hide`` with the lengths of a listed tile, or by what its rows' bounds leave."""
    if C.has_bounds:
        # rows past the last one have something behind it, and are stored nowhere
        own = sizes.bounds + (tile.row + i).to(gl.int64) * 2
        s = show_between(s, columns, gl.load(own) - first, gl.load(own + 1) - first)
    else:
        offset = tile.n_keys - tile.n_rows
        right = sizes.right
        if C.top_left:
            right = gl.minimum(right, -offset)
        s = hide(s, i, columns, first, tile.n_keys, offset, sizes.left, right, C)
    return s


# ---- scores ----


@gluon.jit
def multiply_keys(q, ring, stage, columns: gl.constexpr, width: gl.constexpr):
    """Start q k^T, [64, columns], of this warpgroup's rows and one stage."""
    zero = gl.zeros([64, columns], gl.float32, product_layout(columns))
    k = ring.tiles.index(stage).reshape([columns, width]).permute((1, 0))
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def reciprocal(x):
    """1 / x of the special function unit, off by one unit in the last place; 0 for infinity."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def tanh(x):
    """A short series near 0, where 1 - 2 / (e^2x + 1) cancels."""
    square = x * x
    series = x * (1.0 + square * (-0.33333333 + square * (0.13333333 - square * 0.053968254)))
    return gl.where(square < 0.03, series, 1.0 - 2.0 * reciprocal(gl.exp2(x * (2.0 * LOG2E)) + 1.0))


@gluon.jit
def capped(s, scale, cap, C: gl.constexpr):
    """Capped products; folded, ``tanh(scale s)``, or one minus that over -2 where ``C.coarse_cap`` (see ``Facts``)."""
    if C.coarse_cap:
        s = -reciprocal(gl.exp2(s * scale) + 1.0)
    else:
        s = tanh(s * scale)
        if not C.fold:
            s = s * cap
    return s


@gluon.jit
def raised(columns):
    """fp32 ``2^23 + columns``: an integer below 2^23 in the low bits of the float 2^23 is a float that much higher.

    Half an instruction per pair, where a conversion takes the slow unit; "impure" so that no register of the loop is spent
    on keeping it.
    """
    return gl.inline_asm_elementwise(
        "or.b32 $0, $1, 0x4B000000;", "=f,r", [columns], gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def distances(own, columns, C: gl.constexpr):
    """fp32 ``|own - columns|``, without the sign's removal where no key is ahead; exact up to 2^23 keys."""
    ahead = (gl.cast(own, gl.float32) + 8388608.0)[:, None] - raised(columns)[None, :]
    if not C.only_behind:
        ahead = gl.maximum(ahead, -ahead)
    return ahead


@gluon.jit
def logits(s, own, columns, scale, cap, slope, C: gl.constexpr):
    """Raw products in the order of the semantics, in units that ``scale`` (and ``cap``) leave to the exponent.

    Folded: raw products, or ``capped``. Else natural logits. ``own`` is the key in the corner of each row, ``columns`` are
    the keys, both counted from the tile's first one.
    """
    if C.has_softcap:
        s = capped(s, scale, cap, C)
    elif not C.fold:
        s = s * scale
    if C.has_alibi:
        s = s - slope * distances(own, columns, C)
    return s


# ---- online softmax ----


@gluon.jit
def octaves(m, unit, wide_unit):
    """(m in octaves, the unit that its row is measured in) of row maxima; a unit is octaves per unit of score.

    ``s * unit - m * unit`` is one fused instruction per pair, but off by the rounding of ``m * unit``. Where that is not
    small, the row takes a power of two for its unit: then the product is exact, equal scores weigh 1, and the next lower
    float is at least 16 octaves down either way, far below the rounding of the scores themselves.
    """
    t = m * unit
    huge = gl.maximum(t, -t) >= HUGE
    return gl.where(huge, m * wide_unit, t), gl.where(huge, wide_unit, unit)


@gluon.jit
def weights(s, m, unit, wide_unit):
    """(p, new maximum m, m in octaves, the point that p is relative to) of one tile of scores."""
    m = gl.maximum(m, gl.max(s, 1))
    t, own_unit = octaves(m, unit, wide_unit)
    # a row that has seen no key yet must not meet -inf - -inf
    point = gl.where(t == -INF, 0.0, t)
    p = gl.exp2(s * own_unit[:, None] - point[:, None])
    return p, m, t, point


@gluon.jit
def partial_sums(p, COLUMNS: gl.constexpr):
    """Row sums of [64, COLUMNS] by each of the four threads of a row, [64, 4]: no shuffle until the end."""
    parts = p.reshape([64, COLUMNS // 8, 4, 2])
    return gl.sum(gl.sum(parts, 3), 1)


@gluon.jit
def shrink_sums(sums, alpha):
    """Partial row sums times one factor per row."""
    each = gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)
    return sums * each[:, None]


@gluon.jit
def finish(m, t, sums, unit, lift, COLUMNS: gl.constexpr):
    """(factor of the accumulator, natural lse) of each row; ``lift`` turns m into natural units.

    The sums are relative to t, so the rounding of ``t = m * unit`` comes off again. Dead rows: sum 0, factor 0, lse -inf.
    """
    total = gl.convert_layout(gl.sum(sums, 1), rows_layout(COLUMNS), assert_trivial=True)
    dead = total == 0.0
    total = gl.where(dead, 1.0, total)
    rounding = gl.where(gl.maximum(t, -t) >= HUGE, 0.0, m * unit - t)
    lse = gl.where(dead, -INF, m * lift + (gl.log2(total) - rounding) * LN2)
    return gl.where(dead, 0.0, 1.0 / total), lse


@gluon.jit
def add_sink(factor, lse, sink):
    """``finish`` with one more logit that has no value."""
    top = gl.maximum(lse, sink)
    none = top == -INF
    point = gl.where(none, 0.0, top)
    share = gl.exp2((lse - point) * LOG2E)
    total = share + gl.exp2((sink - point) * LOG2E)
    total = gl.where(none, 1.0, total)
    return factor * (share / total), gl.where(none, -INF, point + gl.log2(total) * LN2)
