"""dk and dv for head dims up to 128: 128 keys per program, each of two warpgroups the whole of 64 of them.

    S^T = K q^T      P^T = exp2(S^T - shift)      dv += P^T dout      dP^T = V dout^T      dk += (P^T * (dP^T - delta)) q

Every tile is transposed, so P^T and dS^T go from the accumulators straight into the next products as register operands.
S^T of the next block is started behind the block's last product and waited for with it.
Mirror: ``backends/triton/kernels/backward.dkdv_kernel``.
"""

from ...triton.kernels.pieces import cut_tiles, query_interval
from ..compat import (
    aggregate,
    any_value,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_store_wait,
    warpgroup_mma_wait,
)
from .backward_pieces import (
    Listed,
    Rows,
    Scoring,
    Walk,
    accumulators,
    add_product,
    copy_in,
    copy_out,
    entry_of,
    key_place,
    make_rows,
    make_walk,
    product,
    query_place,
    stage_tile,
)
from .pieces import place
from .rings import FAR, allocate_barriers


@aggregate
class KeyProgram:
    """One program: where it is, what it visits, and its shared memory."""

    q: Rows  # with the shift of P
    dout: Rows  # with delta
    k: gl.shared_memory_descriptor  # [warpgroups, 1, 1, 64, WIDTH]
    v: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor  # full when k and v are there
    walk: Walk
    score: Scoring
    slopes: gl.tensor
    stride_slopeb: gl.tensor
    stride_slopeh: gl.tensor
    b: gl.tensor
    kv_head: gl.tensor
    group: gl.tensor
    first: gl.tensor  # first key
    offset: gl.tensor  # of the keys against the queries
    listed: any_value  # ``Listed``, or nothing
    LISTED: gl.constexpr
    BLOCK_M: gl.constexpr
    WIDTH: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, q, dout, k, v, ready, walk, score, slopes, stride_slopeb, stride_slopeh, b, kv_head, group,
        first, offset, listed, LISTED, BLOCK_M, WIDTH,
    ):  # fmt: skip
        self.q = q
        self.dout = dout
        self.k = k
        self.v = v
        self.ready = ready
        self.walk = walk
        self.score = score
        self.slopes = slopes
        self.stride_slopeb = stride_slopeb
        self.stride_slopeh = stride_slopeh
        self.b = b
        self.kv_head = kv_head
        self.group = group
        self.first = first
        self.offset = offset
        self.listed = listed
        self.LISTED = gl.constexpr(LISTED)
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.WIDTH = gl.constexpr(WIDTH)

    @gluon.jit
    def weigh(self, s, i, PART: gl.constexpr, EDGE: gl.constexpr):
        """(P^T, what multiplies dP^T - delta) of the step's S^T, for the 64 keys of part ``PART``."""
        layout: gl.constexpr = s.type.layout
        member, tile = self.walk.at(i)
        row = tile * self.BLOCK_M
        queries = gl.arange(0, self.BLOCK_M, gl.SliceLayout(0, layout))
        center = self.first - self.offset + PART * 64 - row + gl.arange(0, 64, gl.SliceLayout(1, layout))
        slope = 0.0
        if self.score.HAS_ALIBI:
            h = self.kv_head * self.group + member
            slope = gl.load(self.slopes + self.b * self.stride_slopeb + h * self.stride_slopeh)
        shift = self.q.numbers(i, gl.SliceLayout(0, layout))
        keys, own = 0, 0
        BOUNDED: gl.constexpr = EDGE and self.LISTED and self.listed.HAS_BOUNDS
        if BOUNDED:
            keys = self.first + PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
            own = self.listed.own_bounds(row + queries)
        return self.score.weigh(
            s, shift[None, :], center, queries, row, slope, keys, own, EDGE, "columns" if BOUNDED else ""
        )


@gluon.jit
def keys_producer(
    program, q_desc, k_desc, v_desc, do_desc, shift, delta, stride_stat, H,
    WARPGROUPS: gl.constexpr, RELEASED_TOGETHER: gl.constexpr,
):  # fmt: skip
    """Load K and V once, then the group's queries and their gradients block by block.

    With ``RELEASED_TOGETHER`` readers hand back the stage of q, and mean that of dout with it.
    """
    b, kv_head = program.b, program.kv_head
    where, start = key_place(program)
    mbarrier.expect(program.ready, WARPGROUPS * (k_desc.block_type.nbytes + v_desc.block_type.nbytes))
    for part in gl.static_range(WARPGROUPS):
        row = start + program.first + part * 64
        copy_in(k_desc, where, kv_head, row, program.ready, program.k.index(part))
        copy_in(v_desc, where, kv_head, row, program.ready, program.v.index(part))
    where, start = query_place(program)
    for i in range(0, program.walk.total):
        member, tile = program.walk.at(i)
        h = kv_head * program.group + member
        if program.LISTED:
            plane = program.listed.stat + h.to(gl.int64) * stride_stat
        else:
            plane = (b * H + h).to(gl.int64) * stride_stat
        row = tile * program.BLOCK_M
        program.q.ring.acquire(i)
        program.q.load(i, q_desc, shift + plane, where, h, start, row, program.BLOCK_M)
        if not RELEASED_TOGETHER:
            program.dout.ring.acquire(i)
        program.dout.load(i, do_desc, delta + plane, where, h, start, row, program.BLOCK_M)


@gluon.jit
def keys_step(program, i, s, dk, dv, PART: gl.constexpr, EDGE: gl.constexpr, LAST: gl.constexpr):
    """One block of queries; ``s`` is its S^T, and that of the next block on return."""
    BLOCK_M: gl.constexpr = program.BLOCK_M
    WIDTH: gl.constexpr = program.WIDTH
    DTYPE: gl.constexpr = program.k.dtype
    k = program.k.index(PART).reshape([64, WIDTH])
    v = program.v.index(PART).reshape([64, WIDTH])
    q = program.q.ring.tile(i, BLOCK_M, WIDTH)
    dout = program.dout.ring.tile(i, BLOCK_M, WIDTH)
    program.dout.ring.wait(i)
    dp_next = product(v, dout.permute((1, 0)), BLOCK_M)
    p, weight = program.weigh(s, i, PART, EDGE)  # [64, BLOCK_M]
    dv_next = add_product(p, dout, dv, DTYPE, WIDTH)
    dp = warpgroup_mma_wait(1, deps=(dp_next,))  # [64, BLOCK_M]
    delta = program.dout.numbers(i, gl.SliceLayout(0, dp.type.layout))
    ds = weight * (dp - delta[None, :])
    dk_next = add_product(ds, q, dk, DTYPE, WIDTH)
    if LAST:
        dv = warpgroup_mma_wait(1, deps=(dv_next,))
        dk = warpgroup_mma_wait(0, deps=(dk_next,))
        s_after = s
    else:
        program.q.ring.wait(i + 1)
        s_next = product(k, program.q.ring.tile(i + 1, BLOCK_M, WIDTH).permute((1, 0)), BLOCK_M)
        dv = warpgroup_mma_wait(2, deps=(dv_next,))
        program.dout.ring.release(i)
        s_after, dk = warpgroup_mma_wait(0, deps=(s_next, dk_next))
        program.q.ring.release(i)
    return s_after, dk, dv


@gluon.jit
def keys_consumer(program, dk_desc, dv_desc, grad_scale, PART: gl.constexpr, EDGES: gl.constexpr):
    """dk and dv of 64 keys."""
    WIDTH: gl.constexpr = program.WIDTH
    BLOCK_M: gl.constexpr = program.BLOCK_M
    dk = accumulators(WIDTH)
    dv = accumulators(WIDTH)
    total = program.walk.total
    plain = program.walk.plain(EDGES)
    mbarrier.wait(program.ready, 0)
    program.q.ring.wait(0)
    k = program.k.index(PART).reshape([64, WIDTH])
    s = product(k, program.q.ring.tile(0, BLOCK_M, WIDTH).permute((1, 0)), BLOCK_M)
    s = warpgroup_mma_wait(0, deps=(s,))
    for i in range(0, plain):
        s, dk, dv = keys_step(program, i, s, dk, dv, PART, False, False)
    if EDGES:
        for i in range(plain, total - 1):
            s, dk, dv = keys_step(program, i, s, dk, dv, PART, True, False)
    s, dk, dv = keys_step(program, total - 1, s, dk, dv, PART, EDGES, True)
    where, start = key_place(program)
    kv_head, row = program.kv_head, start + program.first + PART * 64
    stage_tile(program.k.index(PART), dk * grad_scale, dk_desc.dtype, WIDTH)
    stage_tile(program.v.index(PART), dv, dv_desc.dtype, WIDTH)
    fence_async_shared()
    copy_out(dk_desc, where, kv_head, row, program.k.index(PART))
    copy_out(dv_desc, where, kv_head, row, program.v.index(PART))
    tma_store_wait(0)


@gluon.jit
def walk_queries(
    first, M, N, left, right, group,
    KEYS: gl.constexpr, BLOCK_M: gl.constexpr, GROUPED: gl.constexpr, BANDED: gl.constexpr,
):  # fmt: skip
    """Blocks of queries that see any of the keys from ``first`` on.

    Neither end needs a mask: rows of keys past the end are never stored, and queries past the end have P = 0.
    """
    lo, full_lo, full_hi, hi = gl.to_tensor(0), 0, M, M
    if BANDED:
        last = gl.minimum(first + KEYS, N) - 1
        lo, full_lo, full_hi, hi = query_interval(first, last, N - M, left, right, M)
    start, full_start, full_stop, stop = cut_tiles(lo, full_lo, full_hi, hi, M, BLOCK_M, False)
    return make_walk(start, full_start, full_stop, stop, (M + BLOCK_M - 1) // BLOCK_M, group, GROUPED)


@gluon.jit
def read_entry(
    tiles, bounds, slot, b, n_slots, stride_stat, M, H, group,
    BLOCK_M: gl.constexpr, GROUPED: gl.constexpr, PACKED: gl.constexpr, HAS_BOUNDS: gl.constexpr,
):  # fmt: skip
    """(sequence, first key, keys, walk, ``Listed``) of a tile of keys, see ``listing_keys``."""
    entry = entry_of(tiles, slot, b, n_slots)
    first = gl.load(entry + 1)
    n_keys = gl.load(entry + 2)
    n_rows = gl.load(entry + 4)
    row = gl.load(entry + 5)
    stop = gl.load(entry + 10)
    n_tiles = (M + BLOCK_M - 1) // BLOCK_M
    if PACKED:
        n_tiles = stop
    walk = make_walk(
        gl.load(entry + 7), gl.load(entry + 8), gl.load(entry + 9), stop, n_tiles, group, GROUPED
    )
    if HAS_BOUNDS:
        bounds += row.to(gl.int64) * 2
    if PACKED:
        b = gl.load(entry)
        k_row = gl.load(entry + 3)
        # in tiles, so that the compiler sees that rows of statistics are aligned
        stat = gl.load(entry + 6).to(gl.int64) * 128
        listed = Listed(
            row + n_rows, FAR - n_rows, k_row + n_keys, FAR - n_keys, stat, bounds, n_rows, HAS_BOUNDS
        )
    else:
        none = b * 0
        listed = Listed(b, none, b, none, (b * H).to(gl.int64) * stride_stat, bounds, n_rows, HAS_BOUNDS)
    return b, first, n_keys, walk, listed


@gluon.jit
def make_key_program(
    q_desc, k_desc, v_desc, do_desc, slopes, tiles, bounds, stride_stat, stride_slopeb, stride_slopeh,
    M, N, H, Hkv, left, right, n_slots, n_planes, together, scale, cap, unit,
    WARPGROUPS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr,
    GROUPED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, HAS_ALIBI: gl.constexpr, RELEASED_TOGETHER: gl.constexpr,
    LISTED: gl.constexpr, PACKED: gl.constexpr, TOP_LEFT: gl.constexpr, HAS_BOUNDS: gl.constexpr,
):  # fmt: skip
    """Place a program and lay out its shared memory."""
    slot, plane = place(gl.program_id(0), n_slots, n_planes, together, False)
    b = plane // Hkv
    group = H // Hkv
    KEYS: gl.constexpr = 64 * WARPGROUPS
    if LISTED:
        if not HAS_BOUNDS:
            bounds = tiles
        b, first, N, walk, listed = read_entry(
            tiles, bounds, slot, b, n_slots, stride_stat, M, H, group, BLOCK_M, GROUPED, PACKED, HAS_BOUNDS
        )
        offset = N - listed.n_rows
        if TOP_LEFT:
            right = gl.minimum(right, -offset)
    else:
        listed = gl.constexpr(0)
        offset = N - M
        first = slot * KEYS
        walk = walk_queries(first, M, N, left, right, group, KEYS, BLOCK_M, GROUPED, HAS_LEFT or HAS_RIGHT)
    score = Scoring(scale, cap, unit, right, left, M, HAS_SOFTCAP, HAS_ALIBI, HAS_RIGHT, HAS_LEFT, False)
    k = gl.allocate_shared_memory(k_desc.dtype, [WARPGROUPS] + k_desc.block_type.shape, k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [WARPGROUPS] + v_desc.block_type.shape, v_desc.layout)
    ready = allocate_barriers(1, 1).index(0)
    q = make_rows(q_desc, STAGES, BLOCK_M, 2)
    dout = make_rows(do_desc, STAGES, BLOCK_M, 0 if RELEASED_TOGETHER else 2)
    fence_async_shared()
    return KeyProgram(
        q, dout, k, v, ready, walk, score, slopes, stride_slopeb, stride_slopeh,
        b, plane % Hkv, group, first, offset, listed, LISTED, BLOCK_M, WIDTH,
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        *("stride_slopeb", "stride_slopeh", "M", "N", "H", "Hkv", "left", "right"),
        *("n_slots", "n_planes", "together"),
    ]
)
def dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, shift, delta, slopes, tiles, bounds,
    stride_stat, stride_slopeb, stride_slopeh,
    M, N, H, Hkv, left, right, n_slots, n_planes, together, grad_scale, scale, cap, unit,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr, GROUPED: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, HAS_ALIBI: gl.constexpr,
    LISTED: gl.constexpr, PACKED: gl.constexpr, TOP_LEFT: gl.constexpr, HAS_BOUNDS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Computes: dk [N, D] and dv [N, Dv] of one (sequence, key/value head), summed over the head's query heads.

    Grid: one program per (slot of 128 keys, key/value head).
    Shapes: descriptors [B, heads, rows, width], tiles zero-filled to WIDTH columns; shift, delta [B * H, stride_stat].
    Packed: descriptors of ``arguments.ragged``, M and N token counts, shift and delta [H, stride_stat] by tiles.
    Invariants: after each step dv = sum P^T dout and dk = sum dS^T q over the blocks visited.
    Mirror: streaming.backward, keys outer.
    """
    if not HAS_ALIBI:
        slopes = shift  # a pointer that nobody reads
    program = make_key_program(
        q_desc, k_desc, v_desc, do_desc, slopes, tiles, bounds, stride_stat, stride_slopeb, stride_slopeh,
        M, N, H, Hkv, left, right, n_slots, n_planes, together, scale, cap, unit,
        2, BLOCK_M, STAGES, WIDTH, GROUPED, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, False,
        LISTED, PACKED, TOP_LEFT, HAS_BOUNDS,
    )  # fmt: skip
    EDGES: gl.constexpr = HAS_LEFT or HAS_RIGHT or HAS_BOUNDS
    gl.warp_specialize(
        [
            (keys_consumer, (program, dk_desc, dv_desc, grad_scale, 0, EDGES)),
            (keys_consumer, (program, dk_desc, dv_desc, grad_scale, 1, EDGES)),
            (
                keys_producer,
                (program, q_desc, k_desc, v_desc, do_desc, shift, delta, stride_stat, H, 2, False),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
