"""State and small steps shared by the kernels of the backward: rings of tiles, the order of tiles, scores, named barriers.

One producer warp fills rings by TMA, two warpgroups consume them. A ring stage has a ``full`` barrier (the producer's one
arrival, and the bytes) and an ``empty`` barrier (one arrival per warpgroup that read it).
Mirror: ``backends/triton/kernels/pieces``, whose scalar pieces are used as they are.
"""

from ...triton.kernels.pieces import tile_number
from ..compat import (
    aggregate,
    copy_arrive,
    copy_load,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
)
from .listing import HEAD, WIDTH
from .pieces import operand_layout, product_layout, tanh
from .rings import FAR, allocate_barriers

HEAD_NUMBERS = gl.constexpr(HEAD)
ENTRY = gl.constexpr(WIDTH)


@gluon.constexpr_function
def is_ragged(shape):
    """Whether a block is one of ``arguments.ragged``."""
    return len(shape) == 5


@gluon.jit
def copy_in(desc, place, h, row, full, target):
    """Start the copy of a block into shared memory."""
    RAGGED: gl.constexpr = is_ragged(desc.block_type.shape)
    if RAGGED:
        tma_load(desc, [FAR, place, h, row, 0], full, target)
    else:
        tma_load(desc, [place, h, row, 0], full, target)


@gluon.jit
def copy_out(desc, place, h, row, source):
    """Start the copy of a block from shared memory; what is past the end is dropped."""
    RAGGED: gl.constexpr = is_ragged(desc.block_type.shape)
    if RAGGED:
        tma_store(desc, [FAR, place, h, row, 0], source)
    else:
        tma_store(desc, [place, h, row, 0], source)


@aggregate
class Ring:
    """``STAGES`` tiles [1, 1, rows, WIDTH] in shared memory, filled and drained in turn; step ``i`` uses stage i % STAGES."""

    data: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, data, full, empty, STAGES):
        self.data = data
        self.full = full
        self.empty = empty
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def tile(self, i, ROWS: gl.constexpr, WIDTH: gl.constexpr):
        """[ROWS, WIDTH] view of the step's tile."""
        return self.data.index(i % self.STAGES).reshape([ROWS, WIDTH])

    @gluon.jit
    def acquire(self, i):
        """Producer: wait until every reader has left the stage of step i."""
        mbarrier.wait(self.empty.index(i % self.STAGES), ((i // self.STAGES) & 1) ^ 1)

    @gluon.jit
    def load(self, i, desc, place, h, row):
        """Producer: fill the stage of step i from ``row`` of a plane; rows and columns past the tensor's end are zeros."""
        full = self.full.index(i % self.STAGES)
        mbarrier.expect(full, desc.block_type.nbytes)
        copy_in(desc, place, h, row, full, self.data.index(i % self.STAGES))

    @gluon.jit
    def wait(self, i):
        """Reader: wait for the tile of step i."""
        mbarrier.wait(self.full.index(i % self.STAGES), (i // self.STAGES) & 1)

    @gluon.jit
    def release(self, i):
        """Reader: this warpgroup reads the tile of step i no more."""
        mbarrier.arrive(self.empty.index(i % self.STAGES), count=1)


@gluon.jit
def make_ring(desc, STAGES: gl.constexpr, READERS: gl.constexpr):
    """An empty ring of tiles of ``desc``; no ``READERS`` if its stages are handed back with another ring's.

    An mbarrier that nobody waits at is not made: the compiler gives its memory to tiles, which a live mbarrier may not be.
    """
    data = gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout)
    full = allocate_barriers(STAGES, 1)
    if READERS == 0:
        empty = full
    else:
        empty = allocate_barriers(STAGES, READERS)
    return Ring(data, full, empty, STAGES)


@aggregate
class Rows:
    """A ring of query-side tiles and one number per row beside each tile."""

    ring: Ring
    stat: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, ring, stat):
        self.ring = ring
        self.stat = stat

    @gluon.jit
    def load(self, i, desc, numbers, place, h, start, row, ROWS: gl.constexpr):
        """Producer: fill an empty stage with tile and numbers of step i; ``numbers`` has one for every row behind ``start``."""
        lanes: gl.constexpr = gl.BlockedLayout([ROWS // 32], [32], [1], [0])
        stage = i % self.ring.STAGES
        copy_load(self.stat.index(stage), numbers + row + gl.arange(0, ROWS, lanes))
        # the barrier's phase stays open until these copies have landed, and then for the tile's bytes
        copy_arrive(self.ring.full.index(stage))
        self.ring.load(i, desc, place, h, start + row)

    @gluon.jit
    def numbers(self, i, LAYOUT: gl.constexpr):
        """The numbers of step i."""
        return self.stat.index(i % self.ring.STAGES).load(LAYOUT)


@gluon.jit
def make_rows(desc, STAGES: gl.constexpr, ROWS: gl.constexpr, READERS: gl.constexpr):
    """An empty ring of query-side tiles."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Rows(make_ring(desc, STAGES, READERS), gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], flat))


@aggregate
class Listed:
    """What a list says about the rows of a program.

    Rows of queries and keys begin at (place, start) of their descriptors, see ``arguments.ragged``; the numbers of row
    statistics begin at ``stat`` of the first head's; ``bounds`` begin at the sequence's first query.
    """

    q_place: gl.tensor
    q_start: gl.tensor
    k_place: gl.tensor
    k_start: gl.tensor
    stat: gl.tensor
    bounds: gl.tensor
    n_rows: gl.tensor
    HAS_BOUNDS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, q_place, q_start, k_place, k_start, stat, bounds, n_rows, HAS_BOUNDS):
        self.q_place = q_place
        self.q_start = q_start
        self.k_place = k_place
        self.k_start = k_start
        self.stat = stat
        self.bounds = bounds
        self.n_rows = n_rows
        self.HAS_BOUNDS = gl.constexpr(HAS_BOUNDS)

    @gluon.jit
    def own_bounds(self, rows):
        """Where the bounds of rows of queries are; rows past the last one have some, too, and P = 0 whatever these say."""
        return self.bounds + rows * 2


@gluon.jit
def entry_of(tiles, slot, b, n_slots):
    """Where a tile's numbers are; sequences share the one list of packed rows, and bounds may be the same for all."""
    return tiles + HEAD_NUMBERS + (gl.minimum(b, gl.load(tiles + 1) - 1) * n_slots + slot) * ENTRY


@gluon.jit
def query_place(program):
    """(place, start) of rows of queries in their descriptors."""
    if program.LISTED:
        place = program.listed.q_place
        start = program.listed.q_start
    else:
        place = program.b
        start = program.b * 0
    return place, start


@gluon.jit
def key_place(program):
    """(place, start) of rows of keys in their descriptors."""
    if program.LISTED:
        place = program.listed.k_place
        start = program.listed.k_start
    else:
        place = program.b
        start = program.b * 0
    return place, start


@aggregate
class Walk:
    """The order in which one program visits tiles: full tiles of every query head of the group, then the edge tiles.

    A program that sees nothing still makes one step, on a tile whose pairs are all masked: no loop is empty, so that no
    barrier waits for a step that never comes.
    """

    start: gl.tensor
    full_start: gl.tensor
    full_stop: gl.tensor
    n_full: gl.tensor  # steps over full tiles
    total: gl.tensor  # all steps, at least 1
    edges: gl.tensor  # edge tiles per head, at least 1
    last: gl.tensor  # number of the last tile that exists
    GROUPED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, start, full_start, full_stop, n_full, total, edges, last, GROUPED):
        self.start = start
        self.full_start = full_start
        self.full_stop = full_stop
        self.n_full = n_full
        self.total = total
        self.edges = edges
        self.last = last
        self.GROUPED = gl.constexpr(GROUPED)

    @gluon.jit
    def plain(self, EDGES: gl.constexpr):
        """Steps before the last one whose tiles need no mask."""
        if EDGES:
            steps = gl.minimum(self.n_full, self.total - 1)
        else:
            steps = self.total - 1
        return steps

    @gluon.jit
    def at(self, i):
        """(query head within the group, tile) of step i."""
        full = i < self.n_full
        inside = gl.where(full, i, i - self.n_full)
        member = 0
        if self.GROUPED:
            width = gl.where(full, gl.maximum(self.full_stop - self.full_start, 1), self.edges)
            member = inside // width
            inside = inside % width
        edge = tile_number(inside, self.start, self.full_start, self.full_stop, True)
        tile = gl.where(full, self.full_start + inside, edge)
        return member, gl.minimum(tile, self.last)


@gluon.jit
def make_walk(start, full_start, full_stop, stop, n_tiles, group, GROUPED: gl.constexpr):
    """The walk over tiles ``start .. stop`` of ``group`` heads, those in ``full_start .. full_stop`` being full."""
    full = full_stop - full_start
    edges = (stop - start) - full
    n_full = group * full
    total = gl.maximum(n_full + group * edges, 1)
    return Walk(start, full_start, full_stop, n_full, total, gl.maximum(edges, 1), n_tiles - 1, GROUPED)


@gluon.jit
def keep_up_to(p, columns, high):
    """p where ``columns <= high``, else 0; one instruction after the other for the reason in ``pieces.show_below``."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.le.s32 p, $2, $3; selp.f32 $0, $1, 0f00000000, p; }",
        "=f,f,r,r",
        [p, columns[None, :], high[:, None]],
        gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def keep_from(p, columns, low):
    """p where ``columns >= low``, else 0."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ge.s32 p, $2, $3; selp.f32 $0, $1, 0f00000000, p; }",
        "=f,f,r,r",
        [p, columns[None, :], low[:, None]],
        gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def keep_between(p, columns, low, high):
    """p where ``low <= columns < high``, limits per row, else 0."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.s32 p, $2, $4; setp.ge.and.s32 p, $2, $3, p; selp.f32 $0, $1, 0f00000000, p; }",
        "=f,f,r,r,r",
        [p, columns[None, :], low[:, None], high[:, None]],
        gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def keep_bounded(p, rows, own):
    """p where ``rows`` is in the interval that its column's address ``own`` holds, else 0.

    The interval is loaded where it is used: a tile's intervals are more than the registers hold.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a, b; ld.global.nc.b32 a, [$3]; ld.global.nc.b32 b, [$3+4]; "
        "setp.ge.s32 p, $2, a; setp.lt.and.s32 p, $2, b, p; selp.f32 $0, $1, 0f00000000, p; }",
        "=f,f,r,l",
        [p, rows[:, None], own[None, :]],
        gl.float32,
        is_pure=True,
        pack=1,
    )


@aggregate
class Scoring:
    """From raw products to P, and to what turns dP - delta into the gradient of the scaled products.

    Raw products times ``scale`` are natural logits, or with softcap ratios of ``cap``; ``unit`` turns what is left to
    the exponent into octaves: raw products or ratios, natural logits where ALiBi is added to them.

    Either side may be the rows of a tile. The ``center`` of a row is the column at distance 0 (column j is centered at
    query j - offset, query i at key i + offset); columns from ``below`` under it to ``above`` over it are seen, none
    past ``last``.
    """

    scale: gl.tensor
    cap: gl.tensor
    unit: gl.tensor
    below: gl.tensor
    above: gl.tensor
    last: gl.tensor
    HAS_SOFTCAP: gl.constexpr
    HAS_ALIBI: gl.constexpr
    HAS_BELOW: gl.constexpr
    HAS_ABOVE: gl.constexpr
    HAS_LAST: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, scale, cap, unit, below, above, last, HAS_SOFTCAP, HAS_ALIBI, HAS_BELOW, HAS_ABOVE, HAS_LAST
    ):
        self.scale = scale
        self.cap = cap
        self.unit = unit
        self.below = below
        self.above = above
        self.last = last
        self.HAS_SOFTCAP = gl.constexpr(HAS_SOFTCAP)
        self.HAS_ALIBI = gl.constexpr(HAS_ALIBI)
        self.HAS_BELOW = gl.constexpr(HAS_BELOW)
        self.HAS_ABOVE = gl.constexpr(HAS_ABOVE)
        self.HAS_LAST = gl.constexpr(HAS_LAST)

    @gluon.jit
    def hide(self, p, center, columns, first):
        """P of an edge tile, 0 where a pair may not attend; limits are per row, and columns constants."""
        if self.HAS_ABOVE or self.HAS_LAST:
            high = center + self.above
            if self.HAS_LAST:
                high = gl.minimum(high, self.last - first)
            p = keep_up_to(p, columns, high)
        if self.HAS_BELOW:
            p = keep_from(p, columns, center - self.below)
        return p

    @gluon.jit
    def weigh(
        self, s, shift, center, columns, first, slope, keys, own, EDGE: gl.constexpr, BOUNDS: gl.constexpr
    ):  # fmt: skip
        """(P, P times the derivative of softcap) of raw products, ``shift`` being lse in octaves, +inf for dead rows.

        ``columns`` and ``center`` count from the tile's ``first`` column. What BOUNDS leave is at ``own``: "rows" where rows are
        queries and ``first`` is a key, "columns" where rows are ``keys``; else "".
        """
        ratio = s  # unused without softcap
        if self.HAS_SOFTCAP:
            ratio = tanh(s * self.scale)
            s = ratio
        if self.HAS_ALIBI:
            away = (columns[None, :] - center[:, None]).to(gl.float32)
            s = s * (self.cap if self.HAS_SOFTCAP else self.scale) - slope * gl.maximum(away, -away)
        p = gl.exp2(s * self.unit - shift)
        if EDGE:
            # not -inf into the exponent: a masked score may be NaN, and the scale negative
            if BOUNDS == "rows":
                p = keep_between(p, columns, gl.load(own) - first, gl.load(own + 1) - first)
            elif BOUNDS == "columns":
                p = keep_bounded(p, keys, own.to(gl.int64))
            else:
                p = self.hide(p, center, columns, first)
        weight = p
        if self.HAS_SOFTCAP:
            weight = p * (1.0 - ratio * ratio)
        return p, weight


@gluon.jit
def afresh(index, i, ASKED: gl.constexpr):
    """``index``, if asked for in a way that the compiler takes to depend on step ``i``.

    It would otherwise compute the operand descriptors of every matrix instruction on a buffer once, ahead of the loop,
    and keep them in registers that are not there: dq at head dim 256 spilled 1232 bytes, and spills 20 this way.
    """
    if ASKED:
        index += gl.inline_asm_elementwise(
            "and.b32 $0, $1, 0;", "=r,r", [gl.to_tensor(i)], gl.int32, is_pure=False, pack=1
        )
    return index


@gluon.jit
def accumulators(COLUMNS: gl.constexpr):
    """Zeros [64, COLUMNS] as one warpgroup's products accumulate them."""
    return gl.zeros([64, COLUMNS], gl.float32, product_layout(COLUMNS))


@gluon.jit
def product(a, b, COLUMNS: gl.constexpr):
    """Start ``a @ b`` [64, COLUMNS], both in shared memory."""
    return warpgroup_mma(a, b, accumulators(COLUMNS), use_acc=False, is_async=True)


@gluon.jit
def add_product(a, b, acc, DTYPE: gl.constexpr, WIDTH: gl.constexpr):
    """Start ``acc + a @ b``, ``a`` rounded to ``DTYPE`` and taken from registers, ``b`` [., WIDTH] in shared memory."""
    return warpgroup_mma(gl.convert_layout(a.to(DTYPE), operand_layout(WIDTH)), b, acc, is_async=True)


@gluon.jit
def stage_tile(buffer, tile, DTYPE: gl.constexpr, WIDTH: gl.constexpr):
    """Write an accumulator into ``buffer``, [1, 1, 64, WIDTH], which nobody reads any more."""
    buffer.reshape([64, WIDTH]).store(tile.to(DTYPE))


@gluon.jit
def store_tile(desc, buffer, tile, place, h, row, WIDTH: gl.constexpr):
    """Store an accumulator through ``buffer``; what is past the tensor's end is dropped."""
    stage_tile(buffer, tile, desc.dtype, WIDTH)
    fence_async_shared()
    copy_out(desc, place, h, row, buffer)
    tma_store_wait(0)
