"""The arrays of a case: values drawn from (seed, name), masks, and the way they lie in memory.

Values are drawn in float64, rounded to the case's dtype once, and every reader (oracle or candidate) starts from the
rounded numbers. All arrays are views into buffers that are larger than they are and full of NaN outside, so a read
past an edge shows up in the result instead of meeting a harmless zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod, sqrt
from typing import Any
from zlib import crc32

import numpy as np

from attnproof.cases import Case
from attnproof.verify.dtypes import Array, decode, encode, poison_bits

GUARD = 64  # elements of poison on both sides of every array
FAR_REACH = (1 << 31) + 1024  # elements that the rows of the `far` layout span: their offsets pass 2^31


@dataclass(frozen=True)
class Placed:
    """An array in its buffer: a one-dimensional block with poison around and between the elements."""

    buffer: Array
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    offset: int
    dtype: str

    def view(self) -> Array:
        """The array as a NumPy view, strides and all."""
        step = self.buffer.itemsize
        strides = tuple(stride * step for stride in self.strides)
        return np.lib.stride_tricks.as_strided(self.buffer[self.offset :], self.shape, strides)

    def values(self) -> Array:
        """The exact values in float64, contiguous."""
        return decode(np.ascontiguousarray(self.view()), self.dtype)


@dataclass(frozen=True)
class Inputs:
    """Everything a candidate may need for one case; values of what is absent are None."""

    case: Case
    seed: int
    q: Placed
    k: Placed
    v: Placed
    dout: Placed
    dlse: Array | None = None
    keep: Array | None = None
    bias: Placed | None = None
    slopes: Array | None = None
    sink: Array | None = None
    cu_q: Array | None = None
    cu_k: Array | None = None
    lengths: Array | None = None
    block_table: Array | None = None
    k_new: Placed | None = None
    v_new: Placed | None = None
    rng: tuple[int, int] = (0, 0)
    extra: dict[str, Any] = field(default_factory=dict)


def build(case: Case, seed: int = 0) -> Inputs:
    """Make the arrays of `case`. The same (name, seed) gives the same values for every dtype and on every machine."""
    rng = np.random.default_rng([seed, crc32(case.name.encode())])
    if case.rows == "dense":
        return _dense(case, seed, rng)
    from attnproof.verify.row_inputs import build_rows

    return build_rows(case, seed, rng)


def place(values: Array, dtype: str, layout: str = "bhmd") -> Placed:
    """Lay float64 values `[B,H,M,D]` (or any shape, for the plain layouts) out in a poisoned buffer."""
    shape = values.shape
    strides, offset = _strides(shape, layout)
    reach = (
        sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if prod(shape) else 0
    )
    storage = encode(values, dtype)
    total = reach + 1 + offset + GUARD
    buffer = np.empty(total, storage.dtype)
    if (
        layout != "far"
    ):  # the far layout lives on pages that nobody touches: filling them would commit gigabytes
        buffer.fill(poison_bits(dtype))
    placed = Placed(buffer, shape, strides, offset, dtype)
    if prod(shape):
        placed.view()[...] = storage
    return placed


def _strides(shape: tuple[int, ...], layout: str) -> tuple[tuple[int, ...], int]:
    dense = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if layout == "bhmd" or len(shape) != 4:
        return dense, GUARD
    _, H, M, D = (max(size, 1) for size in shape)
    table = {
        "bmhd": ((M * H * D, D, H * D, 1), GUARD),
        "offset": (dense, GUARD + 1),  # an odd element offset: no 16-byte alignment
        "strided": ((H * M * D * 2, M * D * 2, D * 2, 2), GUARD),
        "transposed": ((H * D * M, D * M, 1, M), GUARD),
        "qkv": ((M * 3 * H * D, D, 3 * H * D, 1), GUARD),
        "expanded": ((0, 0, D, 1), GUARD),
        "far": ((H * M * D, D, FAR_REACH // max(M - 2, 1), 1), GUARD),
    }
    return table[layout]


def _dense(case: Case, seed: int, rng: np.random.Generator) -> Inputs:
    lead = (1, 1) if case.layout == "expanded" else (case.B, case.H)
    kv_lead = (1, 1) if case.layout == "expanded" else (case.B, case.Hkv)
    q = rng.standard_normal((*lead, case.M, case.D))
    k = rng.standard_normal((*kv_lead, case.N, case.D))
    v = rng.standard_normal((*kv_lead, case.N, case.Dv))
    dout = rng.standard_normal((case.B, case.H, case.M, case.Dv))
    q, k, v = GENERATORS[case.generator](case, rng, q, k, v)
    q = np.broadcast_to(q, (case.B, case.H, case.M, case.D))
    k = np.broadcast_to(k, (case.B, case.Hkv, case.N, case.D))
    v = np.broadcast_to(v, (case.B, case.Hkv, case.N, case.Dv))
    return Inputs(
        case,
        seed,
        q=place(q, case.dtype, case.layout),
        k=place(k, case.dtype, case.layout),
        v=place(v, case.dtype, case.layout),
        dout=place(dout, case.dtype, "bmhd" if case.layout == "bmhd" else "bhmd"),
        **score_inputs(case, rng, (case.B, case.H, case.M)),
    )


def score_inputs(case: Case, rng: np.random.Generator, row_shape: tuple[int, ...]) -> dict[str, Any]:
    """Mask, bias, slopes, sink, lse gradient and the dropout key: everything that is not q, k, v or dout."""
    made: dict[str, Any] = {}
    if case.keep:
        full = (case.B, case.H, case.M, case.N)
        shape = _axes_shape(case.keep_axes, full)
        made["keep"] = np.broadcast_to(KEEPS[case.keep](rng, shape), shape)
    if case.bias:
        shape = _axes_shape(case.bias_axes, (case.B, case.H, case.M, case.N))
        dtype = case.dtype if case.bias_dtype == "q" else case.bias_dtype
        made["bias"] = place(_bias(case, rng, shape), dtype)
    if case.alibi:
        per_head = (2.0 ** -np.linspace(1, 6, max(case.H, 1))).astype(np.float32)
        made["slopes"] = np.tile(per_head, (case.B, 1))
    if case.sink:
        made["sink"] = rng.normal(1.0, 1.0, case.H).astype(np.float32).astype(np.float64)
    if case.dlse:
        made["dlse"] = rng.standard_normal(row_shape).astype(np.float32).astype(np.float64)
    if case.dropout_p:
        made["rng"] = (int(rng.integers(1 << 62)), int(rng.integers(1 << 31)))
    return made


def _axes_shape(axes: str, full: tuple[int, int, int, int]) -> tuple[int, ...]:
    return tuple(1 if letter == "1" else size for letter, size in zip(axes, full, strict=True))


def _bias(case: Case, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    values = rng.standard_normal(shape)
    if case.bias == "inf_mix":
        values[rng.random(shape) < 0.3] = -np.inf
        values[..., 5 % shape[-2], :] = -np.inf
    if case.bias == "plus_inf":
        values[..., 2, 5] = np.inf
    if case.bias == "minimum_row":
        values[..., 1, :] = np.finfo(np.float32).min
    return values


# masks: True means "may attend" -------------------------------------------------------------------------------------


def _keep_random(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    keep = rng.random(shape) < 0.5
    keep[..., 0] = True  # no dead row here; `dead_rows` has them
    return keep


def _keep_dead_rows(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    keep = rng.random(shape) < 0.5
    for row in (0, 5, 64, shape[-2] - 1):
        if row < shape[-2]:
            keep[..., row, :] = False
    return keep


def _keep_single(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    keep = np.zeros(shape, bool)
    chosen = rng.integers(shape[-1], size=shape[:-1])
    np.put_along_axis(keep, chosen[..., None], True, axis=-1)
    return keep


def _keep_blocks(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    tiles = (-(-shape[-2] // 64), -(-shape[-1] // 64))
    chosen = rng.random(tiles) < 0.4
    chosen[:, 0] = False  # the first key tile is dead for everyone, so the running max starts at -inf
    chosen[0, 1] = chosen[-1, -1] = True
    big = np.kron(chosen, np.ones((64, 64), bool)).astype(bool)
    return np.broadcast_to(big[: shape[-2], : shape[-1]], shape)


def _keep_late(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    keep = np.zeros(shape, bool)
    keep[..., -40:] = rng.random((*shape[:-1], 40)) < 0.5
    keep[..., -1] = True
    return keep


def _keep_padding(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    lengths = rng.integers(1, shape[-1], size=shape[0])
    lengths[-1] = shape[-1]
    return np.broadcast_to(np.arange(shape[-1]) < lengths[:, None, None, None], shape)


KEEPS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Array]] = {
    "random": _keep_random,
    "dead_rows": _keep_dead_rows,
    "single": _keep_single,
    "blocks": _keep_blocks,
    "late": _keep_late,
    "padding": _keep_padding,
    "none": lambda rng, shape: np.zeros(shape, bool),
}


# values --------------------------------------------------------------------------------------------------------------

Triple = tuple[Array, Array, Array]
Generator = Callable[[Case, np.random.Generator, Array, Array, Array], Triple]


def _normal(case: Case, rng: np.random.Generator, q: Array, k: Array, v: Array) -> Triple:
    return q, k, v


def _uniform(case: Case, rng: np.random.Generator, q: Array, k: Array, v: Array) -> Triple:
    return rng.random(q.shape), rng.random(k.shape), rng.random(v.shape)


def _equal(case: Case, rng: np.random.Generator, q: Array, k: Array, v: Array) -> Triple:
    return np.ones_like(q), np.ones_like(k), np.ones_like(v)


def _huge_equal(case: Case, rng: np.random.Generator, q: Array, k: Array, v: Array) -> Triple:
    # equal logits of 8e12: a kernel that rounds s*c and max*c apart overflows its exponential
    return q * 0 + 133120.0, k * 0 + 133120.0, v * 0 + 133120.0


def _nan_query(case: Case, rng: np.random.Generator, q: Array, k: Array, v: Array) -> Triple:
    q[:, 0, 3, 1] = np.nan
    return q, k, v


def _large_v(case: Case, rng: np.random.Generator, q: Array, k: Array, v: Array) -> Triple:
    return q, k, np.where(rng.random(v.shape) < 0.5, 1e4, -1e4) * (1 + 0.01 * v)


def _large_all(case: Case, rng: np.random.Generator, q: Array, k: Array, v: Array) -> Triple:
    def sign(values: Array) -> Array:
        return np.where(values < 0, -1e4, 1e4)

    return sign(q), sign(k), sign(v)


def _peaked(factor: float) -> Generator:
    def make(case: Case, rng: np.random.Generator, q: Array, k: Array, v: Array) -> Triple:
        return q * factor, k, v

    return make


def _ramp(start: float, stop: float) -> Generator:
    def make(case: Case, rng: np.random.Generator, q: Array, k: Array, v: Array) -> Triple:
        slope = np.linspace(start, stop, k.shape[-2])[:, None]
        return np.abs(q), slope + 0.1 * k, v

    return make


def _negative(shift: float) -> Generator:
    def make(case: Case, rng: np.random.Generator, q: Array, k: Array, v: Array) -> Triple:
        return np.abs(q) + shift, -(np.abs(k) + shift), v

    return make


def _common_k(case: Case, rng: np.random.Generator, q: Array, k: Array, v: Array) -> Triple:
    return q, k + 4.0, v


def _offset_v(case: Case, rng: np.random.Generator, q: Array, k: Array, v: Array) -> Triple:
    return q, k, v + 8.0


def _needle(case: Case, rng: np.random.Generator, q: Array, k: Array, v: Array) -> Triple:
    # each query matches one key, another one in every head
    code = np.where(k < 0, -1.0, 1.0)
    wanted = np.empty_like(q)
    for head in range(q.shape[1]):
        chosen = rng.permutation(k.shape[-2])[np.arange(q.shape[-2]) % k.shape[-2]]
        wanted[:, head] = code[:, head * k.shape[1] // q.shape[1], chosen]
    return 16.0 * wanted, code, v


def _count(case: Case, rng: np.random.Generator, q: Array, k: Array, v: Array) -> Triple:
    # uniform weights over indicator values: the output counts keys, so a wrong number names the missing ones
    marks = np.zeros_like(v)
    keys = np.arange(v.shape[-2])
    marks[..., keys, 1 + keys % max(v.shape[-1] - 1, 1)] = 1.0
    marks[..., 0] = 1.0
    return np.zeros_like(q), k, marks


def _heavy_tail(case: Case, rng: np.random.Generator, q: Array, k: Array, v: Array) -> Triple:
    return q, k, np.clip(rng.standard_t(2.0, v.shape), -300, 300)


def _sink_token(case: Case, rng: np.random.Generator, q: Array, k: Array, v: Array) -> Triple:
    direction = np.ones(q.shape[-1]) / sqrt(q.shape[-1])
    k = k.copy()
    k[..., 0, :] = 6.0 * direction
    return q + 3.0 * direction, k, v


def _minus_zero(case: Case, rng: np.random.Generator, q: Array, k: Array, v: Array) -> Triple:
    return np.where(rng.random(q.shape) < 0.5, -0.0, 0.0), k, np.where(rng.random(v.shape) < 0.7, -0.0, v)


def _last_channels(case: Case, rng: np.random.Generator, q: Array, k: Array, v: Array) -> Triple:
    def tail(values: Array) -> Array:
        return np.where(np.arange(values.shape[-1]) < values.shape[-1] - 8, 0.0, values)

    return 2.0 * tail(q), 2.0 * tail(k), tail(v)


def _subnormal(case: Case, rng: np.random.Generator, q: Array, k: Array, v: Array) -> Triple:
    return q, k, v * 2.0**-17


def _fp16_range(case: Case, rng: np.random.Generator, q: Array, k: Array, v: Array) -> Triple:
    # q.k is 5.8e6, far outside fp16 before scaling; the values come close to its largest number
    sign = np.where(rng.random((*k.shape[:-1], 1)) < 0.5, -1.0, 1.0)
    return np.full_like(q, 300.0), np.ones_like(k) * 300.0 * sign, np.where(v < 0, 2e4, 6e4)


def _abyss(case: Case, rng: np.random.Generator, q: Array, k: Array, v: Array) -> Triple:
    # every logit is near -70000, below the smallest float16, and exact in fp32: a finite filler for -inf that a half
    # type can hold would outweigh all real keys
    q = np.round(q * 2) / 2
    k = np.round(k * 2) / 2
    q[..., 0], k[..., 0] = 256.0, -2192.0
    return q, k, v


GENERATORS: dict[str, Generator] = {
    "normal": _normal,
    "uniform": _uniform,
    "equal": _equal,
    "huge_equal": _huge_equal,
    "nan_query": _nan_query,
    "large_v": _large_v,
    "large_all": _large_all,
    "peaked4": _peaked(4.0),
    "peaked30": _peaked(30.0),
    "rising": _ramp(-3.0, 3.0),
    "falling": _ramp(3.0, -3.0),
    "negative": _negative(1.0),
    "deep_negative": _negative(3.5),
    "common_k": _common_k,
    "offset_v": _offset_v,
    "needle": _needle,
    "count": _count,
    "heavy_tail": _heavy_tail,
    "sink_token": _sink_token,
    "minus_zero": _minus_zero,
    "last_channels": _last_channels,
    "subnormal": _subnormal,
    "fp16_range": _fp16_range,
    "abyss": _abyss,
}
