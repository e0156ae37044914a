"""The copying warp of the forward kernel: which tile is next, and its rows in the order in which they are used."""

from ..compat import gl, gluon, mbarrier
from .rings import load_block, load_stage
from .state import key_origin, locate, query_origin


@gluon.jit
def load_queries(q, memory, tile, turn, WARPGROUP: gl.constexpr, C: gl.constexpr):
    """Start the copy of one warpgroup's queries, when it has left those of the tile before."""
    mbarrier.wait(memory.q_empty.index(WARPGROUP), (turn & 1) ^ 1)
    place, start = query_origin(tile, C)
    row = start + tile.first + WARPGROUP * 64
    load_block(q, place, tile.h, row, memory.q_full.index(WARPGROUP), memory.q.index(WARPGROUP), C.packed)


@gluon.jit
def load_tile(q, k, v, counter, memory, sizes, tile, turn, count, C: gl.constexpr):
    """Copy one tile's rows in the order in which they are used; (stages used so far, the tile after the next one).

    That tile is drawn here, so that nobody waits for the atomic.
    """
    head = tile.h // sizes.group
    last = tile.keys.stop - 1
    place, start = key_origin(tile, C)
    load_queries(q, memory, tile, turn, 0, C)
    load_stage(memory.k, k, place, head, start + last * C.block_n, count, C)
    WARPGROUPS: gl.constexpr = C.warpgroups
    for warpgroup in gl.static_range(1, WARPGROUPS):
        load_queries(q, memory, tile, turn, warpgroup, C)
    load_stage(memory.v, v, place, head, start + last * C.block_n, count, C)
    upcoming = turn * 0
    if C.dynamic:
        upcoming = draw(counter)
    n_tiles = tile.keys.stop - tile.keys.start
    for step in range(1, n_tiles):
        row = start + (last - step) * C.block_n
        load_stage(memory.k, k, place, head, row, count + step, C)
        load_stage(memory.v, v, place, head, row, count + step, C)
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
