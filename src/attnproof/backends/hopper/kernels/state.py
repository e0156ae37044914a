"""What the functions of the forward kernel hand to each other, by name."""

from ..compat import aggregate, gl, gluon
from .listing import HEAD, WIDTH
from .pieces import Keys, key_tiles, place
from .rings import FAR, Ring

HEAD_NUMBERS = gl.constexpr(HEAD)
ENTRY = gl.constexpr(WIDTH)


@aggregate
class Sizes:
    """Numbers of the launch, the same in every program."""

    M: gl.tensor
    N: gl.tensor
    H: gl.tensor
    group: gl.tensor
    left: gl.tensor
    right: gl.tensor
    n_slots: gl.tensor
    n_planes: gl.tensor
    together: gl.tensor

    @gluon.constexpr_function
    def __init__(self, M, N, H, group, left, right, n_slots, n_planes, together):
        self.M = M
        self.N = N
        self.H = H
        self.group = group
        self.left = left
        self.right = right
        self.n_slots = n_slots
        self.n_planes = n_planes
        self.together = together


@aggregate
class ListedSizes:
    """``Sizes`` where tiles stand in a list; M counts the rows of lse, and ``bounds`` is anything where there are none."""

    tiles: gl.tensor
    bounds: gl.tensor
    M: gl.tensor
    H: gl.tensor
    group: gl.tensor
    left: gl.tensor
    right: gl.tensor
    n_slots: gl.tensor
    n_planes: gl.tensor
    together: gl.tensor
    n_lists: gl.tensor

    @gluon.constexpr_function
    def __init__(self, tiles, bounds, M, H, group, left, right, n_slots, n_planes, together, n_lists):
        self.tiles = tiles
        self.bounds = bounds
        self.M = M
        self.H = H
        self.group = group
        self.left = left
        self.right = right
        self.n_slots = n_slots
        self.n_planes = n_planes
        self.together = together
        self.n_lists = n_lists


@aggregate
class Factors:
    """What scores are multiplied with; see ``arguments.factors``."""

    scale: gl.tensor
    cap: gl.tensor
    unit: gl.tensor
    wide_unit: gl.tensor
    lift: gl.tensor

    @gluon.constexpr_function
    def __init__(self, scale, cap, unit, wide_unit, lift):
        self.scale = scale
        self.cap = cap
        self.unit = unit
        self.wide_unit = wide_unit
        self.lift = lift


@aggregate
class Extras:
    """Arrays that are not tiles; slopes and sink are anything where there are none."""

    lse: gl.tensor
    slopes: gl.tensor
    sink: gl.tensor
    stride_slopeb: gl.tensor
    stride_slopeh: gl.tensor
    stride_sink: gl.tensor

    @gluon.constexpr_function
    def __init__(self, lse, slopes, sink, stride_slopeb, stride_slopeh, stride_sink):
        self.lse = lse
        self.slopes = slopes
        self.sink = sink
        self.stride_slopeb = stride_slopeb
        self.stride_slopeh = stride_slopeh
        self.stride_sink = stride_sink


@aggregate
class Memory:
    """Shared memory of a program: q and out [WARPGROUPS, 1, 1, 64, width], the rings, and the number of the next tile."""

    q: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k: Ring
    v: Ring
    out: gl.shared_memory_descriptor
    drawn: gl.shared_memory_descriptor
    drawn_full: gl.shared_memory_descriptor
    drawn_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, q_full, q_empty, k, v, out, drawn, drawn_full, drawn_empty):
        self.q = q
        self.q_full = q_full
        self.q_empty = q_empty
        self.k = k
        self.v = v
        self.out = out
        self.drawn = drawn
        self.drawn_full = drawn_full
        self.drawn_empty = drawn_empty


@aggregate
class Tile:
    """The query rows of a tile, and its keys."""

    b: gl.tensor
    h: gl.tensor
    first: gl.tensor
    keys: Keys

    @gluon.constexpr_function
    def __init__(self, b, h, first, keys):
        self.b = b
        self.h = h
        self.first = first
        self.keys = keys


@aggregate
class ListedTile:
    """``Tile`` with the lengths of its sequence and where its rows begin; see ``listing`` for the fields."""

    b: gl.tensor
    h: gl.tensor
    first: gl.tensor
    keys: Keys
    real: gl.tensor
    n_rows: gl.tensor
    row: gl.tensor
    n_keys: gl.tensor
    k_row: gl.tensor

    @gluon.constexpr_function
    def __init__(self, b, h, first, keys, real, n_rows, row, n_keys, k_row):
        self.b = b
        self.h = h
        self.first = first
        self.keys = keys
        self.real = real
        self.n_rows = n_rows
        self.row = row
        self.n_keys = n_keys
        self.k_row = k_row


@aggregate
class Rows:
    """Softmax state of a warpgroup: acc = sum p v of the tiles before the last, and sums of p, both relative to t; m in scores.

    ``p`` are the weights of the last tile, whose product with v is not started yet.
    """

    acc: gl.tensor
    p: gl.tensor
    m: gl.tensor
    t: gl.tensor
    sums: gl.tensor

    @gluon.constexpr_function
    def __init__(self, acc, p, m, t, sums):
        self.acc = acc
        self.p = p
        self.m = m
        self.t = t
        self.sums = sums


@gluon.jit
def locate(number, sizes, C: gl.constexpr):
    """Where a tile lives."""
    slot, plane = place(number, sizes.n_slots, sizes.n_planes, sizes.together, C.has_right)
    if C.listed:
        tile = read_tile(slot, plane, sizes, C)
    else:
        first = slot * C.block_m
        start, full_start, full_stop, stop = key_tiles(first, sizes.M, sizes.N, sizes.left, sizes.right, C)
        tile = Tile(plane // sizes.H, plane % sizes.H, first, Keys(start, full_start, full_stop, stop))
    return tile


@gluon.jit
def read_tile(slot, plane, sizes, C: gl.constexpr):
    """The tile that stands in the list; one past the last is some other one."""
    b = plane // sizes.H
    which = gl.minimum(gl.maximum(slot, 0), sizes.n_slots - 1)
    which += gl.minimum(b, sizes.n_lists - 1) * sizes.n_slots
    entry = sizes.tiles + HEAD_NUMBERS + which * ENTRY
    if C.packed:
        b = gl.load(entry)
    keys = Keys(gl.load(entry + 7), gl.load(entry + 8), gl.load(entry + 9), gl.load(entry + 10))
    return ListedTile(
        b, plane % sizes.H, gl.load(entry + 2), keys, gl.load(entry + 1), gl.load(entry + 3), gl.load(entry + 4),
        gl.load(entry + 5), gl.load(entry + 6),
    )  # fmt: skip


@gluon.jit
def lengths(tile, sizes, C: gl.constexpr):
    """(queries, keys) of the sequence of a tile."""
    if C.listed:
        n_rows = tile.n_rows
        n_keys = tile.n_keys
    else:
        n_rows = sizes.M
        n_keys = sizes.N
    return n_rows, n_keys


@gluon.jit
def query_origin(tile, C: gl.constexpr):
    """(place, row of the tile's first sequence row) of descriptors of rows of queries, see ``arguments.ragged``."""
    if C.packed:
        place = tile.row + tile.n_rows
        row = FAR - tile.n_rows
    else:
        place = tile.b
        row = tile.b * 0
    return place, row


@gluon.jit
def key_origin(tile, C: gl.constexpr):
    """The same for rows of keys."""
    if C.packed:
        place = tile.k_row + tile.n_keys
        row = FAR - tile.n_keys
    else:
        place = tile.b
        row = tile.b * 0
    return place, row
