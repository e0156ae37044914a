"""dq: 128 queries per program, 64 in each of two warpgroups; keys and values stream past.

    S = q K^T      P = exp2(S - shift)      dP = dout V^T      dq += (P * (dP - delta)) K

With ``PIPELINED`` S of the next block is started behind the block's last product and waited for with it.
Mirror: ``backends/triton/kernels/backward.dq_kernel``.
"""

from ...triton.kernels.pieces import cut_tiles, key_interval
from ..compat import aggregate, any_value, fence_async_shared, gl, gluon, mbarrier, warpgroup_mma_wait
from .backward_pieces import (
    Listed,
    Ring,
    Scoring,
    Walk,
    accumulators,
    add_product,
    afresh,
    copy_in,
    entry_of,
    key_place,
    make_ring,
    make_walk,
    product,
    query_place,
    store_tile,
)
from .pieces import INF, LOG2E, place, rows_layout
from .rings import FAR, allocate_barriers


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


@aggregate
class RowStatistics:
    """Where the shift of P and delta are, and what they are made of where this pass makes them.

    out [rows, DV] has unit last stride; lse is contiguous. With ``PLACED`` all pointers are those of the first row already.
    """

    shift: gl.tensor
    delta: gl.tensor
    stride_stat: gl.tensor
    out: gl.tensor
    lse: gl.tensor
    dlse: gl.tensor
    stride_ob: gl.tensor
    stride_oh: gl.tensor
    stride_om: gl.tensor
    stride_dlseb: gl.tensor
    stride_dlseh: gl.tensor
    stride_dlsem: gl.tensor
    n_rows: gl.tensor
    H: gl.tensor
    DV: gl.constexpr
    HAS_DLSE: gl.constexpr
    MAKE: gl.constexpr
    PLACED: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, shift, delta, stride_stat, out, lse, dlse, stride_ob, stride_oh, stride_om,
        stride_dlseb, stride_dlseh, stride_dlsem, n_rows, H, DV, HAS_DLSE, MAKE, PLACED,
    ):  # fmt: skip
        self.shift = shift
        self.delta = delta
        self.stride_stat = stride_stat
        self.out = out
        self.lse = lse
        self.dlse = dlse
        self.stride_ob = stride_ob
        self.stride_oh = stride_oh
        self.stride_om = stride_om
        self.stride_dlseb = stride_dlseb
        self.stride_dlseh = stride_dlseh
        self.stride_dlsem = stride_dlsem
        self.n_rows = n_rows
        self.H = H
        self.DV = gl.constexpr(DV)
        self.HAS_DLSE = gl.constexpr(HAS_DLSE)
        self.MAKE = gl.constexpr(MAKE)
        self.PLACED = gl.constexpr(PLACED)

    @gluon.jit
    def start(self, b, h, stride_b, stride_h):
        """Offset of a plane."""
        offset = gl.to_tensor(0).to(gl.int64)
        if not self.PLACED:
            offset = b.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h
        return offset

    @gluon.jit
    def load(self, b, h, rows):
        """(shift, delta) of rows; planes are padded, so that no row of a tile is past the end."""
        plane = b * self.H + h
        if self.PLACED:
            plane = plane * 0
        plane = plane.to(gl.int64) * self.stride_stat
        return gl.load(self.shift + plane + rows), gl.load(self.delta + plane + rows)

    @gluon.jit
    def load_out(self, b, h, rows, columns):
        """[rows, columns] of out, zeros past its ends."""
        wide = self.start(b, h, self.stride_ob, self.stride_oh)
        at = self.out + wide + rows.to(gl.int64)[:, None] * self.stride_om + columns[None, :]
        return gl.load(at, mask=(rows < self.n_rows)[:, None] & (columns < self.DV)[None, :], other=0.0)

    @gluon.jit
    def make(self, b, h, rows, out, dout):
        """(shift, delta) of rows from [rows, columns] of out and dout, stored for the pass over keys.

        As ``rows_kernel``: dead rows and rows past the end have shift +inf and delta 0.
        """
        exists = rows < self.n_rows
        delta = gl.sum(out.to(gl.float32) * dout.to(gl.float32), 1)
        if self.HAS_DLSE:
            wide = self.start(b, h, self.stride_dlseb, self.stride_dlseh)
            at = self.dlse + wide + rows.to(gl.int64) * self.stride_dlsem
            delta -= gl.load(at, mask=exists, other=0.0)
        plane = b * self.H + h
        if self.PLACED:
            plane = plane * 0
        lse = gl.load(self.lse + plane.to(gl.int64) * self.n_rows + rows, mask=exists, other=-INF)
        dead = lse == -INF
        shift = gl.where(dead, INF, lse * LOG2E)
        delta = gl.where(dead, 0.0, delta)
        stat = plane.to(gl.int64) * self.stride_stat
        gl.store(self.shift + stat + rows, shift)
        gl.store(self.delta + stat + rows, delta)
        return shift, delta


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
def read_entry(
    tiles, bounds, slot, b, n_slots, stride_stat, H, PACKED: gl.constexpr, HAS_BOUNDS: gl.constexpr
):
    """(sequence, first query, keys, walk, ``Listed``) of a tile of queries, see ``listing``."""
    entry = entry_of(tiles, slot, b, n_slots)
    first = gl.load(entry + 2)
    n_rows = gl.load(entry + 3)
    row = gl.load(entry + 4)
    n_keys = gl.load(entry + 5)
    stop = gl.load(entry + 10)
    walk = make_walk(gl.load(entry + 7), gl.load(entry + 8), gl.load(entry + 9), stop, stop, 1, False)
    if HAS_BOUNDS:
        bounds += row.to(gl.int64) * 2
    if PACKED:
        b = gl.load(entry)
        k_row = gl.load(entry + 6)
        # rows of statistics lie by tiles
        stat = (slot * 128 - first).to(gl.int64)
        listed = Listed(
            row + n_rows, FAR - n_rows, k_row + n_keys, FAR - n_keys, stat, bounds, n_rows, HAS_BOUNDS
        )
    else:
        none = b * 0
        listed = Listed(b, none, b, none, (b * H).to(gl.int64) * stride_stat, bounds, n_rows, HAS_BOUNDS)
    return b, first, n_keys, walk, listed


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
        b, first, N, walk, listed = read_entry(
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


@gluon.jit
def placed_statistics(
    program, shift, delta, stride_stat, out, lse, dlse, stride_oh, stride_om, stride_dlseh, stride_dlsem, M,
    DV: gl.constexpr, HAS_DLSE: gl.constexpr, MAKE: gl.constexpr,
):  # fmt: skip
    """``RowStatistics`` of packed rows, whose pointers are those of the first row of the program's sequence and head."""
    listed = program.listed
    h = program.h.to(gl.int64)
    row = (listed.q_place - listed.n_rows).to(gl.int64)
    stat = listed.stat + h * stride_stat
    return RowStatistics(
        shift + stat, delta + stat, stride_stat,
        out + (h * stride_oh + row * stride_om), lse + (h * M + row), dlse + (h * stride_dlseh + row * stride_dlsem),
        stride_oh, stride_oh, stride_om, stride_dlseh, stride_dlseh, stride_dlsem,
        listed.n_rows, program.h, DV, HAS_DLSE, MAKE, True,
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
