"""What an attention block keeps between its forward and its backward pass, tensor by tensor.

The tutorial's simple form (six linear and three quadratic tensors) is in `documents`. Here stands what real
implementations keep, so that the sum can be laid beside a memory measurement:

    eager       the probabilities, because softmax and the second product both differentiate through them;
    with dropout
                also the keep mask and the dropped probabilities; with grouped heads the repeated keys and
                values
    sdpa        q, k, v, out and lse (a fused torch kernel: flash, efficient or cuDNN)
    ours        the same; dropout adds a seed and an offset, never a mask
    checkpoint  the block's input only; the forward pass is run once more in the backward pass

The block is: x -> projections -> attention -> output projection. A tensor that the projections keep anyway
(x, out) is in every list, so that lists compare like with like.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ..errors import ShapeError
from .hardware import dtype_size

IMPLEMENTATIONS = ("eager", "sdpa", "ours", "checkpoint")


@dataclass(frozen=True)
class Kept:
    """One tensor that stays alive until the backward pass."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    why: str

    @property
    def bytes(self) -> int:
        """Size of the tensor."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Block:
    """An attention block. Dv is the head dim of v and of the output; `model_dim` the width of x."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    model_dim: int
    dtype: str = "bfloat16"
    dropout: bool = False
    masked: bool = False


def kept(block: Block, implementation: str) -> tuple[Kept, ...]:
    """The tensors that `implementation` (one of IMPLEMENTATIONS) keeps for the backward pass of `block`."""
    if implementation not in IMPLEMENTATIONS:
        raise ShapeError(
            f"implementation: expected one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    size, b = dtype_size(block.dtype), block
    x = Kept("x", (b.batch, b.length, b.model_dim), size, "input of the projections")
    if implementation == "checkpoint":
        return (x,)
    out = Kept("out", (b.batch, b.heads, b.length, b.value_dim), size, "input of the output projection")
    q = Kept("q", (b.batch, b.heads, b.length, b.head_dim), size, "for dk")
    if implementation == "eager":
        return (x, q, *_eager(block), out)
    k = Kept("k", (b.batch, b.kv_heads, b.length, b.head_dim), size, "for dq, and to rebuild p")
    v = Kept("v", (b.batch, b.kv_heads, b.length, b.value_dim), size, "for dp")
    lse = Kept("lse", (b.batch, b.heads, b.length), max(4, size), "to rebuild p")
    seed = (Kept("seed, offset", (2,), 8, "to draw the same dropout again"),) if b.dropout else ()
    return (x, q, k, v, out, lse, *seed)


def _eager(b: Block) -> tuple[Kept, ...]:
    """What the materialised form keeps between q and out; of grouped heads it keeps the repeated copies."""
    size = dtype_size(b.dtype)
    square = (b.batch, b.heads, b.length, b.length)
    tensors = [
        Kept("k", (b.batch, b.heads, b.length, b.head_dim), size, "for dq"),
        Kept("v", (b.batch, b.heads, b.length, b.value_dim), size, "for dp"),
        Kept("p", square, size, "for the softmax's derivative and dv"),
    ]
    if b.masked:
        tensors.append(Kept("mask", (b.length, b.length), 1, "where the gradient is cut"))
    if b.dropout:
        tensors.append(Kept("dropout mask", square, 1, "which entries were kept"))
        tensors.append(Kept("dropped p", square, size, "for dv"))
    return tuple(tensors)


def total(tensors: tuple[Kept, ...]) -> int:
    """Bytes of all of them."""
    return sum(tensor.bytes for tensor in tensors)


def forward_transient(block: Block, implementation: str) -> int:
    """Bytes alive during the forward pass on top of what is kept: the scores, beside the probabilities."""
    if implementation != "eager":
        return 0
    return block.batch * block.heads * block.length**2 * dtype_size(block.dtype)


def backward_transient(block: Block, implementation: str) -> int:
    """Bytes alive at the worst moment of the backward pass on top of what is kept and of dq, dk, dv.

    Eager holds dp and ds at once. A tile loop holds `rowsum(out * dout)` in fp32. A checkpoint holds what the
    chosen implementation keeps, for one block at a time; it is counted here for the tile loop.
    """
    rows = block.batch * block.heads * block.length
    if implementation == "eager":
        return 2 * rows * block.length * dtype_size(block.dtype)
    delta = 4 * rows
    if implementation == "checkpoint":
        return delta + total(kept(block, "ours")) - total(kept(block, "checkpoint"))
    return delta
