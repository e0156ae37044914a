"""dk and dv for head dims up to 256: 64 keys per program, one warpgroup per gradient.

Warpgroup 0 makes S^T, P^T and dv, warpgroup 1 makes dP^T, dS^T and dk: two products each, with both accumulators
[64, 256] as large as registers allow. P^T (times the derivative of softcap) goes one way through shared memory, in fp32.
Mirror: ``backward_keys``, which does the same with both halves in one warpgroup.
"""

from ..compat import aggregate, gl, gluon, mbarrier, warpgroup_mma_wait
from .backward_keys import KeyProgram, keys_producer, make_key_program
from .backward_pieces import (
    accumulators,
    add_product,
    key_place,
    product,
    store_tile,
)
from .rings import named_barrier

# named barriers
FILLED = gl.constexpr(6)  # and 7: a slot of P^T holds a block
TAKEN = gl.constexpr(8)  # and 9: it may be overwritten
DONE = gl.constexpr(10)  # the other warpgroup has read K, or V, for the last time


@aggregate
class SplitProgram:
    """A program whose warpgroups hand P^T over."""

    base: KeyProgram
    p: gl.shared_memory_descriptor  # [SLOTS, 64, BLOCK_M]
    SLOTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, base, p, SLOTS):
        self.base = base
        self.p = p
        self.SLOTS = gl.constexpr(SLOTS)

    @gluon.jit
    def give(self, i, weight):
        """Warpgroup 0: hand the block of step i over."""
        slot = i % self.SLOTS
        if i >= self.SLOTS:
            named_barrier("sync", TAKEN + slot, 256)
        self.p.index(slot).store(weight)
        named_barrier("arrive", FILLED + slot, 256)

    @gluon.jit
    def take(self, i, LAYOUT: gl.constexpr):
        """Warpgroup 1: the block of step i."""
        slot = i % self.SLOTS
        named_barrier("sync", FILLED + slot, 256)
        weight = self.p.index(slot).load(LAYOUT)
        named_barrier("arrive", TAKEN + slot, 256)
        return weight

    @gluon.jit
    def settle(self, total):
        """Warpgroup 0: meet the hand-backs that no block waited for, so that every barrier ends even."""
        for slot in gl.static_range(self.SLOTS):
            if slot < total:
                named_barrier("sync", TAKEN + slot, 256)


@gluon.jit
def values_step(split, i, s, dv, EDGE: gl.constexpr, LAST: gl.constexpr):
    """One block of queries for dv; ``s`` is its S^T, and that of the next block on return."""
    program = split.base
    BLOCK_M: gl.constexpr = program.BLOCK_M
    WIDTH: gl.constexpr = program.WIDTH
    p, weight = program.weigh(s, i, 0, EDGE)  # [64, BLOCK_M]
    program.q.ring.release(i)
    split.give(i, weight)
    program.dout.ring.wait(i)
    dv_next = add_product(p, program.dout.ring.tile(i, BLOCK_M, WIDTH), dv, program.k.dtype, WIDTH)
    if LAST:
        dv = warpgroup_mma_wait(0, deps=(dv_next,))
        s_after = s
    else:
        k = program.k.index(0).reshape([64, WIDTH])
        program.q.ring.wait(i + 1)
        s_next = product(k, program.q.ring.tile(i + 1, BLOCK_M, WIDTH).permute((1, 0)), BLOCK_M)
        dv = warpgroup_mma_wait(1, deps=(dv_next,))
        program.dout.ring.release(i)
        s_after = warpgroup_mma_wait(0, deps=(s_next,))
    return s_after, dv


@gluon.jit
def values_consumer(split, dv_desc, EDGES: gl.constexpr):
    """Warpgroup 0: S^T, P^T, dv."""
    program = split.base
    BLOCK_M: gl.constexpr = program.BLOCK_M
    WIDTH: gl.constexpr = program.WIDTH
    dv = accumulators(WIDTH)
    total = program.walk.total
    plain = program.walk.plain(EDGES)
    mbarrier.wait(program.ready, 0)
    program.q.ring.wait(0)
    k = program.k.index(0).reshape([64, WIDTH])
    s = product(k, program.q.ring.tile(0, BLOCK_M, WIDTH).permute((1, 0)), BLOCK_M)
    s = warpgroup_mma_wait(0, deps=(s,))
    for i in range(0, plain):
        s, dv = values_step(split, i, s, dv, False, False)
    if EDGES:
        for i in range(plain, total - 1):
            s, dv = values_step(split, i, s, dv, True, False)
    s, dv = values_step(split, total - 1, s, dv, EDGES, True)
    split.settle(total)
    named_barrier("sync", DONE, 256)
    where, start = key_place(program)
    store_tile(dv_desc, program.v.index(0), dv, where, program.kv_head, start + program.first, WIDTH)


@gluon.jit
def keys_half_step(split, i, dp, dk, LAST: gl.constexpr):
    """One block of queries for dk; ``dp`` is its dP^T, and that of the next block on return."""
    program = split.base
    BLOCK_M: gl.constexpr = program.BLOCK_M
    WIDTH: gl.constexpr = program.WIDTH
    layout: gl.constexpr = dp.type.layout
    delta = program.dout.numbers(i, gl.SliceLayout(0, layout))
    program.dout.ring.release(i)
    weight = split.take(i, layout)  # [64, BLOCK_M]
    ds = weight * (dp - delta[None, :])
    program.q.ring.wait(i)
    dk_next = add_product(ds, program.q.ring.tile(i, BLOCK_M, WIDTH), dk, program.k.dtype, WIDTH)
    if LAST:
        dk = warpgroup_mma_wait(0, deps=(dk_next,))
        dp_after = dp
    else:
        v = program.v.index(0).reshape([64, WIDTH])
        program.dout.ring.wait(i + 1)
        dp_next = product(v, program.dout.ring.tile(i + 1, BLOCK_M, WIDTH).permute((1, 0)), BLOCK_M)
        dk = warpgroup_mma_wait(1, deps=(dk_next,))
        program.q.ring.release(i)
        dp_after = warpgroup_mma_wait(0, deps=(dp_next,))
    return dp_after, dk


@gluon.jit
def keys_half_consumer(split, dk_desc, grad_scale):
    """Warpgroup 1: dP^T, dS^T, dk."""
    program = split.base
    BLOCK_M: gl.constexpr = program.BLOCK_M
    WIDTH: gl.constexpr = program.WIDTH
    dk = accumulators(WIDTH)
    total = program.walk.total
    mbarrier.wait(program.ready, 0)
    program.dout.ring.wait(0)
    v = program.v.index(0).reshape([64, WIDTH])
    dp = product(v, program.dout.ring.tile(0, BLOCK_M, WIDTH).permute((1, 0)), BLOCK_M)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    for i in range(0, total - 1):
        dp, dk = keys_half_step(split, i, dp, dk, False)
    dp, dk = keys_half_step(split, total - 1, dp, dk, True)
    named_barrier("sync", DONE, 256)
    where, start = key_place(program)
    row = start + program.first
    store_tile(dk_desc, program.k.index(0), dk * grad_scale, where, program.kv_head, row, WIDTH)


@gluon.jit(
    do_not_specialize=[
        *("stride_slopeb", "stride_slopeh", "M", "N", "H", "Hkv", "left", "right"),
        *("n_slots", "n_planes", "together"),
    ]
)
def dkdv_split_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, shift, delta, slopes, tiles, bounds,
    stride_stat, stride_slopeb, stride_slopeh,
    M, N, H, Hkv, left, right, n_slots, n_planes, together, grad_scale, scale, cap, unit,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, P_LAYOUT: gl.constexpr,
    WIDTH: gl.constexpr, GROUPED: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, HAS_ALIBI: gl.constexpr,
    LISTED: gl.constexpr, PACKED: gl.constexpr, TOP_LEFT: gl.constexpr, HAS_BOUNDS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Computes: dk [N, D] and dv [N, Dv] of one (sequence, key/value head), summed over the head's query heads.

    Grid: one program per (slot of 64 keys, key/value head).
    Shapes: descriptors [B, heads, rows, width], tiles zero-filled to WIDTH columns; shift, delta [B * H, stride_stat].
    Packed: as ``backward_keys.dkdv_kernel``.
    Invariants: after each step dv = sum P^T dout in one warpgroup, dk = sum dS^T q in the other.
    Mirror: streaming.backward, keys outer.
    """
    if not HAS_ALIBI:
        slopes = shift  # a pointer that nobody reads
    program = make_key_program(
        q_desc, k_desc, v_desc, do_desc, slopes, tiles, bounds, stride_stat, stride_slopeb, stride_slopeh,
        M, N, H, Hkv, left, right, n_slots, n_planes, together, scale, cap, unit,
        1, BLOCK_M, STAGES, WIDTH, GROUPED, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, False,
        LISTED, PACKED, TOP_LEFT, HAS_BOUNDS,
    )  # fmt: skip
    split = SplitProgram(
        program, gl.allocate_shared_memory(gl.float32, [SLOTS, 64, BLOCK_M], P_LAYOUT), SLOTS
    )
    EDGES: gl.constexpr = HAS_LEFT or HAS_RIGHT or HAS_BOUNDS
    gl.warp_specialize(
        [
            (values_consumer, (split, dv_desc, EDGES)),
            (keys_half_consumer, (split, dk_desc, grad_scale)),
            (
                keys_producer,
                (program, q_desc, k_desc, v_desc, do_desc, shift, delta, stride_stat, H, 1, False),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
