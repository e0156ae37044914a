"""All three gradients in one pass over the queries, for head dims up to 128 and callers who do not ask for equal bits.

As ``backward_keys``, and dS^T also goes to shared memory, where both warpgroups together make dq = dS K of the block. It
is added to an fp32 sum in global memory by the copy engine: five products per pair of tiles instead of seven, and an
order of addition that differs from run to run.
Mirror: ``backward_keys``; Shah et al., FlashAttention-3 (arXiv 2407.08608), for the joint pass.
"""

from ..compat import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_add,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .backward_keys import KeyProgram, keys_producer, make_key_program
from .backward_pieces import accumulators, add_product, afresh, product, stage_tile
from .pieces import product_layout
from .rings import named_barrier

# named barrier: dS of both warpgroups is there; and at the end, that nobody reads K any more
SHARED = gl.constexpr(6)


@aggregate
class JointProgram:
    """A program whose warpgroups also make dq together, each half of its rows (SPLIT_ROWS) or of its columns."""

    base: KeyProgram
    ds: gl.shared_memory_descriptor  # [2 * SLOTS, 64, BLOCK_M], both warpgroups' dS^T of a slot side by side
    dq: gl.shared_memory_descriptor  # [2, 1, 1, rows, columns] fp32, each warpgroup's part on its way out
    SLOTS: gl.constexpr
    SPLIT_ROWS: gl.constexpr
    ROWS: gl.constexpr
    COLUMNS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, base, ds, dq, SLOTS, SPLIT_ROWS, ROWS, COLUMNS):
        self.base = base
        self.ds = ds
        self.dq = dq
        self.SLOTS = gl.constexpr(SLOTS)
        self.SPLIT_ROWS = gl.constexpr(SPLIT_ROWS)
        self.ROWS = gl.constexpr(ROWS)
        self.COLUMNS = gl.constexpr(COLUMNS)

    @gluon.jit
    def left(self, i, OF: gl.constexpr, PART: gl.constexpr):
        """dS [ROWS, 64] of warpgroup OF's keys, the rows that part PART multiplies."""
        ds = self.ds.index((i % self.SLOTS) * 2 + OF)
        if self.SPLIT_ROWS:
            ds = ds.slice(PART * self.ROWS, self.ROWS, dim=1)
        return ds.permute((1, 0))

    @gluon.jit
    def right(self, i, OF: gl.constexpr, PART: gl.constexpr):
        """K [64, COLUMNS] of warpgroup OF's keys, the columns that part PART multiplies."""
        k = self.base.k.index(afresh(OF, i, True)).reshape([64, self.base.WIDTH])
        if not self.SPLIT_ROWS:
            k = k.slice(PART * self.COLUMNS, self.COLUMNS, dim=1)
        return k

    @gluon.jit
    def start_dq(self, i, PART: gl.constexpr):
        """Start this part of dq of step i, over the keys of both warpgroups."""
        zero = gl.zeros([self.ROWS, self.COLUMNS], gl.float32, product_layout(self.COLUMNS))
        first = warpgroup_mma(
            self.left(i, 0, PART), self.right(i, 0, PART), zero, use_acc=False, is_async=True
        )
        return warpgroup_mma(self.left(i, 1, PART), self.right(i, 1, PART), first, is_async=True)

    @gluon.jit
    def add_dq(self, i, desc, dq, PART: gl.constexpr):
        """Hand this part of dq to the copy engine, which adds it; the last one must have left the buffer."""
        program = self.base
        member, tile = program.walk.at(i)
        h = program.kv_head * program.group + member
        row, column = tile * program.BLOCK_M, 0
        if self.SPLIT_ROWS:
            row += PART * self.ROWS
        else:
            column = PART * self.COLUMNS
        buffer = self.dq.index(PART)
        tma_store_wait(0)
        buffer.reshape([self.ROWS, self.COLUMNS]).store(dq)
        fence_async_shared()
        tma_add(desc, [program.b, h, row, column], buffer)


@gluon.jit
def joint_step(joint, dq_desc, i, s, dk, dv, PART: gl.constexpr, EDGE: gl.constexpr, LAST: gl.constexpr):
    """One block of queries; ``s`` is its S^T, and that of the next block on return."""
    program = joint.base
    BLOCK_M: gl.constexpr = program.BLOCK_M
    WIDTH: gl.constexpr = program.WIDTH
    DTYPE: gl.constexpr = program.k.dtype
    k = program.k.index(afresh(PART, i, True)).reshape([64, WIDTH])
    v = program.v.index(afresh(PART, i, True)).reshape([64, WIDTH])
    q = program.q.ring.tile(i, BLOCK_M, WIDTH)
    dout = program.dout.ring.tile(i, BLOCK_M, WIDTH)
    program.dout.ring.wait(i)
    dp_next = product(v, dout.permute((1, 0)), BLOCK_M)
    p, weight = program.weigh(s, i, PART, EDGE)  # [64, BLOCK_M]
    dv_next = add_product(p, dout, dv, DTYPE, WIDTH)
    dp = warpgroup_mma_wait(1, deps=(dp_next,))  # [64, BLOCK_M]
    delta = program.dout.numbers(i, gl.SliceLayout(0, dp.type.layout))
    ds = (weight * (dp - delta[None, :])).to(DTYPE)
    joint.ds.index((i % joint.SLOTS) * 2 + PART).store(ds)
    fence_async_shared()
    named_barrier("sync", SHARED, 256)
    dq_next = joint.start_dq(i, PART)
    dv = warpgroup_mma_wait(2, deps=(dv_next,))
    dk_next = add_product(ds, q, dk, DTYPE, WIDTH)
    dq = warpgroup_mma_wait(1, deps=(dq_next,))  # [ROWS, COLUMNS]
    joint.add_dq(i, dq_desc, dq, PART)
    if LAST:
        s_after = s
        dk = warpgroup_mma_wait(0, deps=(dk_next,))
    else:
        # not earlier: S^T of the next block beside dq is more than the registers hold
        program.q.ring.wait(i + 1)
        s_next = product(k, program.q.ring.tile(i + 1, BLOCK_M, WIDTH).permute((1, 0)), BLOCK_M)
        s_after, dk = warpgroup_mma_wait(0, deps=(s_next, dk_next))
    program.q.ring.release(i)
    return s_after, dk, dv


@gluon.jit
def joint_consumer(joint, dk_desc, dv_desc, dq_desc, grad_scale, PART: gl.constexpr, EDGES: gl.constexpr):
    """dk and dv of 64 keys, and a part of every dq."""
    program = joint.base
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
        s, dk, dv = joint_step(joint, dq_desc, i, s, dk, dv, PART, False, False)
    if EDGES:
        for i in range(plain, total - 1):
            s, dk, dv = joint_step(joint, dq_desc, i, s, dk, dv, PART, True, False)
    s, dk, dv = joint_step(joint, dq_desc, total - 1, s, dk, dv, PART, EDGES, True)
    named_barrier("sync", SHARED, 256)
    b, kv_head, row = program.b, program.kv_head, program.first + PART * 64
    stage_tile(program.k.index(PART), dk * grad_scale, dk_desc.dtype, WIDTH)
    stage_tile(program.v.index(PART), dv, dv_desc.dtype, WIDTH)
    fence_async_shared()
    tma_store(dk_desc, [b, kv_head, row, 0], program.k.index(PART))
    tma_store(dv_desc, [b, kv_head, row, 0], program.v.index(PART))
    tma_store_wait(0)


@gluon.jit(
    do_not_specialize=[
        *("stride_slopeb", "stride_slopeh", "M", "N", "H", "Hkv", "left", "right"),
        *("n_slots", "n_planes", "together"),
    ]
)
def joint_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, dq_desc, shift, delta, slopes,
    stride_stat, stride_slopeb, stride_slopeh,
    M, N, H, Hkv, left, right, n_slots, n_planes, together, grad_scale, scale, cap, unit,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, SPLIT_ROWS: gl.constexpr,
    DS_LAYOUT: gl.constexpr, WIDTH: gl.constexpr, GROUPED: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, HAS_ALIBI: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Computes: dk [N, D] and dv [N, Dv] of one (sequence, key/value head), and adds its share to dq / scale in fp32.

    Grid: one program per (slot of 128 keys, key/value head).
    Shapes: descriptors [B, heads, rows, width], tiles zero-filled to WIDTH columns; shift, delta [B * H, stride_stat].
    Invariants: after each step dv = sum P^T dout, dk = sum dS^T q, and the block's dq has its dS K from these keys.
    Mirror: streaming.backward, keys outer.
    """
    if not HAS_ALIBI:
        slopes = shift  # a pointer that nobody reads
    program = make_key_program(
        q_desc, k_desc, v_desc, do_desc, slopes, shift, shift, stride_stat, stride_slopeb, stride_slopeh,
        M, N, H, Hkv, left, right, n_slots, n_planes, together, scale, cap, unit,
        2, BLOCK_M, STAGES, WIDTH, GROUPED, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, True,
        False, False, False, False,
    )  # fmt: skip
    ds = gl.allocate_shared_memory(k_desc.dtype, [2 * SLOTS, 64, BLOCK_M], DS_LAYOUT)
    dq = gl.allocate_shared_memory(gl.float32, [2] + dq_desc.block_type.shape, dq_desc.layout)
    joint = JointProgram(
        program, ds, dq, SLOTS, SPLIT_ROWS, dq_desc.block_type.shape[2], dq_desc.block_type.shape[3]
    )
    gl.warp_specialize(
        [
            (joint_consumer, (joint, dk_desc, dv_desc, dq_desc, grad_scale, 0, HAS_LEFT or HAS_RIGHT)),
            (joint_consumer, (joint, dk_desc, dv_desc, dq_desc, grad_scale, 1, HAS_LEFT or HAS_RIGHT)),
            (
                keys_producer,
                (program, q_desc, k_desc, v_desc, do_desc, shift, delta, stride_stat, H, 2, True),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
