"""dq: 128 queries per program, 64 in each of two warpgroups; keys and values stream past.

    S = q K^T      P = exp2(S - shift)      dP = dout V^T      dq += (P * (dP - delta)) K

With ``PIPELINED`` S of the next block is started behind the block's last product and waited for with it.
Mirror: ``backends/triton/kernels/backward.dq_kernel``.
"""

from ...triton.kernels.pieces import cut_tiles, key_interval
from ..compat import aggregate, any_value, fence_async_shared, gl, gluon, mbarrier, warpgroup_mma_wait
from .backward_listed import key_place, query_place, read_query_entry
from .backward_pieces import (
    Ring,
    Scoring,
    Walk,
    accumulators,
    add_product,
    afresh,
    make_ring,
    make_walk,
    product,
    store_tile,
)
from .backward_statistics import RowStatistics, placed_statistics
from .copies import copy_in
from .pieces import place, rows_layout
from .rings import allocate_barriers


@aggregate
class QueryProgram:
    """One program: where it is, what it visits, and its shared memory."""

    q: gl.shared_memory_descriptor  # [2, 1, 1, 64, WIDTH]
    dout: gl.shared_memory_descriptor
    k: Ring
    v: Ring
    ready: gl.shared_memory_descriptor  # full when q and dout are there
    walk: Walk
    score: Scoring
    slope: gl.tensor
    b: gl.tensor
    h: gl.tensor
    first: gl.tensor  # first query
    offset: gl.tensor  # of the keys against the queries
    listed: any_value  # ``Listed``, or nothing
    LISTED: gl.constexpr
    BLOCK_N: gl.constexpr
    WIDTH: gl.constexpr
    PIPELINED: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, q, dout, k, v, ready, walk, score, slope, b, h, first, offset, listed, LISTED, BLOCK_N, WIDTH, PIPELINED
    ):  # fmt: skip
        self.q = q
        self.dout = dout
        self.k = k
        self.v = v
        self.ready = ready
        self.walk = walk
        self.score = score
        self.slope = slope
        self.b = b
        self.h = h
        self.first = first
        self.offset = offset
        self.listed = listed
        self.LISTED = gl.constexpr(LISTED)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.WIDTH = gl.constexpr(WIDTH)
        self.PIPELINED = gl.constexpr(PIPELINED)

    @gluon.jit
    def rows(self, PART: gl.constexpr, LAYOUT: gl.constexpr):
        """The 64 query positions of part ``PART``."""
        return self.first + PART * 64 + gl.arange(0, 64, LAYOUT)


@gluon.jit
def queries_producer(program, q_desc, k_desc, v_desc, do_desc, kv_head):
    """Load the queries and their gradients once, then keys and values block by block."""
    h = program.h
    where, start = query_place(program)
    mbarrier.expect(program.ready, 2 * (q_desc.block_type.nbytes + do_desc.block_type.nbytes))
    for part in gl.static_range(2):
        row = start + program.first + part * 64
        copy_in(q_desc, where, h, row, program.ready, program.q.index(part))
        copy_in(do_desc, where, h, row, program.ready, program.dout.index(part))
    where, start = key_place(program)
    for i in range(0, program.walk.total):
        _, tile = program.walk.at(i)
        row = start + tile * program.BLOCK_N
        program.k.acquire(i)
        program.k.load(i, k_desc, where, kv_head, row)
        program.v.acquire(i)
        program.v.load(i, v_desc, where, kv_head, row)


@gluon.jit
def start_scores(program, i, PART: gl.constexpr):
    """Start S of step i."""
    WIDTH: gl.constexpr = program.WIDTH
    BLOCK_N: gl.constexpr = program.BLOCK_N
    program.k.wait(i)
    q = program.q.index(afresh(PART, i, WIDTH > 128)).reshape([64, WIDTH])
    return product(q, program.k.tile(i, BLOCK_N, WIDTH).permute((1, 0)), BLOCK_N)


@gluon.jit
def queries_step(program, i, s, dq, shift, delta, PART: gl.constexpr, EDGE: gl.constexpr, LAST: gl.constexpr):
    """One block of keys; pipelined, ``s`` is its S, and that of the next block on return."""
    WIDTH: gl.constexpr = program.WIDTH
    BLOCK_N: gl.constexpr = program.BLOCK_N
    layout: gl.constexpr = s.type.layout
    if not program.PIPELINED:
        s_now = start_scores(program, i, PART)
    program.v.wait(i)
    dout = program.dout.index(afresh(PART, i, WIDTH > 128)).reshape([64, WIDTH])
    dp_next = product(dout, program.v.tile(i, BLOCK_N, WIDTH).permute((1, 0)), BLOCK_N)
    if not program.PIPELINED:
        s = warpgroup_mma_wait(1, deps=(s_now,))
    _, tile = program.walk.at(i)
    first = tile * BLOCK_N
    center = program.rows(PART, gl.SliceLayout(1, layout)) + (program.offset - first)
    keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    own = 0
    BOUNDED: gl.constexpr = EDGE and program.LISTED and program.listed.HAS_BOUNDS
    if BOUNDED:
        own = program.listed.own_bounds(program.rows(PART, gl.SliceLayout(1, layout)))
    _, weight = program.score.weigh(
        s, shift[:, None], center, keys, first, program.slope, 0, own, EDGE, "rows" if BOUNDED else ""
    )  # [64, BLOCK_N]
    dp = warpgroup_mma_wait(0, deps=(dp_next,))  # [64, BLOCK_N]
    program.v.release(i)
    ds = weight * (dp - delta[:, None])
    dq_next = add_product(ds, program.k.tile(i, BLOCK_N, WIDTH), dq, program.q.dtype, WIDTH)
    if program.PIPELINED and not LAST:
        s_next = start_scores(program, i + 1, PART)
        s_after, dq = warpgroup_mma_wait(0, deps=(s_next, dq_next))
    else:
        s_after = s
        dq = warpgroup_mma_wait(0, deps=(dq_next,))
    program.k.release(i)
    return s_after, dq


@gluon.jit
def row_statistics(program, statistics, PART: gl.constexpr, LAYOUT: gl.constexpr):
    """(shift, delta) of the 64 queries of part ``PART``, loaded or made; waits for q and dout."""
    b, h = program.b, program.h
    if statistics.MAKE:
        WIDTH: gl.constexpr = program.WIDTH
        lanes: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
        columns = gl.arange(0, WIDTH, gl.SliceLayout(0, lanes))
        rows = program.rows(PART, gl.SliceLayout(1, lanes))
        out = statistics.load_out(b, h, rows, columns)  # [64, WIDTH]
        mbarrier.wait(program.ready, 0)
        dout = program.dout.index(PART).reshape([64, WIDTH]).load(lanes)  # [64, WIDTH]
        shift, delta = statistics.make(b, h, rows, out, dout)
        shift = gl.convert_layout(shift, LAYOUT)
        delta = gl.convert_layout(delta, LAYOUT)
    else:
        shift, delta = statistics.load(b, h, program.rows(PART, LAYOUT))
        mbarrier.wait(program.ready, 0)
    return shift, delta


@gluon.jit
def queries_consumer(program, statistics, dq_desc, grad_scale, PART: gl.constexpr, EDGES: gl.constexpr):
    """dq of 64 queries."""
    WIDTH: gl.constexpr = program.WIDTH
    BLOCK_N: gl.constexpr = program.BLOCK_N
    shift, delta = row_statistics(program, statistics, PART, rows_layout(BLOCK_N))
    dq = accumulators(WIDTH)
    s = accumulators(BLOCK_N)
    total = program.walk.total
    if program.PIPELINED:
        s = warpgroup_mma_wait(0, deps=(start_scores(program, 0, PART),))
        plain = program.walk.plain(EDGES)
        most = total - 1
    else:
        plain = gl.minimum(program.walk.n_full, total) if EDGES else total
        most = total
    for i in range(0, plain):
        s, dq = queries_step(program, i, s, dq, shift, delta, PART, False, False)
    if EDGES:
        for i in range(plain, most):
            s, dq = queries_step(program, i, s, dq, shift, delta, PART, True, False)
    if program.PIPELINED:
        s, dq = queries_step(program, total - 1, s, dq, shift, delta, PART, EDGES, True)
    where, start = query_place(program)
    row = start + program.first + PART * 64
    store_tile(dq_desc, program.q.index(PART), dq * grad_scale, where, program.h, row, WIDTH)


@gluon.jit
def walk_keys(first, M, N, left, right, BLOCK_N: gl.constexpr, BANDED: gl.constexpr):
    """Blocks of keys that any of the 128 queries from ``first`` on sees; a block that ends past the last key is an edge."""
    lo, full_lo, full_hi, hi = gl.to_tensor(0), 0, N, N
    if BANDED:
        last = gl.minimum(first + 128, M) - 1
        lo, full_lo, full_hi, hi = key_interval(first, last, N - M, left, right, N)
    start, full_start, full_stop, stop = cut_tiles(lo, full_lo, full_hi, hi, N, BLOCK_N, True)
    return make_walk(start, full_start, full_stop, stop, (N + BLOCK_N - 1) // BLOCK_N, 1, False)


@gluon.jit
def make_query_program(
    q_desc, k_desc, v_desc, do_desc, slopes, tiles, bounds, stride_stat, stride_slopeb, stride_slopeh,
    M, N, H, left, right, n_slots, n_planes, together, scale, cap, unit,
    BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, WIDTH: gl.constexpr,
    PIPELINED: gl.constexpr, HEAVY_LAST: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, TAIL: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, HAS_ALIBI: gl.constexpr,
    LISTED: gl.constexpr, PACKED: gl.constexpr, TOP_LEFT: gl.constexpr, HAS_BOUNDS: gl.constexpr,
):  # fmt: skip
    """Place a program and lay out its shared memory; rows of queries past the end are never stored."""
    slot, plane = place(gl.program_id(0), n_slots, n_planes, together, HEAVY_LAST)
    b = plane // H
    h = plane % H
    if LISTED:
        b, first, N, walk, listed = read_query_entry(
            tiles, bounds, slot, b, n_slots, stride_stat, H, PACKED, HAS_BOUNDS
        )
        offset = N - listed.n_rows
        if TOP_LEFT:
            right = gl.minimum(right, -offset)
    else:
        listed = gl.constexpr(0)
        offset = N - M
        first = slot * 128
        walk = walk_keys(first, M, N, left, right, BLOCK_N, HAS_LEFT or HAS_RIGHT)
    score = Scoring(scale, cap, unit, left, right, N - 1, HAS_SOFTCAP, HAS_ALIBI, HAS_LEFT, HAS_RIGHT, TAIL)
    slope = gl.to_tensor(0.0)
    if HAS_ALIBI:
        slope = gl.load(slopes + b * stride_slopeb + h * stride_slopeh)
    q = gl.allocate_shared_memory(q_desc.dtype, [2] + q_desc.block_type.shape, q_desc.layout)
    dout = gl.allocate_shared_memory(do_desc.dtype, [2] + do_desc.block_type.shape, do_desc.layout)
    ready = allocate_barriers(1, 1).index(0)
    k = make_ring(k_desc, K_STAGES, 2)
    v = make_ring(v_desc, V_STAGES, 2)
    fence_async_shared()
    return QueryProgram(
        q, dout, k, v, ready, walk, score, slope, b, h, first, offset, listed, LISTED, BLOCK_N, WIDTH, PIPELINED
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        *("stride_slopeb", "stride_slopeh", "M", "N", "H", "Hkv", "left", "right"),
        *("n_slots", "n_planes", "together"),
    ]
)
def dq_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, shift, delta, slopes, out, lse, dlse, tiles, bounds,
    stride_stat, stride_slopeb, stride_slopeh,
    stride_ob, stride_oh, stride_om, stride_dlseb, stride_dlseh, stride_dlsem,
    M, N, H, Hkv, left, right, n_slots, n_planes, together, grad_scale, scale, cap, unit,
    BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, WIDTH: gl.constexpr,
    PIPELINED: gl.constexpr, HEAVY_LAST: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, TAIL: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, HAS_ALIBI: gl.constexpr,
    DV: gl.constexpr, MAKE_STATS: gl.constexpr, HAS_DLSE: gl.constexpr,
    LISTED: gl.constexpr, PACKED: gl.constexpr, TOP_LEFT: gl.constexpr, HAS_BOUNDS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Computes: dq [M, D] of one (sequence, head), and with MAKE_STATS shift and delta of its queries.

    Grid: one program per (slot of 128 queries, head).
    Shapes: descriptors [B, heads, rows, width], tiles zero-filled to WIDTH columns; shift, delta [B * H, stride_stat].
    Packed: descriptors of ``arguments.ragged``, M and N token counts, shift and delta [H, stride_stat] by tiles.
    Invariants: after each step dq = sum dS K over the blocks visited.
    Mirror: streaming.backward, queries outer.
    """
    if not HAS_ALIBI:
        slopes = shift  # a pointer that nobody reads; so below
    if not MAKE_STATS:
        out = shift
        lse = shift
    if not HAS_DLSE:
        dlse = shift
    if not HAS_BOUNDS:
        bounds = tiles
    program = make_query_program(
        q_desc, k_desc, v_desc, do_desc, slopes, tiles, bounds, stride_stat, stride_slopeb, stride_slopeh,
        M, N, H, left, right, n_slots, n_planes, together, scale, cap, unit,
        BLOCK_N, K_STAGES, V_STAGES, WIDTH, PIPELINED, HEAVY_LAST, HAS_LEFT, HAS_RIGHT, TAIL,
        HAS_SOFTCAP, HAS_ALIBI, LISTED, PACKED, TOP_LEFT, HAS_BOUNDS,
    )  # fmt: skip
    if PACKED:
        statistics = placed_statistics(
            program, shift, delta, stride_stat, out, lse, dlse,
            gl.to_tensor(stride_oh), gl.to_tensor(stride_om), gl.to_tensor(stride_dlseh), gl.to_tensor(stride_dlsem),
            M, DV, HAS_DLSE, MAKE_STATS,
        )  # fmt: skip
    else:
        statistics = RowStatistics(
            shift, delta, stride_stat, out, lse, dlse,
            gl.to_tensor(stride_ob), gl.to_tensor(stride_oh), gl.to_tensor(stride_om),
            gl.to_tensor(stride_dlseb), gl.to_tensor(stride_dlseh), gl.to_tensor(stride_dlsem),
            M, H, DV, HAS_DLSE, MAKE_STATS, False,
        )  # fmt: skip
    kv_head = program.h // (H // Hkv)
    EDGES: gl.constexpr = HAS_LEFT or HAS_RIGHT or TAIL or HAS_BOUNDS
    gl.warp_specialize(
        [
            (queries_consumer, (program, statistics, dq_desc, grad_scale, 0, EDGES)),
            (queries_consumer, (program, statistics, dq_desc, grad_scale, 1, EDGES)),
            (queries_producer, (program, q_desc, k_desc, v_desc, do_desc, kv_head)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
