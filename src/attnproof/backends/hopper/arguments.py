"""From a problem and its tensors to the numbers and descriptors of a launch."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ...problem import Problem, Tensors
from .compat import TensorDescriptor, gl
from .configs import ROWS, Facts, uneven

LOG2E = 1.4426950408889634  # 1 / ln 2
# bytes of keys and values of the heads whose tiles run side by side under an uneven mask, on a 50 MB L2
BUDGET = 32 * 2**20
ALIGNMENT = 16  # bytes
UNUSED_STEP = 16  # elements: a legal stride for an axis of length 1
FAR = 2**30  # length of the row axis of a ragged descriptor
ENDLESS = 0x7FFF0000  # length of the axes that only move its rows
TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b."""
    return -(-a // b)


def undescribable(**tensors: Any) -> str | None:
    """Why the copy engine cannot read a tensor, or None: unit last stride, others and the base multiples of 16 bytes."""
    for name, x in tensors.items():
        step = ALIGNMENT // x.element_size()
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            return f"{name}: last stride is {x.stride(-1)}, not 1"
        if x.data_ptr() % ALIGNMENT:
            return f"{name}: address is not a multiple of {ALIGNMENT} bytes"
        for length, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
            if length > 1 and (stride <= 0 or stride % step):
                return f"{name}: stride {stride} is not a positive multiple of {step} elements"
    return None


@functools.cache
def _layout(block: tuple[int, ...], dtype: Any) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), TYPES[dtype])


def descriptor(x: Any, rows: int, width: int) -> Any:
    """[B, H, rows, columns] in blocks of [1, 1, rows, width]; what lies past the end reads as zero."""
    block = (1, 1, rows, width)
    steps = [
        stride if length > 1 else UNUSED_STEP
        for length, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    ]
    return TensorDescriptor(x, list(x.shape), [*steps, 1], list(block), _layout(block, x.dtype))


def ragged(x: Any, rows: int, width: int) -> Any:
    """Packed [H, T, columns] in blocks of [1, 1, 1, rows, width] that end where their sequence ends.

    Row r of the n rows before ``place`` is at [FAR, place, h, FAR - n + r, 0]: what is past the n-th is past the axis, so
    that it reads as zero, whatever the next sequence holds, and is never written. The first axis takes FAR rows off the
    address again, in steps of 2^34 elements less a row: 2^30 times 2^34 elements of 2 or 4 bytes are nothing in 64 bits.
    """
    heads, length, columns = x.shape
    head, row = (
        stride if size > 1 else UNUSED_STEP
        for size, stride in zip((heads, length), x.stride()[:-1], strict=True)
    )
    block = (1, 1, 1, rows, width)
    shape = [ENDLESS, ENDLESS, heads, FAR, columns]
    return TensorDescriptor(x, shape, [2**34 - row, row, head, row, 1], list(block), _layout(block, x.dtype))


def descriptors(facts: Facts, q: Any, k: Any, v: Any, out: Any) -> tuple[Any, ...]:
    """Of q, k, v and out."""
    describe = ragged if facts.packed else descriptor
    return (
        describe(q, ROWS, facts.width),
        describe(k, facts.block_n, facts.width),
        describe(v, facts.block_n, facts.width_v),
        describe(out, ROWS, facts.width_v),
    )


def factors(problem: Problem, facts: Facts) -> tuple[float, ...]:
    """(scale, cap, unit, wide_unit, lift): raw products times scale, see ``pieces.logits``; then one unit of score is
    ``unit`` octaves and ``lift`` natural units, and ``wide_unit`` is the next power of two.
    """
    scale, cap = float(problem.scale), float(problem.softcap)
    lift = 1.0
    if facts.fold:
        lift = cap or scale
    if facts.has_softcap:
        scale /= cap
    if facts.coarse_cap:
        lift, scale = 2 * cap, 2 * scale * LOG2E
    unit = lift * LOG2E
    return scale, cap, unit, 2.0 ** math.ceil(math.log2(unit)), lift


def together(problem: Problem) -> int:
    """How many heads' tiles run side by side, see ``pieces.place``.

    Without a band every tile of a head is as long as the next, and one head at a time keeps L2 best.
    """
    if not uneven(problem):
        return 1
    length = problem.tokens[1] // max(problem.B, 1) if problem.rows == "packed" else problem.N
    per_head = max(length * (problem.D + problem.Dv) * 2, 1)
    return max(1, min(planes(problem), BUDGET // per_head * problem.G))


def planes(problem: Problem) -> int:
    """Independent columns of tiles: heads of sequences, or heads alone where tiles run over all sequences."""
    return problem.H if problem.rows == "packed" else problem.B * problem.H


def slots(problem: Problem, block_m: int) -> int:
    """Tiles of queries per plane; packed a bound, for lengths stay on the device: one more for every sequence and the tail."""
    if problem.rows == "packed":
        return problem.tokens[0] // block_m + problem.B + 1
    return cdiv(problem.M, block_m)


def numbers(problem: Problem, facts: Facts, tensors: Tensors) -> tuple[int, ...]:
    """The integers of ``forward_kernel``, in order."""
    slopes, sink = tensors.alibi_slopes, tensors.sink
    right = problem.right
    tokens = problem.tokens if problem.rows == "packed" else (problem.M, problem.N)
    if problem.top_left and not facts.packed:
        right = min(right, problem.M - problem.N)
    return (
        *((0, 0) if slopes is None else (slopes.stride(0) if slopes.shape[0] > 1 else 0, slopes.stride(1))),
        0 if sink is None else sink.stride(0),
        *tokens,
        problem.H,
        problem.G,
        problem.left,
        right,
        slots(problem, facts.block_m),
        planes(problem),
        together(problem),
    )


def programs(problem: Problem, facts: Facts, multiprocessors: int) -> int:
    """Size of the one-dimensional grid."""
    tiles = slots(problem, facts.block_m) * planes(problem)
    return min(tiles, multiprocessors) if facts.dynamic else tiles
