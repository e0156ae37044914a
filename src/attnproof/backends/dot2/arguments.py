"""The one struct that every kernel gets by value, and its bytes.

``kernels/args.h`` is the only definition: its fields are read from there, so that the compiler and the packer cannot
disagree about a name or an order, and a test holds the offsets against the compiler's. The bytes are what
``hipModuleLaunchKernel`` is given and what the interpreter is given.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Mapping
from typing import Any

from ... import philox
from ...masks import BIG
from ...problem import Problem, Tensors
from .source import FOLDER

_TYPES: dict[str, Any] = {
    "i64": ctypes.c_int64,
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "float": ctypes.c_float,
}
_FIELD = re.compile(r"^  (?:const )?(\w+)(\*?) ([\w, ]+);$", re.MULTILINE)


def parse(header: str) -> tuple[tuple[str, Any], ...]:
    """(name, ctypes type) of the fields of ``struct Args`` in the text of a header, in order."""
    body = header[header.index("struct Args {") : header.index("};")]
    return tuple(
        (name.strip(), ctypes.c_uint64 if pointer else _TYPES[kind])
        for kind, pointer, names in _FIELD.findall(body)
        for name in names.split(",")
    )


@functools.cache
def layout() -> type[ctypes.Structure]:
    """``struct Args`` as ctypes sees it."""
    fields = list(parse((FOLDER / "args.h").read_text(encoding="utf-8")))
    return type("Args", (ctypes.Structure,), {"_fields_": fields})


def pack(values: Mapping[str, Any]) -> bytes:
    """The bytes of a struct: fields that are not named are 0, a name that is no field is an error."""
    made = layout()()
    known = {field[0] for field in made._fields_}
    for name, value in values.items():
        if name not in known:
            raise KeyError(f"{name}: expected a field of struct Args")
        setattr(made, name, value)
    return bytes(made)


def unpack(raw: bytes) -> dict[str, Any]:
    """Field values of packed bytes."""
    made = layout().from_buffer_copy(raw)
    return {field[0]: getattr(made, field[0]) for field in made._fields_}


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b."""
    return -(-a // b)


def strides(name: str, x: Any, axes: str) -> dict[str, int]:
    """``<name>_<axis>`` of each axis; a leading axis that is missing, and a missing tensor, have stride 0."""
    given = () if x is None else tuple(x.stride())
    given = (0,) * (len(axes) - len(given)) + given
    return {f"{name}_{axis}": step for axis, step in zip(axes, given, strict=True)}


def sizes(problem: Problem) -> dict[str, Any]:
    """Lengths, heads, band and numbers."""
    p = problem.dropout_p
    return {
        "M": problem.M,
        "N": problem.N,
        "B": problem.B,
        "H": problem.H,
        "Hkv": problem.Hkv,
        "G": problem.G,
        "left": min(problem.left, BIG),
        "right": min(problem.right, BIG),
        "top_left": int(problem.top_left),
        "splits": 1,
        "threshold": philox.threshold(p),
        "drop_all": int(p >= 1),
        "inverse_keep": 1 / (1 - p) if p < 1 else 0.0,
        "scale": problem.scale,
        "cap": problem.softcap,
        "inverse_cap": 1 / problem.softcap if problem.softcap else 0.0,
    }


def lse_strides(problem: Problem) -> dict[str, int]:
    """Of lse and delta, which are contiguous: [B, H, M], packed [H, Tq]."""
    if problem.rows == "packed":
        return {"lse_b": 0, "lse_h": problem.tokens[0]}
    return {"lse_b": problem.H * problem.M, "lse_h": problem.M}


def tensors(t: Tensors) -> dict[str, Any]:
    """The caller's arrays by pointer field."""
    return {
        "q": t.q, "k": t.k, "v": t.v, "bias": t.bias, "keep": t.keep, "slopes": t.alibi_slopes, "sink": t.sink,
        "bounds": t.bounds, "rng": t.rng, "cu_q": t.cu_q, "cu_k": t.cu_k, "lengths": t.lengths,
        "table": t.block_table,
    }  # fmt: skip


def inputs(problem: Problem, t: Tensors) -> dict[str, Any]:
    """Strides and sizes of everything the caller gave; bias, mask and slopes already stretched by stride 0."""
    bounds_b = 0
    if t.bounds is not None and t.bounds.dim() == 3 and t.bounds.shape[0] > 1:
        bounds_b = t.bounds.stride(0)
    return {
        **strides("q", t.q, "bhmd"),
        **strides("k", t.k, "bhnd"),
        **strides("v", t.v, "bhnd"),
        **strides("bias", t.bias, "bhmn"),
        **strides("keep", t.keep, "bhmn"),
        **strides("slopes", t.alibi_slopes, "bh"),
        "sink_h": 0 if t.sink is None else t.sink.stride(0),
        "bounds_b": bounds_b,
        "bounds_m": 0 if t.bounds is None else t.bounds.stride(-2),
        "table_b": 0 if t.block_table is None else t.block_table.stride(0),
        **lse_strides(problem),
        **sizes(problem),
    }


def pointers(arrays: Mapping[str, Any]) -> dict[str, int]:
    """Addresses by field."""
    return {name: x.data_ptr() for name, x in arrays.items()}


def wide(width: int, *tensors: Any) -> bool:
    """Whether every row starts at a multiple of 16 bytes, holds whole 16-byte chunks, and has contiguous columns."""
    for x in tensors:
        size = x.element_size()
        if width * size % 16 or x.data_ptr() % 16 or (x.stride(-1) != 1 and x.shape[-1] > 1):
            return False
        if any(step * size % 16 for step in x.stride()[:-1]):
            return False
    return True
