"""What the functions of the forward kernel hand to each other, by name."""

from ..compat import aggregate, gl, gluon
from .pieces import Keys, key_tiles, place
from .rings import Ring


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
    """The query rows of a tile, and its keys; ``slope`` is of ALiBi."""

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
    first = slot * C.block_m
    start, full_start, full_stop, stop = key_tiles(first, sizes.M, sizes.N, sizes.left, sizes.right, C)
    return Tile(plane // sizes.H, plane % sizes.H, first, Keys(start, full_start, full_stop, stop))
