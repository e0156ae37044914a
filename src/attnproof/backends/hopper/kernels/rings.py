"""Shared memory and the barriers at which the copying warp and the warpgroups meet.

At mbarriers: data has come, a stage is free again. At named barriers, of which Triton itself uses the first few: 6 to 8
order the warpgroups, from 9 on stages are handed back without waiting.
"""

from ..compat import aggregate, gl, gluon, mbarrier, tma_load

TURN = gl.constexpr(6)  # first named barrier of the warpgroups' turns
KEYS_FREE = gl.constexpr(9)  # first of the stages of k; those of v follow
FAR = gl.constexpr(2**30)  # ``arguments.FAR``


@gluon.constexpr_function
def barrier_text(verb, threads):
    """One named barrier instruction; its result is not used."""
    return f"bar.{verb} $1, {threads}; mov.b32 $0, $1;"


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

    ``first`` is the named barrier of the first stage; with named barriers ``empty`` is not used.
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
def allocate_ring(desc, first: gl.constexpr, C: gl.constexpr):
    """Stages of the blocks of a descriptor, each handed back by every warpgroup.

    An mbarrier that nobody waits at is not made: the compiler gives its memory to tiles, which a live mbarrier may not be.
    """
    tiles = gl.allocate_shared_memory(desc.dtype, [C.stages] + desc.block_type.shape, desc.layout)
    full = allocate_barriers(C.stages, 1)
    if C.named_release:
        empty = full
    else:
        empty = allocate_barriers(C.stages, C.warpgroups)
    return Ring(tiles, full, empty, first)


@gluon.jit
def load_block(desc, place, h, row, full, target, PACKED: gl.constexpr):
    """Start the copy of a block; ``place`` and ``row`` are of ``state.origin``."""
    mbarrier.expect(full, desc.block_type.nbytes)
    if PACKED:
        tma_load(desc, [FAR, place, h, row, 0], full, target)
    else:
        tma_load(desc, [place, h, row, 0], full, target)


@gluon.jit
def load_stage(ring, desc, place, h, row, count, C: gl.constexpr):
    """Start the copy of rows from ``row`` on into the ``count``-th stage, when its readers have left it."""
    stage = count % C.stages
    if C.named_release:
        if count >= C.stages:
            named_barrier("sync", ring.first + stage, C.warpgroups * 128 + 32)
    else:
        mbarrier.wait(ring.empty.index(stage), ((count // C.stages) & 1) ^ 1)
    load_block(desc, place, h, row, ring.full.index(stage), ring.tiles.index(stage), C.packed)


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
