"""Forward on Hopper: one warp copies tiles in, two or three warpgroups of 64 query rows each multiply and take turns.

FlashAttention-3 (arXiv 2407.08608): while the tensor cores work on S of tile i and O of tile i - 1 of one warpgroup, the
others are at their softmax. Mirror: ``triton.kernels.forward`` and ``backends/streaming.py``, queries outer.
"""

from ..compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .pieces import (
    INF,
    add_sink,
    columns_layout,
    finish,
    hide,
    hide_listed,
    logits,
    multiply_keys,
    operand_layout,
    partial_sums,
    product_layout,
    rows_layout,
    shrink_sums,
    weights,
)
from .producer import produce
from .rings import (
    FAR,
    KEYS_FREE,
    TURN,
    allocate_barriers,
    allocate_ring,
    named_barrier,
    pass_turn,
    release_stage,
    take_turn,
    wait_stage,
)
from .state import Extras, Factors, ListedSizes, Memory, Rows, Sizes, lengths, locate, query_origin


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
    columns = gl.arange(0, C.block_n, columns_layout(C.block_n))
    first = number * C.block_n
    n_rows, n_keys = lengths(tile, sizes, C)
    offset = n_keys - n_rows
    s = logits(s, i + (offset - first), columns, factors.scale, factors.cap, slope, C)
    if MASKED and C.listed:
        s = hide_listed(s, i, columns, first, tile, sizes, C)
    elif MASKED:
        s = hide(s, i, columns, first, n_keys, offset, sizes.left, sizes.right, C)
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
    if C.right_edges:
        for index in range(1, full):
            rows = step(rows, memory, tile, sizes, factors, slope, count, index, WARPGROUP, True, C)
    for index in range(full, edge):
        rows = step(rows, memory, tile, sizes, factors, slope, count, index, WARPGROUP, False, C)
    if C.left_edges:
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
    place, start = query_origin(tile, C)
    row = start + tile.first + WARPGROUP * 64
    if C.packed:
        tma_store(out, [FAR, place, tile.h, row, 0], staged)
    else:
        tma_store(out, [place, tile.h, row, 0], staged)
    if C.dynamic and not C.own_out:
        tma_store_wait(0)
        mbarrier.arrive(memory.q_empty.index(WARPGROUP), count=1)


@gluon.jit
def store_lse(lse, row_lse, tile, sizes, WARPGROUP: gl.constexpr, C: gl.constexpr):
    """Store the lse of rows that exist."""
    i = tile.first + WARPGROUP * 64 + gl.arange(0, 64, rows_layout(C.block_n))
    n_rows, _ = lengths(tile, sizes, C)
    if C.packed:
        plane = tile.h.to(gl.int64) * sizes.M + tile.row
    else:
        plane = (tile.b * sizes.H + tile.h).to(gl.int64) * sizes.M
    gl.store(lse + plane + i, row_lse, mask=i < n_rows)


@gluon.jit
def work(out, extras, memory, tile, sizes, factors, turn, count, WARPGROUP: gl.constexpr, C: gl.constexpr):
    """One tile of queries of this warpgroup, whose first stage is the ``count``-th; the next tile, see ``following``."""
    slope = 0.0
    if C.has_alibi:
        slope = gl.load(extras.slopes + tile.b * extras.stride_slopeb + tile.h * extras.stride_slopeh)
    mbarrier.wait(memory.q_full.index(WARPGROUP), turn & 1)
    rows = attend(memory, tile, sizes, factors, slope, count, WARPGROUP, C)
    if C.dynamic and C.own_out:
        mbarrier.arrive(memory.q_empty.index(WARPGROUP), count=1)
    stage = wait_stage(memory.v, count + tile.keys.stop - tile.keys.start - 1, C)
    token = multiply_values(rows, memory.v, stage, C)
    # under the last product
    factor, row_lse = finish(rows.m, rows.t, rows.sums, factors.unit, factors.lift, C.block_n)
    if C.coarse_cap:
        row_lse = row_lse + factors.cap
    if C.has_sink:
        sink = gl.load(extras.sink + tile.h * extras.stride_sink).to(gl.float32)
        if C.packed:
            # tokens past the last sequence have no sink either
            sink = gl.where(tile.real > 0, sink, -INF)
        factor, row_lse = add_sink(factor, row_lse, sink)
    store_lse(extras.lse, row_lse, tile, sizes, WARPGROUP, C)
    factor = gl.convert_layout(factor, rows_layout(C.width_v))
    number, upcoming = following(memory, tile, sizes, turn, C)
    acc = warpgroup_mma_wait(0, deps=(token,))
    release_stage(memory.v, stage, C)
    store_rows(out, acc * factor[:, None], memory, tile, WARPGROUP, C)
    return number, upcoming


@gluon.jit
def idle(memory, tile, sizes, turn, count, WARPGROUP: gl.constexpr, C: gl.constexpr):
    """What ``work`` does at barriers, for a warpgroup that has no row in this tile."""
    mbarrier.wait(memory.q_full.index(WARPGROUP), turn & 1)
    if C.dynamic:
        mbarrier.arrive(memory.q_empty.index(WARPGROUP), count=1)
    for index in range(tile.keys.stop - tile.keys.start):
        k_stage = wait_stage(memory.k, count + index, C)
        take_turn(WARPGROUP)
        pass_turn(WARPGROUP, C.warpgroups)
        release_stage(memory.k, k_stage, C)
        # one tile earlier than the others hand it back, which wait for the one before
        v_stage = wait_stage(memory.v, count + index, C)
        release_stage(memory.v, v_stage, C)
    return following(memory, tile, sizes, turn, C)


@gluon.jit
def following(memory, tile, sizes, turn, C: gl.constexpr):
    """The number and the place of the next tile, which may be past the last one; of this one where programs leave."""
    number = turn
    if C.dynamic:
        number = next_tile(memory, turn)
        tile = locate(number, sizes, C)
    return number, tile


@gluon.jit
def consume_tile(
    out, extras, memory, tile, sizes, factors, turn, count, WARPGROUP: gl.constexpr, C: gl.constexpr
):
    """``work``, or ``idle`` where this warpgroup has no row."""
    if C.has_idle and WARPGROUP > 0:
        n_rows, _ = lengths(tile, sizes, C)
        if tile.first + WARPGROUP * 64 < n_rows:
            number, upcoming = work(out, extras, memory, tile, sizes, factors, turn, count, WARPGROUP, C)
        else:
            number, upcoming = idle(memory, tile, sizes, turn, count, WARPGROUP, C)
    else:
        number, upcoming = work(out, extras, memory, tile, sizes, factors, turn, count, WARPGROUP, C)
    return number, upcoming


@gluon.jit
def next_tile(memory, turn):
    """The announced tile, for a consumer."""
    slot = turn % 2
    mbarrier.wait(memory.drawn_full.index(slot), (turn // 2) & 1)
    number = gl.max(memory.drawn.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(memory.drawn_empty.index(slot), count=1)
    return number


@gluon.jit
def consume(out, extras, memory, sizes, factors, WARPGROUP: gl.constexpr, C: gl.constexpr):
    """One warpgroup."""
    if C.warpgroups - 1 == WARPGROUP:
        named_barrier("arrive", TURN, 256)  # the first turn
    number = gl.program_id(0)
    tile = locate(number, sizes, C)
    turn = number * 0
    count = turn
    if C.dynamic:
        while number < sizes.n_slots * sizes.n_planes:
            used = tile.keys.stop - tile.keys.start
            number, tile = consume_tile(out, extras, memory, tile, sizes, factors, turn, count, WARPGROUP, C)
            count += used
            turn += 1
    else:
        consume_tile(out, extras, memory, tile, sizes, factors, turn, count, WARPGROUP, C)
    tma_store_wait(0)


@gluon.jit
def allocate(q, k, v, out, C: gl.constexpr):
    """Shared memory with its barriers set up."""
    queries = gl.allocate_shared_memory(q.dtype, [C.warpgroups] + q.block_type.shape, q.layout)
    q_full = allocate_barriers(C.warpgroups, 1)
    q_empty = allocate_barriers(C.warpgroups, 1)
    k_ring = allocate_ring(k, KEYS_FREE, C)
    v_ring = allocate_ring(v, KEYS_FREE + C.stages, C)
    if C.own_out:
        staged = gl.allocate_shared_memory(out.dtype, [C.warpgroups] + out.block_type.shape, out.layout)
    else:
        staged = queries
    drawn = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    drawn_full = q_full
    drawn_empty = q_empty
    if C.dynamic:
        drawn_full = allocate_barriers(2, 1)
        drawn_empty = allocate_barriers(2, C.warpgroups)
    fence_async_shared()
    return Memory(queries, q_full, q_empty, k_ring, v_ring, staged, drawn, drawn_full, drawn_empty)


NUMBERS = [
    *("stride_slopeb", "stride_slopeh", "stride_sink", "M", "N", "H", "group", "left", "right"),
    *("n_slots", "n_planes", "together"),
]


@gluon.jit
def listed_sizes(tiles, bounds, M, H, group, left, right, n_planes, together, C: gl.constexpr):
    """``ListedSizes``, which begin with what the head of the list says."""
    if not C.has_bounds:
        bounds = tiles  # a pointer that nobody reads
    n_slots = gl.load(tiles)
    return ListedSizes(
        tiles, bounds, M, H, group, left, right, n_slots, n_planes, together, gl.load(tiles + 1)
    )


@gluon.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    q, k, v, out, lse, counter, slopes, sink, tiles, bounds,
    scale, cap, unit, wide_unit, lift,
    stride_slopeb, stride_slopeh, stride_sink,
    M, N, H, group, left, right, n_slots, n_planes, together,
    C: gl.constexpr,
):  # fmt: skip
    """Computes: out [M, Dv] and lse [M] of (sequence, head) planes.

    Grid: one program per tile of ``C.block_m`` queries, or (``C.dynamic``) at most one per multiprocessor.
    Shapes: q [B, H, M, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv], out [B, H, M, Dv] as descriptors of blocks [1, 1, 64 or
    block_n, width]; lse [B, H, M]; counter int32 [2], zero before and after; packed see ``arguments.ragged``, lse [H, M];
    listed, tiles as in ``listing`` and bounds int32 [rows, 2].
    Invariants: see ``Rows``; every warpgroup of a program walks the same tiles of keys.
    Mirror: triton.kernels.forward.forward_kernel.
    """
    memory = allocate(q, k, v, out, C)
    if C.listed:
        sizes = listed_sizes(tiles, bounds, M, H, group, left, right, n_planes, together, C)
    else:
        sizes = Sizes(M, N, H, group, left, right, n_slots, n_planes, together)
    factors = Factors(scale, cap, unit, wide_unit, lift)
    extras = Extras(lse, slopes, sink, stride_slopeb, stride_slopeh, stride_sink)
    if C.warpgroups == 2:
        gl.warp_specialize(
            [
                (consume, (out, extras, memory, sizes, factors, 0, C)),
                (consume, (out, extras, memory, sizes, factors, 1, C)),
                (produce, (q, k, v, counter, memory, sizes, C)),
            ],
            [4, 1],
            [C.consumer_registers, C.producer_registers],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (out, extras, memory, sizes, factors, 0, C)),
                (consume, (out, extras, memory, sizes, factors, 1, C)),
                (consume, (out, extras, memory, sizes, factors, 2, C)),
                (produce, (q, k, v, counter, memory, sizes, C)),
            ],
            [4, 4, 1],
            [C.consumer_registers, C.consumer_registers, C.producer_registers],
        )
