"""Forward on Hopper: one warp copies tiles in, two or three warpgroups of 64 query rows each multiply and take turns.

FlashAttention-3 (arXiv 2407.08608): while the tensor cores work on S of tile i and O of tile i - 1 of one warpgroup, the
others are at their softmax. Mirror: ``triton.kernels.forward`` and ``backends/streaming.py``, queries outer.
"""

from ..compat import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .pieces import (
    INF,
    KEYS_FREE,
    TURN,
    Keys,
    Ring,
    add_sink,
    allocate_barriers,
    allocate_ring,
    columns_layout,
    finish,
    hide,
    key_tiles,
    load_stage,
    logits,
    multiply_keys,
    named_barrier,
    operand_layout,
    partial_sums,
    pass_turn,
    place,
    product_layout,
    release_stage,
    rows_layout,
    shrink_sums,
    take_turn,
    wait_stage,
    weights,
)


@aggregate
class Sizes:
    """Numbers of the launch, the same in every program."""

    M: gl.tensor
    N: gl.tensor
    H: gl.tensor
    group: gl.tensor
    left: gl.tensor
    right: gl.tensor
    n_slots: gl.tensor
    n_planes: gl.tensor
    together: gl.tensor

    @gluon.constexpr_function
    def __init__(self, M, N, H, group, left, right, n_slots, n_planes, together):
        self.M = M
        self.N = N
        self.H = H
        self.group = group
        self.left = left
        self.right = right
        self.n_slots = n_slots
        self.n_planes = n_planes
        self.together = together


@aggregate
class Factors:
    """What scores are multiplied with; see ``arguments.factors``."""

    scale: gl.tensor
    cap: gl.tensor
    unit: gl.tensor
    wide_unit: gl.tensor
    lift: gl.tensor

    @gluon.constexpr_function
    def __init__(self, scale, cap, unit, wide_unit, lift):
        self.scale = scale
        self.cap = cap
        self.unit = unit
        self.wide_unit = wide_unit
        self.lift = lift


@aggregate
class Memory:
    """Shared memory of a program: q and out [WARPGROUPS, 1, 1, 64, width], the rings, and the number of the next tile."""

    q: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k: Ring
    v: Ring
    out: gl.shared_memory_descriptor
    drawn: gl.shared_memory_descriptor
    drawn_full: gl.shared_memory_descriptor
    drawn_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, q_full, q_empty, k, v, out, drawn, drawn_full, drawn_empty):
        self.q = q
        self.q_full = q_full
        self.q_empty = q_empty
        self.k = k
        self.v = v
        self.out = out
        self.drawn = drawn
        self.drawn_full = drawn_full
        self.drawn_empty = drawn_empty


@aggregate
class Tile:
    """The query rows of a tile, and its keys; ``slope`` is of ALiBi."""

    b: gl.tensor
    h: gl.tensor
    first: gl.tensor
    keys: Keys

    @gluon.constexpr_function
    def __init__(self, b, h, first, keys):
        self.b = b
        self.h = h
        self.first = first
        self.keys = keys


@aggregate
class Rows:
    """Softmax state of a warpgroup: acc = sum p v of the tiles before the last, and sums of p, both relative to t; m in scores.

    ``p`` are the weights of the last tile, whose product with v is not started yet.
    """

    acc: gl.tensor
    p: gl.tensor
    m: gl.tensor
    t: gl.tensor
    sums: gl.tensor

    @gluon.constexpr_function
    def __init__(self, acc, p, m, t, sums):
        self.acc = acc
        self.p = p
        self.m = m
        self.t = t
        self.sums = sums


@gluon.jit
def locate(number, sizes, C: gl.constexpr):
    """Where a tile lives."""
    slot, plane = place(number, sizes.n_slots, sizes.n_planes, sizes.together, C.has_right)
    first = slot * C.block_m
    start, full_start, full_stop, stop = key_tiles(first, sizes.M, sizes.N, sizes.left, sizes.right, C)
    return Tile(plane // sizes.H, plane % sizes.H, first, Keys(start, full_start, full_stop, stop))


# ---- producer ----


@gluon.jit
def load_queries(q, memory, tile, turn, WARPGROUP: gl.constexpr):
    """Start the copy of one warpgroup's queries, when it has left those of the tile before."""
    mbarrier.wait(memory.q_empty.index(WARPGROUP), (turn & 1) ^ 1)
    full = memory.q_full.index(WARPGROUP)
    mbarrier.expect(full, q.block_type.nbytes)
    tma_load(q, [tile.b, tile.h, tile.first + WARPGROUP * 64, 0], full, memory.q.index(WARPGROUP))


@gluon.jit
def load_tile(q, k, v, counter, memory, sizes, tile, turn, count, C: gl.constexpr):
    """Copy one tile's rows in the order in which they are used; (stages used so far, the tile after the next one).

    That tile is drawn here, so that nobody waits for the atomic.
    """
    head = tile.h // sizes.group
    last = tile.keys.stop - 1
    load_queries(q, memory, tile, turn, 0)
    load_stage(memory.k, k, tile.b, head, last * C.block_n, count, C)
    WARPGROUPS: gl.constexpr = C.warpgroups
    for warpgroup in gl.static_range(1, WARPGROUPS):
        load_queries(q, memory, tile, turn, warpgroup)
    load_stage(memory.v, v, tile.b, head, last * C.block_n, count, C)
    upcoming = turn * 0
    if C.dynamic:
        upcoming = draw(counter)
    n_tiles = tile.keys.stop - tile.keys.start
    for step in range(1, n_tiles):
        row = (last - step) * C.block_n
        load_stage(memory.k, k, tile.b, head, row, count + step, C)
        load_stage(memory.v, v, tile.b, head, row, count + step, C)
    return count + n_tiles, upcoming


@gluon.jit
def draw(counter):
    """The number of a tile that nobody works on yet; the first ones belong to the programs in order."""
    return gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)


@gluon.jit
def announce(memory, number, turn):
    """Tell the consumers which tile comes after the current one."""
    slot = turn % 2
    mbarrier.wait(memory.drawn_empty.index(slot), ((turn // 2) & 1) ^ 1)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    memory.drawn.index(slot).store(gl.full([1], number, gl.int32, one))
    mbarrier.arrive(memory.drawn_full.index(slot), count=1)


@gluon.jit
def next_tile(memory, turn):
    """The announced tile, for a consumer."""
    slot = turn % 2
    mbarrier.wait(memory.drawn_full.index(slot), (turn // 2) & 1)
    number = gl.max(memory.drawn.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(memory.drawn_empty.index(slot), count=1)
    return number


@gluon.jit
def leave(counter):
    """The last program to leave sets the counters back for the next launch."""
    gone = gl.atomic_add(counter + 1, 1, sem="acq_rel")
    if gone == gl.num_programs(0) - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def produce(q, k, v, counter, memory, sizes, C: gl.constexpr):
    """The copying warp."""
    number = gl.program_id(0)
    if C.dynamic:
        n_tiles = sizes.n_slots * sizes.n_planes
        upcoming = draw(counter)
        turn = number * 0
        count = turn
        while number < n_tiles:
            announce(memory, upcoming, turn)
            tile = locate(number, sizes, C)
            number = upcoming
            count, upcoming = load_tile(q, k, v, counter, memory, sizes, tile, turn, count, C)
            turn += 1
        leave(counter)
    else:
        load_tile(q, k, v, counter, memory, sizes, locate(number, sizes, C), number * 0, number * 0, C)


# ---- consumers ----


@gluon.jit
def multiply_values(rows, ring, stage, C: gl.constexpr):
    """Start acc + p v of one stage."""
    v = ring.tiles.index(stage).reshape([C.block_n, C.width_v])
    return warpgroup_mma(rows.p, v, rows.acc, is_async=True)


@gluon.jit
def softmax(
    s, m, tile, sizes, factors, slope, number, WARPGROUP: gl.constexpr, MASKED: gl.constexpr, C: gl.constexpr
):
    """``weights`` of raw products of this warpgroup with tile ``number`` of the keys."""
    i = tile.first + WARPGROUP * 64 + gl.arange(0, 64, rows_layout(C.block_n))
    j = number * C.block_n + gl.arange(0, C.block_n, columns_layout(C.block_n))
    offset = sizes.N - sizes.M
    s = logits(s, i, j, offset, factors.scale, factors.cap, slope, C)
    if MASKED:
        s = hide(s, i, j, sizes.N, offset, sizes.left, sizes.right, C)
    return weights(s, m, factors.unit, factors.wide_unit)


@gluon.jit
def begin(memory, tile, sizes, factors, slope, count, WARPGROUP: gl.constexpr, C: gl.constexpr):
    """Rows after the scores of the first tile of keys."""
    q = memory.q.index(WARPGROUP).reshape([64, C.width])
    stage = wait_stage(memory.k, count, C)
    take_turn(WARPGROUP)
    token = multiply_keys(q, memory.k, stage, C.block_n, C.width)
    pass_turn(WARPGROUP, C.warpgroups)
    s = warpgroup_mma_wait(0, deps=(token,))
    release_stage(memory.k, stage, C)
    m = gl.full([64], -INF, gl.float32, rows_layout(C.block_n))
    last = tile.keys.stop - 1
    p, m, t, _ = softmax(s, m, tile, sizes, factors, slope, last, WARPGROUP, C.masks_first, C)
    acc = gl.full([64, C.width_v], 0.0, gl.float32, product_layout(C.width_v))
    operand = gl.convert_layout(p.to(memory.v.tiles.dtype), operand_layout(C.width_v))
    return Rows(acc, operand, m, t, partial_sums(p, C.block_n))


@gluon.jit
def step(
    rows, memory, tile, sizes, factors, slope, count, index,
    WARPGROUP: gl.constexpr, MASKED: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Scores of the ``index``-th tile of keys, and the product of the weights of the one before with its values."""
    q = memory.q.index(WARPGROUP).reshape([64, C.width])
    k_stage = wait_stage(memory.k, count + index, C)
    take_turn(WARPGROUP)
    s_token = multiply_keys(q, memory.k, k_stage, C.block_n, C.width)
    v_stage = wait_stage(memory.v, count + index - 1, C)
    acc_token = multiply_values(rows, memory.v, v_stage, C)
    pass_turn(WARPGROUP, C.warpgroups)
    s = warpgroup_mma_wait(1, deps=(s_token,))
    release_stage(memory.k, k_stage, C)
    number = tile.keys.stop - 1 - index
    p, m, t, point = softmax(s, rows.m, tile, sizes, factors, slope, number, WARPGROUP, MASKED, C)
    alpha = gl.exp2(rows.t - point)
    sums = shrink_sums(rows.sums, alpha) + partial_sums(p, C.block_n)
    acc = warpgroup_mma_wait(0, deps=(acc_token,))
    release_stage(memory.v, v_stage, C)
    acc = acc * gl.convert_layout(alpha, rows_layout(C.width_v))[:, None]
    operand = gl.convert_layout(p.to(memory.v.tiles.dtype), operand_layout(C.width_v))
    return Rows(acc, operand, m, t, sums)


@gluon.jit
def attend(memory, tile, sizes, factors, slope, count, WARPGROUP: gl.constexpr, C: gl.constexpr):
    """Rows of one tile of queries after all of its keys, right to left: edges, tiles that need no test, edges."""
    rows = begin(memory, tile, sizes, factors, slope, count, WARPGROUP, C)
    keys = tile.keys
    full = gl.maximum(keys.stop - keys.full_stop, 1)
    edge = gl.maximum(keys.stop - keys.full_start, 1)
    if C.has_right:
        for index in range(1, full):
            rows = step(rows, memory, tile, sizes, factors, slope, count, index, WARPGROUP, True, C)
    for index in range(full, edge):
        rows = step(rows, memory, tile, sizes, factors, slope, count, index, WARPGROUP, False, C)
    if C.has_left:
        for index in range(edge, keys.stop - keys.start):
            rows = step(rows, memory, tile, sizes, factors, slope, count, index, WARPGROUP, True, C)
    return rows


@gluon.jit
def store_rows(out, acc, memory, tile, WARPGROUP: gl.constexpr, C: gl.constexpr):
    """Store finished rows through shared memory; the copy clips what is past the last row and column."""
    staged = memory.out.index(WARPGROUP)
    if C.dynamic and C.own_out:
        tma_store_wait(0)  # of the tile before
    staged.reshape([64, C.width_v]).store(acc.to(out.dtype))
    fence_async_shared()
    tma_store(out, [tile.b, tile.h, tile.first + WARPGROUP * 64, 0], staged)
    if C.dynamic and not C.own_out:
        tma_store_wait(0)
        mbarrier.arrive(memory.q_empty.index(WARPGROUP), count=1)


@gluon.jit
def consume_tile(
    out, lse, slopes, sink, stride_slopeb, stride_slopeh, stride_sink,
    memory, tile, sizes, factors, turn, count, WARPGROUP: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """One tile of queries of this warpgroup; stages used so far."""
    slope = 0.0
    if C.has_alibi:
        slope = gl.load(slopes + tile.b * stride_slopeb + tile.h * stride_slopeh)
    mbarrier.wait(memory.q_full.index(WARPGROUP), turn & 1)
    rows = attend(memory, tile, sizes, factors, slope, count, WARPGROUP, C)
    count += tile.keys.stop - tile.keys.start
    if C.dynamic and C.own_out:
        mbarrier.arrive(memory.q_empty.index(WARPGROUP), count=1)
    stage = wait_stage(memory.v, count - 1, C)
    token = multiply_values(rows, memory.v, stage, C)
    # under the last product
    factor, row_lse = finish(rows.m, rows.t, rows.sums, factors.unit, factors.lift, C.block_n)
    if C.has_sink:
        factor, row_lse = add_sink(factor, row_lse, gl.load(sink + tile.h * stride_sink).to(gl.float32))
    i = tile.first + WARPGROUP * 64 + gl.arange(0, 64, rows_layout(C.block_n))
    plane = (tile.b * sizes.H + tile.h).to(gl.int64) * sizes.M
    gl.store(lse + plane + i, row_lse, mask=i < sizes.M)
    factor = gl.convert_layout(factor, rows_layout(C.width_v))
    acc = warpgroup_mma_wait(0, deps=(token,))
    release_stage(memory.v, stage, C)
    store_rows(out, acc * factor[:, None], memory, tile, WARPGROUP, C)
    return count


@gluon.jit
def consume(
    out, lse, slopes, sink, stride_slopeb, stride_slopeh, stride_sink,
    memory, sizes, factors, WARPGROUP: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """One warpgroup."""
    if C.warpgroups - 1 == WARPGROUP:
        named_barrier("arrive", TURN, 256)  # the first turn
    number = gl.program_id(0)
    turn = number * 0
    count = turn
    if C.dynamic:
        while number < sizes.n_slots * sizes.n_planes:
            count = consume_tile(
                out, lse, slopes, sink, stride_slopeb, stride_slopeh, stride_sink,
                memory, locate(number, sizes, C), sizes, factors, turn, count, WARPGROUP, C,
            )  # fmt: skip
            number = next_tile(memory, turn)
            turn += 1
    else:
        consume_tile(
            out, lse, slopes, sink, stride_slopeb, stride_slopeh, stride_sink,
            memory, locate(number, sizes, C), sizes, factors, turn, count, WARPGROUP, C,
        )  # fmt: skip
    tma_store_wait(0)


@gluon.jit
def allocate(q, k, v, out, C: gl.constexpr):
    """Shared memory with its barriers set up."""
    queries = gl.allocate_shared_memory(q.dtype, [C.warpgroups] + q.block_type.shape, q.layout)
    q_full = allocate_barriers(C.warpgroups, 1)
    q_empty = allocate_barriers(C.warpgroups, 1)
    k_ring = allocate_ring(k, C.stages, C.warpgroups, KEYS_FREE)
    v_ring = allocate_ring(v, C.stages, C.warpgroups, KEYS_FREE + C.stages)
    if C.own_out:
        staged = gl.allocate_shared_memory(out.dtype, [C.warpgroups] + out.block_type.shape, out.layout)
    else:
        staged = queries
    drawn = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    drawn_full = allocate_barriers(2, 1)
    drawn_empty = allocate_barriers(2, C.warpgroups)
    fence_async_shared()
    return Memory(queries, q_full, q_empty, k_ring, v_ring, staged, drawn, drawn_full, drawn_empty)


NUMBERS = [
    *("stride_slopeb", "stride_slopeh", "stride_sink", "M", "N", "H", "group", "left", "right"),
    *("n_slots", "n_planes", "together"),
]


@gluon.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    q, k, v, out, lse, counter, slopes, sink,
    scale, cap, unit, wide_unit, lift,
    stride_slopeb, stride_slopeh, stride_sink,
    M, N, H, group, left, right, n_slots, n_planes, together,
    C: gl.constexpr,
):  # fmt: skip
    """Computes: out [M, Dv] and lse [M] of (sequence, head) planes.

    Grid: one program per tile of ``C.block_m`` queries, or (``C.dynamic``) at most one per multiprocessor.
    Shapes: q [B, H, M, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv], out [B, H, M, Dv] as descriptors of blocks [1, 1, 64 or
    block_n, width]; lse [B, H, M]; counter int32 [2], zero before and after.
    Invariants: see ``Rows``; every warpgroup of a program walks the same tiles of keys.
    Mirror: triton.kernels.forward.forward_kernel.
    """
    memory = allocate(q, k, v, out, C)
    sizes = Sizes(M, N, H, group, left, right, n_slots, n_planes, together)
    factors = Factors(scale, cap, unit, wide_unit, lift)
    if C.warpgroups == 2:
        gl.warp_specialize(
            [
                (
                    consume,
                    (
                        out,
                        lse,
                        slopes,
                        sink,
                        stride_slopeb,
                        stride_slopeh,
                        stride_sink,
                        memory,
                        sizes,
                        factors,
                        0,
                        C,
                    ),
                ),
                (
                    consume,
                    (
                        out,
                        lse,
                        slopes,
                        sink,
                        stride_slopeb,
                        stride_slopeh,
                        stride_sink,
                        memory,
                        sizes,
                        factors,
                        1,
                        C,
                    ),
                ),
                (produce, (q, k, v, counter, memory, sizes, C)),
            ],
            [4, 1],
            [C.consumer_registers, C.producer_registers],
        )
    else:
        gl.warp_specialize(
            [
                (
                    consume,
                    (
                        out,
                        lse,
                        slopes,
                        sink,
                        stride_slopeb,
                        stride_slopeh,
                        stride_sink,
                        memory,
                        sizes,
                        factors,
                        0,
                        C,
                    ),
                ),
                (
                    consume,
                    (
                        out,
                        lse,
                        slopes,
                        sink,
                        stride_slopeb,
                        stride_slopeh,
                        stride_sink,
                        memory,
                        sizes,
                        factors,
                        1,
                        C,
                    ),
                ),
                (
                    consume,
                    (
                        out,
                        lse,
                        slopes,
                        sink,
                        stride_slopeb,
                        stride_slopeh,
                        stride_sink,
                        memory,
                        sizes,
                        factors,
                        2,
                        C,
                    ),
                ),
                (produce, (q, k, v, counter, memory, sizes, C)),
            ],
            [4, 4, 1],
            [C.consumer_registers, C.consumer_registers, C.producer_registers],
        )
