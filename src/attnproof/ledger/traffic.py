"""Bytes that an attention call moves, counted from the tiles that its loops really visit.

Two levels are counted, and the difference between them is the whole story of tiling:

    requests   what the processors ask the cache for: a tile loop asks for a k and v tile once per query tile
    memory     what the cache has to fetch or write back: `cache` replays the same accesses through an LRU

Every loop here is a `Sweep`: blocks own the rows of one side and stream the rows of the other past them.

    kernel                 a block owns                    it streams
    queries outer (FA 2)   q rows -> out, lse              k, v
    keys outer (FA 1)      k, v rows                       q; out, m, l read and written
    dk, dv                 k, v rows -> dk, dv             q, dout, lse, delta of G heads
    dq                     q, dout, lse, delta -> dq       k, v
    decode                 q of G heads -> partial out     k, v of one split

Which tiles a loop visits comes from `masks.Mask.tiles`, so windows, prefixes, packed rows and ragged edges
are counted exactly: a partial last tile costs its real rows. Mirror: backends/streaming.py, whose `visits`
are the same tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import ShapeError, expected
from ..masks import BIG, SKIP, Mask
from .hardware import dtype_size

if TYPE_CHECKING:
    from ..problem import Problem, Tensors

Int = npt.NDArray[np.int64]
Side = Literal["q", "k"]
STAT = 4  # bytes of a row statistic (m, l, lse, delta): float32; 8 for float64 inputs


@dataclass(frozen=True)
class Call:
    """One attention call as far as bytes go.

    Attributes:
        lengths: (M, N) of each sequence.
        mask: intervals and predicates; a predicate is read wherever a tile is computed.
        bias_bytes: size of one bias element, 0 without a bias.
    """

    lengths: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str = "float16"
    mask: Mask = field(default_factory=Mask)
    bias_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse what no call can be."""
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ShapeError(expected("heads", f"a multiple of {self.kv_heads} key/value heads", self.heads))
        if min((x for pair in self.lengths for x in pair), default=0) < 0:
            raise ShapeError(expected("lengths", "sizes of 0 or more", self.lengths))

    @classmethod
    def dense(
        cls,
        length: int,
        *,
        keys: int | None = None,
        batch: int = 1,
        heads: int = 1,
        kv_heads: int | None = None,
        head_dim: int = 64,
        value_dim: int | None = None,
        dtype: str = "float16",
        mask: Mask | None = None,
    ) -> Call:
        """`batch` sequences of `length` queries and `keys` (default: as many) keys."""
        return cls(
            lengths=((length, length if keys is None else keys),) * batch,
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            value_dim=head_dim if value_dim is None else value_dim,
            dtype=dtype,
            mask=Mask() if mask is None else mask,
        )

    @classmethod
    def of(cls, problem: Problem, tensors: Tensors) -> Call:
        """The call that `problem.bind` described, with its real sequence lengths."""
        from ..rows import sequences

        each = list(sequences(problem, tensors))
        mask = Mask(
            problem.left, problem.right, problem.top_left, keep=(tensors.keep,) if problem.has_keep else ()
        )
        if problem.has_bounds:
            mask = replace(mask, terms=(_Given(tuple(seq.bounds() for seq in each)),))
        return cls(
            lengths=tuple((seq.m, seq.n) for seq in each),
            heads=problem.H,
            kv_heads=problem.Hkv,
            head_dim=problem.D,
            value_dim=problem.Dv,
            dtype=problem.dtype,
            mask=mask,
            bias_bytes=dtype_size(problem.bias_dtype) if problem.has_bias else 0,
        )

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def size(self) -> int:
        """Bytes of one element."""
        return dtype_size(self.dtype)

    @property
    def stat(self) -> int:
        """Bytes of one row statistic."""
        return 8 if self.dtype == "float64" else STAT

    @property
    def pair_operands(self) -> tuple[tuple[str, int, bool], ...]:
        """What is read for each computed pair: tensor, bytes of an element, whether each head has its own."""
        mask = (("mask", len(self.mask.keep), False),) if self.mask.keep else ()
        return (*mask, *((("bias", self.bias_bytes, True),) if self.bias_bytes else ()))

    @property
    def masked(self) -> bool:
        """Whether the mask cuts anything off."""
        mask = self.mask
        return bool(mask.left < BIG or mask.right < BIG or mask.top_left or mask.terms or mask.keep)

    @cached_property
    def pairs(self) -> int:
        """(query, key) pairs that the mask's intervals allow, over all sequences and heads."""
        return self.heads * sum(self.mask.pairs(m, n, b) for b, (m, n) in enumerate(self.lengths))

    def rows(self, side: Side) -> int:
        """Rows of one side over all sequences, for one head."""
        return sum(pair[0 if side == "q" else 1] for pair in self.lengths)


@dataclass(frozen=True, eq=False)
class _Given:
    """Intervals of each sequence as `rows.Sequence.bounds` gave them (a `masks.Term`)."""

    each: tuple[tuple[Any, Any], ...]

    def bounds(self, i: Int, m: int, n: int, b: int) -> tuple[Int, Int]:
        """See `masks.Term.bounds`."""
        lo, hi = self.each[b]
        return lo[i], hi[i]

    def check(self, batch: int, m: int | None, n: int | None) -> None:
        """See `masks.Term.check`: these were made for the call at hand."""


@dataclass(frozen=True)
class Runs:
    """The outer tiles of one sequence: their rows, and the inner rows that pass each; all int64 [tiles]."""

    start: Int
    rows: Int
    inner: Int  # inner rows streamed: the sum over visited tiles
    tiles: Int  # inner tiles visited
    first: Int  # first inner row streamed
    stop: Int  # one past the last

    @property
    def live(self) -> npt.NDArray[np.bool_]:
        """Outer tiles that visit anything."""
        return self.tiles > 0

    @property
    def area(self) -> int:
        """Pairs computed, rows past the end not counted."""
        return int((self.rows * self.inner).sum())


def runs(call: Call, b: int, axis: Side, block_q: int, block_k: int) -> Runs:
    """The loop of sequence `b` whose outer axis is `axis`."""
    m, n = call.lengths[b]
    if block_q < 1 or block_k < 1:
        raise ShapeError(expected("tile", "blocks of 1 or more", (block_q, block_k)))
    if call.masked:
        visited = call.mask.tiles(m, n, block_q, block_k, b).kinds != SKIP
    else:  # every tile is full, which needs no looking at each row of a long sequence
        visited = np.ones((-(-m // block_q), -(-n // block_k)), dtype=np.bool_)
    outer, inner, block_outer, block_inner = m, n, block_q, block_k
    if axis == "k":
        visited, outer, inner = visited.T, n, m
        block_outer, block_inner = block_k, block_q
    start = np.arange(0, outer, block_outer, dtype=np.int64)
    inner_start = np.arange(0, inner, block_inner, dtype=np.int64)
    inner_rows = np.minimum(block_inner, inner - inner_start)
    tiles = visited.sum(axis=1, dtype=np.int64)
    columns = np.arange(len(inner_start))
    first = np.where(visited, columns, len(columns)).min(axis=1, initial=len(columns)) * block_inner
    stop = (np.where(visited, columns, -1).max(axis=1, initial=-1) + 1) * block_inner
    return Runs(
        start,
        np.minimum(block_outer, outer - start),
        visited.astype(np.int64) @ inner_rows,
        tiles,
        first.astype(np.int64),
        np.minimum(stop, inner).astype(np.int64),
    )


@dataclass(frozen=True)
class Operand:
    """A tensor in a kernel: `row_bytes` of each of `heads` heads on its side, read and/or written.

    `repeat` blocks ask for the same rows (the splits of a decode); the cache sees them once.
    """

    tensor: str
    side: Side
    row_bytes: int
    heads: int
    read: bool = True
    write: bool = False
    repeat: int = 1


@dataclass(frozen=True)
class Entry:
    """Bytes of one tensor in one kernel, as requests."""

    kernel: str
    tensor: str
    read: int
    written: int


@dataclass(frozen=True)
class Touch:
    """One access as the cache sees it: bytes `start:stop` of a tensor."""

    tensor: str
    start: int
    stop: int
    write: bool = False


@dataclass(frozen=True)
class Sweep:
    """One kernel: `block_heads` blocks per outer tile own the operands `own` and stream `streamed`."""

    name: str
    call: Call
    axis: Side
    block_heads: int
    own: tuple[Operand, ...]
    streamed: tuple[Operand, ...]
    block_q: int
    block_k: int
    flop_per_pair: int = 0
    exp_per_pair: int = 0
    vector_per_pair: float = 0.0
    splits: int = 1

    @cached_property
    def loops(self) -> tuple[Runs, ...]:
        """The runs of every sequence; equal sequences share one."""
        known: dict[tuple[int, ...], Runs] = {}
        out: list[Runs] = []
        for b, pair in enumerate(self.call.lengths):
            key = (*pair, b) if self.call.mask.terms else pair
            if key not in known:
                known[key] = runs(self.call, b, self.axis, self.block_q, self.block_k)
            out.append(known[key])
        return tuple(out)

    @property
    def blocks(self) -> int:
        """Thread blocks of the launch."""
        return self.splits * self.block_heads * sum(len(loop.start) for loop in self.loops)

    @property
    def area(self) -> int:
        """Pairs computed over all heads, ragged edges clipped."""
        return self.call.heads * sum(loop.area for loop in self.loops)

    @property
    def executed_pairs(self) -> int:
        """Pairs that the machine computes: whole tiles, whatever the mask or the end cuts off."""
        tiles = self.call.heads * sum(int(loop.tiles.sum()) for loop in self.loops)
        return tiles * self.block_q * self.block_k

    def _copies(self, operand: Operand) -> int:
        # a block whose head stands for a group of this operand's heads handles all of them, and where the
        # operand has fewer heads than there are blocks, several blocks ask for the same one
        return operand.repeat * self.block_heads * max(1, operand.heads // self.block_heads)

    def entries(self) -> Iterator[Entry]:
        """Requests by tensor. A tile that visits nothing reads nothing, but its results are written."""
        rows = sum(int(loop.rows.sum()) for loop in self.loops)
        live = sum(int(loop.rows[loop.live].sum()) for loop in self.loops)
        inner = sum(int(loop.inner.sum()) for loop in self.loops)
        for at in self.own:
            unit = at.row_bytes * self._copies(at)
            yield Entry(self.name, at.tensor, unit * live * at.read, unit * rows * at.write)
        for at in self.streamed:
            unit = at.row_bytes * self._copies(at)
            yield Entry(self.name, at.tensor, unit * inner * at.read, unit * inner * at.write)
        for tensor, element, _ in self.call.pair_operands:
            yield Entry(self.name, tensor, element * self.area, 0)

    def touches(self, wave: int) -> Iterator[Touch]:
        """The accesses in launch order, `wave` blocks at a time.

        Blocks of a wave run side by side at the same pace: what they stream in common passes the cache once.
        """
        pending: list[tuple[int, int, int]] = []
        for b, loop in enumerate(self.loops):
            for head in range(self.block_heads):
                for tile in range(len(loop.start)):
                    pending.append((b, head, tile))
                    if len(pending) == wave:
                        yield from self._wave(pending)
                        pending = []
        if pending:
            yield from self._wave(pending)

    def _wave(self, blocks: list[tuple[int, int, int]]) -> Iterator[Touch]:
        spans: dict[tuple[int, int], tuple[int, int]] = {}
        for b, head, tile in blocks:
            loop = self.loops[b]
            if not loop.tiles[tile]:
                continue
            yield from self._own(b, head, tile, write=False)
            yield from self._pairs(b, head, tile)
            first, stop = int(loop.first[tile]), int(loop.stop[tile])
            # blocks whose streamed heads are the same share one span
            key = (b, min(self._heads(at, head).start for at in self.streamed))
            old = spans.get(key, (first, stop))
            spans[key] = (min(old[0], first), max(old[1], stop))
        for (b, shared), (first, stop) in spans.items():
            head = self._block_head(shared)
            for at in self.streamed:
                for inner_head in self._heads(at, head):
                    if at.read:
                        yield self._touch(at, b, inner_head, first, stop, write=False)
                    if at.write:
                        yield self._touch(at, b, inner_head, first, stop, write=True)
        for b, head, tile in blocks:
            yield from self._own(b, head, tile, write=True)

    def _own(self, b: int, head: int, tile: int, *, write: bool) -> Iterator[Touch]:
        loop = self.loops[b]
        start = int(loop.start[tile])
        stop = start + int(loop.rows[tile])
        for at in self.own:
            if at.write if write else at.read:
                for own_head in self._heads(at, head):
                    yield self._touch(at, b, own_head, start, stop, write=write)

    def _pairs(self, b: int, head: int, tile: int) -> Iterator[Touch]:
        """The part of a mask or bias that one block reads, as if stored in the order of the blocks."""
        loop = self.loops[b]
        before = sum(m * n for m, n in self.call.lengths[:b])
        m, n = self.call.lengths[b]
        other = n if self.axis == "q" else m
        count = int(loop.rows[tile] * loop.inner[tile])
        each = self.call.heads // self.block_heads
        for tensor, element, own in self.call.pair_operands:
            for own_head in range(head * each, (head + 1) * each) if own else (0,):
                base = (
                    before * (self.call.heads if own else 1)
                    + own_head * m * n
                    + int(loop.start[tile]) * other
                )
                yield Touch(tensor, base * element, (base + count) * element)

    def _heads(self, at: Operand, head: int) -> range:
        """Heads of an operand that the blocks of `head` handle."""
        if at.heads >= self.block_heads:
            each = at.heads // self.block_heads
            return range(head * each, (head + 1) * each)
        shared = head // (self.block_heads // at.heads)
        return range(shared, shared + 1)

    def _block_head(self, shared: int) -> int:
        """A block head whose first streamed head is `shared`."""
        heads = self.streamed[0].heads
        if heads >= self.block_heads:
            return shared // (heads // self.block_heads)
        return shared * (self.block_heads // heads)

    def _touch(self, at: Operand, b: int, head: int, start: int, stop: int, *, write: bool) -> Touch:
        at_q = 0 if at.side == "q" else 1
        before = sum(pair[at_q] for pair in self.call.lengths[:b])
        base = before * at.heads + head * self.call.lengths[b][at_q]
        return Touch(at.tensor, (base + start) * at.row_bytes, (base + stop) * at.row_bytes, write)


@dataclass(frozen=True)
class Rowwise:
    """A kernel without a loop: reads and writes whole tensors of one side, row by row, all heads at once."""

    name: str
    call: Call
    own: tuple[Operand, ...]
    flop_per_pair: int = 0
    exp_per_pair: int = 0
    vector_per_pair: float = 0.0
    executed_pairs: int = 0

    @property
    def blocks(self) -> int:
        """Thread blocks, 128 rows each."""
        return sum(at.heads * -(-self.call.rows(at.side) // 128) for at in self.own[:1])

    def entries(self) -> Iterator[Entry]:
        """Requests by tensor: each once."""
        for at in self.own:
            total = at.row_bytes * at.heads * self.call.rows(at.side)
            yield Entry(self.name, at.tensor, total * at.read, total * at.write)

    def touches(self, wave: int) -> Iterator[Touch]:
        """In lockstep through all operands, 1/64 of each at a time."""
        steps = 64
        for step in range(steps):
            for at in self.own:
                total = at.row_bytes * at.heads * self.call.rows(at.side)
                start, stop = total * step // steps, total * (step + 1) // steps
                if at.read:
                    yield Touch(at.tensor, start, stop)
                if at.write:
                    yield Touch(at.tensor, start, stop, write=True)
