"""The kernels of attention that stores its matrices: what a framework runs when no fused kernel is there.

Forward   [scale q]  s = q k^T  [mask s]  p = softmax(s)  out = p v
Backward  dv = p^T dout   dp = dout v^T   ds = p (dp - rowsum(p dp))  [mask ds]   dq = ds k   dk = ds^T q
[scale dq]

Each is a kernel of its own, so s, p, dp and ds are written by one and read by the next. A mask does not save
anything: every pair is computed. Grouped heads are repeated in memory first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .traffic import Call, Entry, Operand, Rowwise, Touch

CHUNKS = 64  # parts of one head's matrix that a kernel passes in order; only the cache model sees them


@dataclass(frozen=True)
class Product:
    """One kernel over all pairs: row operands of both sides, and square operands of `size` bytes a pair.

    Attributes:
        gemm: (rows, columns) of a matrix product's tile, None to count each operand once.
        shared: square operands that all heads share (a boolean mask).
    """

    name: str
    call: Call
    rows: tuple[Operand, ...]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    gemm: tuple[int, int] | None = None
    flop_per_pair: int = 0
    exp_per_pair: int = 0
    vector_per_pair: float = 0.0

    @property
    def executed_pairs(self) -> int:
        """Every pair of every head."""
        return self.call.heads * self._square

    @property
    def blocks(self) -> int:
        """Thread blocks, as if each took a tile of the square."""
        tile_m, tile_n = self.gemm or (128, 128)
        tiles = (-(-m // tile_m) * -(-n // tile_n) for m, n in self.call.lengths)
        return self.call.heads * sum(tiles)

    @property
    def square_bytes(self) -> int:
        """Bytes of all square operands, each passed once."""
        return self.executed_pairs * self.call.size * (len(self.reads) + len(self.writes))

    @property
    def _square(self) -> int:
        return sum(m * n for m, n in self.call.lengths)

    def entries(self) -> Iterator[Entry]:
        """Requests by tensor."""
        for at in self.rows:
            total = sum(self._passes(at, m, n) * (m if at.side == "q" else n) for m, n in self.call.lengths)
            total *= at.row_bytes * at.heads
            once = at.row_bytes * at.heads * self.call.rows(at.side)
            yield Entry(self.name, at.tensor, total * at.read, once * at.write)
        square = self.executed_pairs * self.call.size
        for tensor in self.reads:
            yield Entry(self.name, tensor, square, 0)
        for tensor in self.writes:
            yield Entry(self.name, tensor, 0, square)
        for tensor in self.shared:
            yield Entry(self.name, tensor, self.executed_pairs, 0)

    def _passes(self, at: Operand, m: int, n: int) -> int:
        """How often a tiled product asks for each row of a row operand."""
        if self.gemm is None:
            return 1
        tile_m, tile_n = self.gemm
        return -(-m // tile_m) if at.side == "k" else -(-n // tile_n)

    def touches(self, wave: int) -> Iterator[Touch]:
        """Head after head, rows in order; an operand of the other side is passed once a head."""
        square_before = {"q": 0, "k": 0, "pairs": 0}
        for m, n in self.call.lengths:
            for head in range(self.call.heads):
                yield from self._head(head, m, n, square_before)
            square_before["q"] += m
            square_before["k"] += n
            square_before["pairs"] += m * n

    def _head(self, head: int, m: int, n: int, before: dict[str, int]) -> Iterator[Touch]:
        for at in self.rows:
            if at.side == "k" and at.read:
                yield self._rows(at, head, n, before["k"], 0, n, write=False)
        chunks = min(CHUNKS, m)
        for chunk in range(chunks):
            start, stop = m * chunk // chunks, m * (chunk + 1) // chunks
            for at in self.rows:
                if at.side == "q" and at.read:
                    yield self._rows(at, head, m, before["q"], start, stop, write=False)
            base = before["pairs"] * self.call.heads + head * m * n
            first, last = (base + start * n) * self.call.size, (base + stop * n) * self.call.size
            for tensor in self.shared:
                yield Touch(tensor, before["pairs"] + start * n, before["pairs"] + stop * n)
            for tensor in self.reads:
                yield Touch(tensor, first, last)
            for tensor in self.writes:
                yield Touch(tensor, first, last, write=True)
            for at in self.rows:
                if at.side == "q" and at.write:
                    yield self._rows(at, head, m, before["q"], start, stop, write=True)
        for at in self.rows:
            if at.side == "k" and at.write:
                yield self._rows(at, head, n, before["k"], 0, n, write=True)

    @staticmethod
    def _rows(
        at: Operand, head: int, length: int, before: int, start: int, stop: int, *, write: bool
    ) -> Touch:
        base = before * at.heads + head * length
        return Touch(at.tensor, (base + start) * at.row_bytes, (base + stop) * at.row_bytes, write)


def _q(call: Call, tensor: str, dim: int, *, write: bool = False) -> Operand:
    return Operand(tensor, "q", dim * call.size, call.heads, read=not write, write=write)


def _k(call: Call, tensor: str, dim: int, *, write: bool = False) -> Operand:
    return Operand(tensor, "k", dim * call.size, call.heads, read=not write, write=write)


def forward_products(call: Call, gemm: tuple[int, int] | None, scaled: bool) -> Iterator[Rowwise | Product]:
    """The kernels of the forward pass, in order."""
    d, dv = call.head_dim, call.value_dim
    k, v = "k", "v"
    if call.group > 1:
        k, v = "k repeated", "v repeated"
        yield from _repeat(call)
    if scaled:
        yield Rowwise("scale q", call, (_q(call, "q", d), _q(call, "q scaled", d, write=True)))
    rows = (_q(call, "q scaled" if scaled else "q", d), _k(call, k, d))
    yield Product("scores", call, rows, writes=("s",), gemm=gemm, flop_per_pair=2 * d)
    if call.bias_bytes:
        yield Product("bias", call, (), reads=("s", "bias"), writes=("s",), vector_per_pair=1)
    if call.masked:
        yield Product("mask", call, (), reads=("s",), writes=("s",), shared=("mask",), vector_per_pair=1)
    yield Product("softmax", call, (), reads=("s",), writes=("p",), exp_per_pair=1, vector_per_pair=4)
    rows = (_k(call, v, dv), _q(call, "out", dv, write=True))
    yield Product("output", call, rows, reads=("p",), gemm=gemm, flop_per_pair=2 * dv)


def _repeat(call: Call) -> Iterator[Rowwise]:
    for tensor, dim in (("k", call.head_dim), ("v", call.value_dim)):
        own = (
            Operand(tensor, "k", dim * call.size, call.kv_heads),
            _k(call, f"{tensor} repeated", dim, write=True),
        )
        yield Rowwise(f"repeat {tensor}", call, own)


def backward_products(call: Call, gemm: tuple[int, int] | None, scaled: bool) -> Iterator[Rowwise | Product]:
    """The kernels that autograd runs, in its order."""
    d, dv = call.head_dim, call.value_dim
    k, v = ("k repeated", "v repeated") if call.group > 1 else ("k", "v")
    dout = _q(call, "dout", dv)
    yield Product(
        "dv", call, (dout, _k(call, "dv", dv, write=True)), reads=("p",), gemm=gemm, flop_per_pair=2 * dv
    )
    yield Product("dp", call, (dout, _k(call, v, dv)), writes=("dp",), gemm=gemm, flop_per_pair=2 * dv)
    # torch multiplies into a buffer of its own first, and hands that and p to the softmax kernel
    yield Product("dp times p", call, (), reads=("dp", "p"), writes=("dp p",), vector_per_pair=1)
    yield Product("softmax backward", call, (), reads=("dp p", "p"), writes=("ds",), vector_per_pair=3)
    if call.masked:
        yield Product(
            "mask backward", call, (), reads=("ds",), writes=("ds",), shared=("mask",), vector_per_pair=1
        )
    rows = (_k(call, k, d), _q(call, "dq", d, write=True))
    yield Product("dq", call, rows, reads=("ds",), gemm=gemm, flop_per_pair=2 * d)
    rows = (_q(call, "q scaled" if scaled else "q", d), _k(call, "dk", d, write=True))
    yield Product("dk", call, rows, reads=("ds",), gemm=gemm, flop_per_pair=2 * d)
    if scaled:
        yield Rowwise("scale dq", call, (_q(call, "dq", d), _q(call, "dq scaled", d, write=True)))
