"""Accounts of whole passes, as lists of kernels: materialised, both loop orders, backward, decode.

    account                     kernels
    forward                     one sweep, queries outer
    keys_outer                  one sweep, keys outer (FlashAttention 1)
    backward                    delta; dk, dv; dq: two sweeps, no atomics, bitwise repeatable
    backward_atomic             clear dq; delta; one sweep that adds dq in fp32; cast dq
    decode                      one sweep per split over groups of heads, combine
    eager, eager_backward       a kernel per operation, scores and probabilities in memory

FLOP per pair: forward q k^T (D) and p v (Dv), backward five products, two of them again in the second sweep.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from .materialised import Product, backward_products, forward_products
from .traffic import Call, Entry, Operand, Rowwise, Sweep, Touch

Kernel = Sweep | Rowwise | Product

# fp32 instructions of one pair besides the products: scale and subtract in one FMA, maximum, sum, half a
# conversion
FORWARD_VECTOR = 3.5
# backward: scale and subtract, dp - delta, times p, two halves of a conversion
BACKWARD_VECTOR = 4.0


@dataclass(frozen=True)
class Account:
    """What a pass asks for, kernel by kernel.

    Attributes:
        flop_per_pair: FLOP that the pass needs for one allowed pair; kernels may do more (a product twice).
    """

    name: str
    call: Call
    kernels: tuple[Kernel, ...]
    flop_per_pair: int
    entries: tuple[Entry, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Count once; every figure below is a sum of entries."""
        object.__setattr__(self, "entries", tuple(e for kernel in self.kernels for e in kernel.entries()))

    @property
    def read(self) -> int:
        """Bytes read."""
        return sum(entry.read for entry in self.entries)

    @property
    def written(self) -> int:
        """Bytes written."""
        return sum(entry.written for entry in self.entries)

    @property
    def total(self) -> int:
        """Bytes moved either way."""
        return self.read + self.written

    @property
    def flops(self) -> int:
        """FLOP of the pairs that the mask allows: the work that a caller asked for."""
        return self.flop_per_pair * self.call.pairs

    @property
    def executed_flops(self) -> int:
        """FLOP that the kernels execute: whole tiles, and every product as often as it is done."""
        return sum(kernel.flop_per_pair * kernel.executed_pairs for kernel in self.kernels)

    @property
    def exps(self) -> int:
        """Exponentials that the kernels execute."""
        return sum(kernel.exp_per_pair * kernel.executed_pairs for kernel in self.kernels)

    @property
    def vector_ops(self) -> float:
        """Instructions of one fp32 lane that the kernels execute besides products and exponentials."""
        return sum(kernel.vector_per_pair * kernel.executed_pairs for kernel in self.kernels)

    def by_kernel(self) -> dict[str, tuple[int, int]]:
        """(read, written) of each kernel, in launch order."""
        out: dict[str, tuple[int, int]] = {}
        for entry in self.entries:
            read, written = out.get(entry.kernel, (0, 0))
            out[entry.kernel] = (read + entry.read, written + entry.written)
        return out

    def touches(self, wave: int) -> Iterator[tuple[str, Touch]]:
        """Every access of every kernel, in order."""
        for kernel in self.kernels:
            for touch in kernel.touches(wave):
                yield kernel.name, touch


def _q_side(call: Call, tensor: str, dim: int, **rw: bool) -> Operand:
    return Operand(tensor, "q", dim * call.size, call.heads, **rw)


def _k_side(call: Call, tensor: str, dim: int, **rw: bool) -> Operand:
    return Operand(tensor, "k", dim * call.size, call.kv_heads, **rw)


def _stat(call: Call, tensor: str, *, read: bool = True, write: bool = False) -> Operand:
    return Operand(tensor, "q", call.stat, call.heads, read=read, write=write)


def _keys(call: Call) -> tuple[Operand, Operand]:
    return _k_side(call, "k", call.head_dim), _k_side(call, "v", call.value_dim)


def forward(call: Call, block_q: int = 128, block_k: int = 128) -> Account:
    """Queries outer: q, out and lse once; a k and a v tile for every query tile that sees them."""
    own = (
        _q_side(call, "q", call.head_dim),
        _q_side(call, "out", call.value_dim, read=False, write=True),
        _stat(call, "lse", read=False, write=True),
    )
    flop = 2 * (call.head_dim + call.value_dim)
    sweep = Sweep(
        "forward",
        call,
        "q",
        call.heads,
        own,
        _keys(call),
        block_q,
        block_k,
        flop_per_pair=flop,
        exp_per_pair=1,
        vector_per_pair=FORWARD_VECTOR + call.value_dim / block_k,
    )
    return Account("queries outer", call, (sweep,), flop)


def keys_outer(call: Call, block_q: int = 64, block_k: int = 384, *, stat: int | None = None) -> Account:
    """Keys outer: k and v once; q read, out and two statistics read and written for every key tile.

    `stat` is the size of a statistic; the tutorial counts it as one element, real kernels keep float32.
    """
    stat = call.stat if stat is None else stat
    streamed = (
        _q_side(call, "q", call.head_dim),
        _q_side(call, "out", call.value_dim, write=True),
        Operand("m, l", "q", 2 * stat, call.heads, read=True, write=True),
    )
    flop = 2 * (call.head_dim + call.value_dim)
    sweep = Sweep(
        "forward",
        call,
        "k",
        call.kv_heads,
        _keys(call),
        streamed,
        block_q,
        block_k,
        flop_per_pair=flop,
        exp_per_pair=1,
        vector_per_pair=FORWARD_VECTOR + 2 * call.value_dim / block_k,
    )
    return Account("keys outer", call, (sweep,), flop)


def _delta(call: Call) -> Rowwise:
    own = (
        _q_side(call, "out", call.value_dim),
        _q_side(call, "dout", call.value_dim),
        _stat(call, "delta", read=False, write=True),
    )
    return Rowwise("delta", call, own)


def _query_rows(call: Call) -> tuple[Operand, ...]:
    """What a backward sweep reads of a query row."""
    return (
        _q_side(call, "q", call.head_dim),
        _q_side(call, "dout", call.value_dim),
        _stat(call, "lse"),
        _stat(call, "delta"),
    )


def _key_gradients(call: Call) -> tuple[Operand, Operand]:
    return (
        _k_side(call, "dk", call.head_dim, read=False, write=True),
        _k_side(call, "dv", call.value_dim, read=False, write=True),
    )


def backward_flop(call: Call) -> int:
    """FLOP of one pair that a backward pass needs: s, dp, dv, dq, dk."""
    return 2 * (3 * call.head_dim + 2 * call.value_dim)


def backward(call: Call, block_q: int = 64, block_k: int = 128) -> Account:
    """Two sweeps without atomics: dk, dv with keys outer, dq with queries outer; s and dp are done twice."""
    d, dv = call.head_dim, call.value_dim
    keys = Sweep(
        "dk, dv",
        call,
        "k",
        call.kv_heads,
        (*_keys(call), *_key_gradients(call)),
        _query_rows(call),
        block_q,
        block_k,
        flop_per_pair=2 * (2 * d + 2 * dv),
        exp_per_pair=1,
        vector_per_pair=BACKWARD_VECTOR,
    )
    queries = Sweep(
        "dq",
        call,
        "q",
        call.heads,
        (*_query_rows(call), _q_side(call, "dq", d, read=False, write=True)),
        _keys(call),
        block_k,  # the wider side is the one that a block owns
        block_q,
        flop_per_pair=2 * (2 * d + dv),
        exp_per_pair=1,
        vector_per_pair=BACKWARD_VECTOR,
    )
    return Account("two sweeps", call, (_delta(call), keys, queries), backward_flop(call))


def backward_atomic(call: Call, block_q: int = 64, block_k: int = 128) -> Account:
    """One sweep, keys outer, that adds dq into an fp32 buffer: five products, no second sweep."""
    d = call.head_dim
    buffer = Operand("dq fp32", "q", 4 * d, call.heads)
    clear = Rowwise("clear dq", call, (replace(buffer, read=False, write=True),))
    main = Sweep(
        "dq, dk, dv",
        call,
        "k",
        call.kv_heads,
        (*_keys(call), *_key_gradients(call)),
        # an atomic add is one request; the cache has to own the line, so in memory it is read and written
        (*_query_rows(call), replace(buffer, write=True)),
        block_q,
        block_k,
        flop_per_pair=backward_flop(call),
        exp_per_pair=1,
        vector_per_pair=BACKWARD_VECTOR,
    )
    cast = Rowwise("cast dq", call, (buffer, _q_side(call, "dq", d, read=False, write=True)))
    return Account("one sweep, atomic", call, (clear, _delta(call), main, cast), backward_flop(call))


def decode(call: Call, splits: int = 1, block_k: int = 128) -> Account:
    """A few queries, a long cache: the heads of a group share one pass over k and v, cut into `splits`.

    With more than one split each writes an fp32 partial out and its lse, and a second kernel merges them.
    """
    longest = max((m for m, _ in call.lengths), default=0)
    partial = splits > 1
    result = Operand("partial out", "q", 4 * call.value_dim * splits, call.heads, read=False, write=True)
    stat = Operand("partial lse", "q", call.stat * splits, call.heads, read=False, write=True)
    if not partial:
        result, stat = (
            _q_side(call, "out", call.value_dim, read=False, write=True),
            replace(stat, tensor="lse"),
        )
    q = replace(_q_side(call, "q", call.head_dim), repeat=splits)
    flop = 2 * (call.head_dim + call.value_dim)
    sweep = Sweep(
        "decode",
        call,
        "q",
        call.kv_heads,
        (q, result, stat),
        _keys(call),
        max(longest, 1),
        block_k,
        flop_per_pair=flop,
        exp_per_pair=1,
        vector_per_pair=FORWARD_VECTOR + call.value_dim / block_k,
        splits=splits,
    )
    merged = (
        replace(result, read=True, write=False),
        replace(stat, read=True, write=False),
        _q_side(call, "out", call.value_dim, read=False, write=True),
        _stat(call, "lse", read=False, write=True),
    )
    combine = (Rowwise("combine", call, merged),) if partial else ()
    return Account(f"decode, {splits} splits" if partial else "decode", call, (sweep, *combine), flop)


def eager(call: Call, *, gemm: tuple[int, int] | None = None, scaled: bool = False) -> Account:
    """The materialised form: scores and probabilities pass through memory, whatever the mask allows.

    Args:
        call: the call.
        gemm: None counts every tensor once per kernel, as the documents do and a perfect cache would; a tile
            such as (128, 128) counts the requests of a tiled product.
        scaled: whether the scale is a kernel of its own on q, as in code that writes it out.
    """
    flop = 2 * (call.head_dim + call.value_dim)
    return Account("eager", call, tuple(forward_products(call, gemm, scaled)), flop)


def eager_backward(call: Call, *, gemm: tuple[int, int] | None = None, scaled: bool = False) -> Account:
    """What autograd runs for `eager`: four products and the softmax's derivative, all of them stored."""
    kernels = tuple(backward_products(call, gemm, scaled))
    return Account("eager backward", call, kernels, backward_flop(call))
