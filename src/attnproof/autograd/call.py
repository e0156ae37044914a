"""From the public functions to a backend: autocast, validation, dispatch, layout.

Validation is remembered. What ``bind`` finds out depends on shapes, dtypes, devices and options alone, so a second call
of the same structure takes the ``Problem`` of the first. Calls whose *values* are checked as well (lengths on the host,
explicit intervals) are bound every time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dispatch
from ..arrays import reshape_leading
from ..backends import Backend
from ..checks import rng
from ..masks import Mask
from ..problem import Options, Problem, Tensors, bind_call
from .function import TENSORS, attend

Before = Callable[[], None]

_LIMIT = 4096  # structures remembered; a program has a handful


class _Known(NamedTuple):
    """What is remembered of a structure.

    Attributes:
        problem: as ``bind`` found it.
        backend: as dispatch chose it.
        alone: whether q, k and v, as they were given, are all that the backend gets.
    """

    problem: Problem
    backend: Backend
    alone: bool


_known: dict[Any, _Known] = {}
# one question for every kind of device, where torch has it
_autocasting: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def call(
    kind: str, arrays: tuple[Any, ...], options: Options, before: Before | None = None
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` in the caller's layout.

    Args:
        kind: "dense", "packed" or "decode".
        arrays: the positional arguments of ``problem.bind``, ``bind_varlen`` or ``bind_decode`` before its options.
        options: the keyword arguments.
        before: called when nothing can refuse the call any more.
    """
    if torch.compiler.is_compiling():
        from . import compiled

        if before is not None:
            before()  # validated while tracing; a refusal stops the compilation
        return compiled.call(kind, arrays, options)
    return run(kind, arrays, options, before)


def run(
    kind: str, arrays: tuple[Any, ...], options: Options, before: Before | None = None
) -> tuple[Tensor, Tensor]:
    """``call``, when nothing is being compiled."""
    if _autocasting():
        device = arrays[0].device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            arrays, options = _autocast(device, arrays, options)
    backend, problem, tensors, ordinary = _bound(kind, arrays, options)
    if before is not None:
        before()
    out, lse = attend(backend, problem, tensors, ordinary=ordinary)
    if kind == "packed":
        return out.transpose(0, 1), lse
    return (out.transpose(1, 2) if options.layout == "bmhd" else out), lse


def _autocast(device: str, arrays: tuple[Any, ...], options: Options) -> tuple[tuple[Any, ...], Options]:
    """What torch's own attention does: q, k, v and the bias in the autocast dtype; float64 stays."""
    to = torch.get_autocast_dtype(device)

    def cast(x: Any) -> Any:
        eligible = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(to) if eligible else x

    sink = options.sink
    if isinstance(sink, Tensor) and sink.dtype != torch.float32:
        sink = cast(sink)
    return (*map(cast, arrays[:3]), *arrays[3:]), options._replace(bias=cast(options.bias), sink=sink)


def _bound(kind: str, arrays: tuple[Any, ...], options: Options) -> tuple[Backend, Problem, Tensors, bool]:
    """The call validated, its backend, and whether all tensors are known to be ordinary ones (``function.TENSORS``).

    Quick when the structure of the call is known.
    """
    key = _structure(kind, arrays, options)
    try:
        found = _known.get(key)
    except TypeError:  # an argument that cannot be hashed: bind will say what is wrong with it
        key = found = None
    if found is not None:
        problem, backend, alone = found
        return backend, problem, Tensors(*arrays) if alone else _views(kind, arrays, options, problem), True
    problem, tensors = bind_call(kind, arrays, options)
    backend = dispatch.choose(problem, options.backend)
    if key is not None:
        if len(_known) >= _LIMIT:
            _known.clear()
        alone = kind == "dense" and all(x is y for x, y in zip(tensors, Tensors(*arrays), strict=True))
        _known[key] = _Known(problem, backend, alone)
    return backend, problem, tensors, key is not None


def _structure(kind: str, arrays: tuple[Any, ...], options: Options) -> Any:
    """Everything that validation looks at, hashable; None where it looks at values.

    Types stand beside numbers, because 1, 1.0 and True are equal and not all of them are valid.
    """
    q, k, v, *rest = arrays
    if not (type(q) in TENSORS and type(k) in TENSORS and type(v) in TENSORS):
        return None
    causal, window, mask, bias, slopes, _, sink, _, _, seed, deterministic, *_ = options
    if type(causal) is not bool or type(window) is not tuple:
        return None
    extras: list[Any] = []
    if rest:
        extras += map(_described_index, rest)
    if not (mask is None and bias is None and slopes is None and sink is None and seed is None):
        extras += map(_described, (mask, bias, slopes, sink))
        options = options._replace(mask=None, bias=None, alibi_slopes=None, sink=None, seed=None)
    if extras and any(x is False for x in extras):
        return None
    types = (*map(type, options), *map(type, window))
    shapes = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
    strict = not deterministic and torch.are_deterministic_algorithms_enabled()
    return (kind, shapes, options, types, strict, *extras, dispatch.ORDER)


def _described_index(x: Any) -> Any:
    """What validation sees of lengths, tables and bounds of lengths; False where it reads them."""
    if x is None or type(x) is int:
        return x
    return (x.shape, x.dtype, x.device) if type(x) in TENSORS and x.device.type != "cpu" else False


def _described(x: Any) -> Any:
    """What validation sees of an optional tensor, or of a mask that is a band; False if it sees more."""
    if x is None:
        return None
    if type(x) in TENSORS:
        return x.shape, x.dtype, x.device
    if isinstance(x, Mask) and not (x.terms or x.keep):
        return x.left, x.right, x.top_left
    return False


def _views(kind: str, arrays: tuple[Any, ...], options: Options, problem: Problem) -> Tensors:
    """What ``bind`` would return beside this problem, for arguments that are known to be valid."""
    q, k, v, *rest = arrays
    indices = {}
    if kind == "packed":
        q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        indices = {"cu_q": rest[0].to(torch.int32), "cu_k": rest[1].to(torch.int32)}
    elif options.layout == "bmhd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if kind == "decode":
        table = None if rest[1] is None else rest[1].to(torch.int32)
        indices = {"lengths": rest[0].to(torch.int32), "block_table": table}
    if not (problem.has_keep or problem.has_bias or problem.has_alibi or problem.dropout_p):
        return Tensors(q, k, v, sink=options.sink, **indices)
    return Tensors(
        q,
        k,
        v,
        bias=reshape_leading(options.bias, 4) if problem.has_bias else None,
        keep=reshape_leading(options.mask, 4) if problem.has_keep else None,
        alibi_slopes=reshape_leading(options.alibi_slopes, 2) if problem.has_alibi else None,
        sink=options.sink,
        rng=rng(options.seed, q) if problem.dropout_p else None,
        **indices,
    )
