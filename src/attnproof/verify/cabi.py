"""Candidates without Python: a C function in a shared library, and a TOML file that says what its arguments are.

    attnproof verify --candidate ./libmine.so:my_attention        reads ./libmine.toml

    [my_attention]
    arguments = ["q", "k", "v", "out", "lse", "B", "H", "Hkv", "M", "N", "D", "scale", "causal"]
    dtypes = ["float32"]
    device = "cpu"            # "cuda": device pointers of torch tensors, ROCm included
    returns = "int"           # 0 is success; "void" has nothing to say

Arguments by name, each with an optional `:type` (int32, int64, float, double):
    q k v out lse mask bias sink alibi_slopes   pointers; mask is one byte per element, expanded to [B,H,M,N]
    B H Hkv M N D Dv causal left right          int32 unless said otherwise; left and right are -1 for unbounded
    q.stride0 ... v.stride3                     int64, in elements; without any of them the arrays are contiguous
    scale softcap                               float
    stream                                      the current stream of the device, a pointer

The other keys are those of `candidate.Traits`. Outputs lie between bands of NaN; a write into a band is an error of
the candidate, and so is an output that keeps its NaN.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from attnproof.cases import Case
from attnproof.verify.candidate import Candidate, Native, Outputs, Skip, Traits, native, refusal, to_float64
from attnproof.verify.dtypes import poison_bits
from attnproof.verify.inputs import GUARD, Inputs

POINTERS = ("q", "k", "v", "out", "lse", "mask", "bias", "sink", "alibi_slopes", "stream")
SIZES = ("B", "H", "Hkv", "M", "N", "D", "Dv", "causal", "left", "right")
SCALARS = ("scale", "softcap")
CTYPES: dict[str, Any] = {
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "pointer": ctypes.c_void_p,
}


class WroteOutside(RuntimeError):
    """The kernel wrote beyond one of its outputs."""


@dataclass(frozen=True)
class Argument:
    """One argument: what it is and as which C type it is passed."""

    name: str
    ctype: str


def parse(word: str) -> Argument:
    """`"N:int64"` and the like.

    Raises:
        ValueError: no argument has that name, or no type is called that.
    """
    name, _, given = word.partition(":")
    tensor, _, stride = name.partition(".")
    if stride:
        known = tensor in ("q", "k", "v", "out") and stride in {f"stride{axis}" for axis in range(4)}
        default = "int64"
    else:
        known = name in (*POINTERS, *SIZES, *SCALARS)
        default = "pointer" if name in POINTERS else "float" if name in SCALARS else "int32"
    if not known:
        raise ValueError(
            f"arguments: expected one of {', '.join((*POINTERS, *SIZES, *SCALARS))} or q.stride0, got {word!r}"
        )
    if given and given not in CTYPES:
        raise ValueError(f"arguments: expected a type among {', '.join(CTYPES)}, got {word!r}")
    return Argument(name, given or default)


def load_library(path: Path, symbol: str) -> Candidate:
    """The candidate of a library's function.

    Raises:
        ValueError: the library, the symbol or the map is missing or does not make sense.
    """
    described = read_map(path.with_suffix(".toml"), symbol)
    arguments = [parse(word) for word in described.pop("arguments", [])]
    device, returns = described.pop("device", "cpu"), described.pop("returns", "void")
    known = {field.name for field in fields(Traits)}
    unknown = sorted(set(described) - known)
    if unknown:
        raise ValueError(
            f"{path.with_suffix('.toml')}: expected keys among {', '.join(sorted(known))}, got {', '.join(unknown)}"
        )
    if not {"q", "k", "v", "out"} <= {argument.name for argument in arguments}:
        raise ValueError(f"{path.with_suffix('.toml')}: expected q, k, v and out among the arguments")
    described["dtypes"] = tuple(described.get("dtypes", ()))
    traits = Traits(**described, arrays="torch" if device != "cpu" else "numpy")
    library = _open(path)
    if not hasattr(library, symbol):
        raise ValueError(f"candidate: {path} has no symbol {symbol!r}")
    function = getattr(library, symbol)
    function.argtypes = [CTYPES[argument.ctype] for argument in arguments]
    function.restype = ctypes.c_int if returns == "int" else None
    kernel = _Function(function, arguments, traits, device)
    candidate = Candidate(f"{path}:{symbol}", kernel.run, traits, device, refuse=kernel.refuse)
    candidate.source = str(path)
    return candidate


def _open(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"candidate: expected a shared library, {path} does not exist")
    try:
        return ctypes.CDLL(str(path.absolute()))
    except OSError as error:
        raise ValueError(f"candidate: cannot load {path}: {error}") from None


def read_map(path: Path, symbol: str) -> dict[str, Any]:
    """The table of a symbol.

    Raises:
        ValueError: there is no such file or table.
    """
    try:
        import tomllib as toml
    except ImportError:  # Python 3.10
        try:
            import tomli as toml  # type: ignore[no-redef]
        except ImportError:
            raise ValueError("candidate: reading an argument map on Python 3.10 needs tomli") from None
    if not path.is_file():
        raise ValueError(f"candidate: expected an argument map at {path}")
    table = toml.loads(path.read_text(encoding="utf-8")).get(symbol)
    if not isinstance(table, dict):
        raise ValueError(f"candidate: {path} has no table [{symbol}]")
    return dict(table)


class _Function:
    """A C function with its argument map."""

    def __init__(self, function: Any, arguments: list[Argument], traits: Traits, device: str) -> None:
        self.function, self.arguments, self.traits, self.device = function, arguments, traits, device
        self.names = {argument.name for argument in arguments}
        self.strided = any("." in name for name in self.names)

    def refuse(self, case: Case) -> str | None:
        """What the map does not name, the function cannot be given."""
        accepted = {"mask", "bias", "sink", "alibi_slopes", "softcap", "causal", "scale"} & self.names
        if {"left", "right"} & self.names:
            accepted.add("window")
        reason = refusal(case, self.traits, frozenset(accepted))
        if reason is None and case.Dv != case.D and "Dv" not in self.names:
            return "its map has no Dv"
        if reason is None and case.Hkv != case.H and "Hkv" not in self.names:
            return "its map has no Hkv"
        return reason

    def run(self, inputs: Inputs) -> Outputs:
        """Call it on one case."""
        if self.device != "cpu":
            return self._run_device(inputs)
        arrays = native(inputs, "numpy") if inputs.case.dtype != "bfloat16" else _bits(inputs)
        given = {name: self._host(getattr(arrays, name)) for name in ("q", "k", "v")}
        case = inputs.case
        full = (case.B, case.H, case.M, case.N)
        given |= {
            name: self._host(value)
            for name, value in (("bias", arrays.bias), ("mask", arrays.keep))
            if value is not None
        }
        for name in ("bias", "mask"):
            if name in given:
                given[name] = np.ascontiguousarray(np.broadcast_to(given[name], full))
        given |= {
            name: value
            for name, value in (("sink", arrays.sink), ("alibi_slopes", arrays.slopes))
            if value is not None
        }
        out, out_bands = _banded(
            (case.B, case.H, case.M, case.Dv), inputs.q.buffer.dtype, poison_bits(case.dtype)
        )
        lse, lse_bands = _banded(
            (case.B, case.H, case.M), np.dtype(np.float64 if case.dtype == "float64" else np.float32), np.nan
        )
        given |= {"out": out, "lse": lse}
        self._call(case, {name: array.ctypes.data for name, array in given.items()}, given)
        for name, bands in (("out", out_bands), ("lse", lse_bands)):
            bands.check(name)
        found = {"out": out, **({"lse": lse} if "lse" in self.names else {})}
        return Outputs({name: to_float64(array) for name, array in found.items()}, found)

    def _host(self, array: Any) -> Any:
        return array if self.strided else np.ascontiguousarray(array)

    def _run_device(self, inputs: Inputs) -> Outputs:
        try:
            import torch
        except ImportError:
            raise Skip("device pointers need torch") from None
        if not torch.cuda.is_available():
            raise Skip("no GPU here")
        case, arrays = inputs.case, native(inputs, "torch", self.device)
        given: dict[str, Any] = {
            "q": arrays.q,
            "k": arrays.k,
            "v": arrays.v,
            "sink": arrays.sink,
            "alibi_slopes": arrays.slopes,
        }
        full = (case.B, case.H, case.M, case.N)
        for name, value in (("bias", arrays.bias), ("mask", arrays.keep)):
            given[name] = None if value is None else value.expand(full).contiguous()
        if not self.strided:
            given |= {name: given[name].contiguous() for name in ("q", "k", "v")}
        wide = torch.float64 if case.dtype == "float64" else torch.float32
        bands = {
            "out": torch.full(
                (2 * GUARD + case.B * case.H * case.M * case.Dv,),
                torch.nan,
                dtype=arrays.q.dtype,
                device=self.device,
            ),
            "lse": torch.full(
                (2 * GUARD + case.B * case.H * case.M,), torch.nan, dtype=wide, device=self.device
            ),
        }
        shapes = {"out": (case.B, case.H, case.M, case.Dv), "lse": (case.B, case.H, case.M)}
        outputs = {name: bands[name][GUARD:-GUARD].view(shapes[name]) for name in bands}
        given |= outputs
        pointers = {name: tensor.data_ptr() for name, tensor in given.items() if tensor is not None}
        pointers["stream"] = torch.cuda.current_stream().cuda_stream
        self._call(case, pointers, given)
        torch.cuda.synchronize()
        for name, band in bands.items():
            if not (band[:GUARD].isnan().all() and band[-GUARD:].isnan().all()):
                raise WroteOutside(f"wrote outside of {name}")
        found = {name: tensor for name, tensor in outputs.items() if name in self.names}
        return Outputs({name: to_float64(tensor) for name, tensor in found.items()}, found)

    def _call(self, case: Case, pointers: dict[str, int], arrays: dict[str, Any]) -> None:
        values = [self._value(argument.name, case, pointers, arrays) for argument in self.arguments]
        status = self.function(*values)
        if status:
            raise RuntimeError(f"returned {status}")

    def _value(self, name: str, case: Case, pointers: dict[str, int], arrays: dict[str, Any]) -> Any:
        tensor, _, stride = name.partition(".")
        if stride:
            array, axis = arrays[tensor], int(stride[-1])
            return (
                array.strides[axis] // array.itemsize if isinstance(array, np.ndarray) else array.stride(axis)
            )
        if name in POINTERS:
            return pointers.get(name)
        special = {
            "causal": int(case.causal),
            "left": case.window[0],
            "right": case.window[1],
            "scale": case.softmax_scale,
            "softcap": case.softcap,
        }
        return special[name] if name in special else getattr(case, name)


def _bits(inputs: Inputs) -> Native:
    """bfloat16 as raw bits, which is all that a pointer needs."""
    q, k, v, dout = (part.view() for part in (inputs.q, inputs.k, inputs.v, inputs.dout))
    made = Native(q, k, v, dout)
    made.keep, made.sink, made.slopes = inputs.keep, inputs.sink, inputs.slopes
    if made.sink is not None:
        made.sink = made.sink.astype(np.float32)
    made.bias = None if inputs.bias is None else inputs.bias.view()
    return made


@dataclass(frozen=True)
class _Bands:
    """The poison around an output."""

    block: Any
    poison: Any

    def check(self, name: str) -> None:
        """Raise when a band is not what it was."""
        for band in (self.block[:GUARD], self.block[-GUARD:]):
            same = np.isnan(band).all() if band.dtype.kind == "f" else (band == self.poison).all()
            if not same:
                raise WroteOutside(f"wrote outside of {name}")


def _banded(shape: tuple[int, ...], dtype: Any, poison: Any) -> tuple[Any, _Bands]:
    """An output full of NaN between two bands of it."""
    block = np.full(prod(shape) + 2 * GUARD, poison, dtype)
    return block[GUARD : GUARD + prod(shape)].reshape(shape), _Bands(block, poison)
