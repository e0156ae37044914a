"""The small Gluon functions that Hopper kernels are made of: barriers, rings of tiles, tiles of the band, softmax rows.

A warpgroup is 128 threads that own 64 rows of a product. Producer and consumers meet at mbarriers (data has come, a
stage is free again) and at named barriers, of which Triton itself uses the first few: 6 to 8 order the warpgroups, from 9
on stages are handed back. ``C`` is always the kernel's compile-time ``configs.Facts``. Mirror: ``triton.kernels.pieces``.
"""

from ..compat import aggregate, gl, gluon, mbarrier, tma_load, warpgroup_mma

LOG2E = gl.constexpr(1.4426950408889634)  # 1 / ln 2
LN2 = gl.constexpr(0.6931471805599453)
INF = gl.constexpr(float("inf"))
# from here on the rounding of m * unit is no longer small against 1, and neighbouring scores are 16 octaves apart
HUGE = gl.constexpr(2.0**28)
TURN = gl.constexpr(6)  # first named barrier of the warpgroups' turns
KEYS_FREE = gl.constexpr(9)  # first of the stages of k; those of v follow


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


@gluon.constexpr_function
def barrier_text(verb, threads):
    """One named barrier instruction; its result is not used."""
    return f"bar.{verb} $1, {threads}; mov.b32 $0, $1;"


# ---- barriers ----


@gluon.jit
def named_barrier(VERB: gl.constexpr, number, THREADS: gl.constexpr):
    """``bar.sync`` (wait for THREADS threads) or ``bar.arrive`` (count, and go on) on a named barrier."""
    TEXT: gl.constexpr = barrier_text(VERB, THREADS)
    gl.inline_asm_elementwise(TEXT, "=r,r", [gl.to_tensor(number)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_turn(WARPGROUP: gl.constexpr):
    """Wait until the warpgroup before this one has issued its products."""
    named_barrier("sync", TURN + WARPGROUP, 256)


@gluon.jit
def pass_turn(WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Let the next warpgroup issue its products."""
    named_barrier("arrive", TURN + (WARPGROUP + 1) % WARPGROUPS, 256)


# ---- rings of tiles ----


@aggregate
class Ring:
    """Stages [STAGES, 1, 1, rows, columns] in shared memory; a stage is full, then read, then empty again.

    ``first`` is the named barrier of the first stage.
    """

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    first: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty, first):
        self.tiles = tiles
        self.full = full
        self.empty = empty
        self.first = gl.constexpr(first)


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """[COUNT, 1] mbarriers that complete after ARRIVALS arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(COUNT):
        mbarrier.init(made.index(at), count=ARRIVALS)
    return made


@gluon.jit
def allocate_ring(desc, COUNT: gl.constexpr, READERS: gl.constexpr, first: gl.constexpr):
    """COUNT stages of the blocks of a descriptor, each handed back by READERS warpgroups."""
    tiles = gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)
    full = allocate_barriers(COUNT, 1)
    empty = allocate_barriers(COUNT, READERS)
    return Ring(tiles, full, empty, first)


@gluon.jit
def load_stage(ring, desc, b, h, row, count, C: gl.constexpr):
    """Start the copy of rows from ``row`` on into the ``count``-th stage, when its readers have left it."""
    stage = count % C.stages
    if C.named_release:
        if count >= C.stages:
            named_barrier("sync", ring.first + stage, C.warpgroups * 128 + 32)
    else:
        mbarrier.wait(ring.empty.index(stage), ((count // C.stages) & 1) ^ 1)
    mbarrier.expect(ring.full.index(stage), desc.block_type.nbytes)
    tma_load(desc, [b, h, row, 0], ring.full.index(stage), ring.tiles.index(stage))


@gluon.jit
def wait_stage(ring, count, C: gl.constexpr):
    """The number of the ``count``-th stage, once its rows have come."""
    stage = count % C.stages
    mbarrier.wait(ring.full.index(stage), (count // C.stages) & 1)
    return stage


@gluon.jit
def release_stage(ring, stage, C: gl.constexpr):
    """This warpgroup will not read the stage again."""
    if C.named_release:
        named_barrier("arrive", ring.first + stage, C.warpgroups * 128 + 32)
    else:
        mbarrier.arrive(ring.empty.index(stage), count=1)


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
    start = gl.where(dead, past, lo // C.block_n)
    stop = gl.where(dead, past + 1, (hi + C.block_n - 1) // C.block_n)
    full_start = gl.minimum(gl.maximum((full_lo + C.block_n - 1) // C.block_n, start), stop)
    full_stop = gl.minimum(gl.maximum(full_hi // C.block_n, full_start), stop)
    return start, full_start, full_stop, stop


@gluon.jit
def place(tile, n_slots, n_planes, together, HEAVY_LAST: gl.constexpr):
    """(slot, plane) of a tile: slots of ``together`` planes run side by side so that their keys stay in L2.

    With ``HEAVY_LAST`` the last slot, which causal masks make the longest, comes first.
    """
    group = tile // (together * n_slots)
    inside = tile % (together * n_slots)
    width = gl.minimum(together, n_planes - group * together)
    slot = inside // width
    plane = group * together + inside % width
    if HEAVY_LAST:
        slot = n_slots - 1 - slot
    return slot, plane


@gluon.jit
def hide(s, i, j, N, offset, left, right, C: gl.constexpr):
    """Scores with -inf where query ``i`` does not see key ``j``."""
    if C.has_right:
        limit = gl.minimum(i + (offset + right + 1), N)
        seen = j[None, :] < limit[:, None]
    else:
        seen = (j < N)[None, :] & (i >= 0)[:, None]
    if C.has_left:
        seen = seen & (j[None, :] >= (i + (offset - left))[:, None])
    return gl.where(seen, s, -INF)


# ---- scores ----


@gluon.jit
def multiply_keys(q, ring, stage, columns: gl.constexpr, width: gl.constexpr):
    """Start q k^T, [64, columns], of this warpgroup's rows and one stage."""
    zero = gl.zeros([64, columns], gl.float32, product_layout(columns))
    k = ring.tiles.index(stage).reshape([columns, width]).permute((1, 0))
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def tanh(x):
    """A short series near 0, where 1 - 2 / (e^2x + 1) cancels."""
    square = x * x
    series = x * (1.0 + square * (-0.33333333 + square * (0.13333333 - square * 0.053968254)))
    return gl.where(square < 0.03, series, 1.0 - 2.0 / (gl.exp2(x * (2.0 * LOG2E)) + 1.0))


@gluon.jit
def logits(s, i, j, offset, scale, cap, slope, C: gl.constexpr):
    """Raw products in the order of the semantics, in units that ``scale`` (and ``cap``) leave to the exponent.

    Folded: raw products, or capped ratios tanh(scale s / cap). Else natural logits.
    """
    if C.has_softcap:
        s = tanh(s * scale)
        if not C.fold:
            s = s * cap
    elif not C.fold:
        s = s * scale
    if C.has_alibi:
        ahead = (i + offset).to(gl.float32)[:, None] - j.to(gl.float32)[None, :]
        s = s - slope * gl.maximum(ahead, -ahead)
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
