"""Programs of the backward whose tiles stand in lists: where their rows are, what they visit, what bounds leave."""

from ..compat import aggregate, gl, gluon
from .backward_pieces import make_walk
from .listing import HEAD, WIDTH
from .rings import FAR

HEAD_NUMBERS = gl.constexpr(HEAD)
ENTRY = gl.constexpr(WIDTH)


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


@gluon.jit
def read_query_entry(
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
def read_key_entry(
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
