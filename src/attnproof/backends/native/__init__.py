"""Attention on the CPU in C++: the tile loop of ``streaming``, in registers and on every core.

Computes what SEMANTICS says, forward and backward; the sources are under ``csrc/``:

    rows.h      where rows live and which keys each of them sees        (mirror: rows.py, masks.py)
    scores.h    softcap, alibi, bias: a value and a derivative each     (mirror: scores.py)
    softmax.h   the online softmax of one tile                          (mirror: online_softmax.py)
    forward.h, backward.h   the loops                                   (mirror: streaming.py)
    micro.h     the one matrix micro-kernel, in vector extensions

One SIMD target of those compiled in is chosen when the module is loaded (``ATTNPROOF_SIMD`` forces one). The number of
threads is torch's where torch is loaded, else ``ATTNPROOF_NUM_THREADS``, else the processors this process may use; it
never changes a bit of the result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...dtypes import storage_dtype
from ...errors import Unsupported
from ...problem import Grads, Problem, Tensors
from ...rows import empty_like_rows
from . import loader

Array = npt.NDArray[Any]

name = "native"
kind = "numpy"


def why_not(problem: Problem) -> str | None:
    """Everything on the host is served, if the extension is there."""
    if problem.device != "cpu":
        return f"reads host memory, and the tensors are on {problem.device}; use .cpu() or another backend"
    return loader.why_not()


def numerics() -> str:
    """Weights stay in the accumulator's precision, but for bf16 on ``amx``, where each is a sum of two bf16 numbers."""
    here = loader.why_not() is None and loader.describe()["simd"] == "amx"
    return "split" if here else "precise"


def forward(problem: Problem, tensors: Tensors) -> tuple[Array, Array]:
    """See ``backends.Backend``."""
    out = empty_like_rows(problem, problem.out_shape[-2], problem.H, problem.Dv, storage_dtype(problem.dtype))
    lse = np.empty(problem.out_shape[:-1], dtype=problem.lse_dtype)
    if problem.rows == "packed":  # tokens past the last sequence
        used = int(tensors.cu_q[-1])
        out[:, used:], lse[:, used:] = 0, -np.inf
    where = (_sink_dtype(tensors), loader.threads(), loader.simd())
    loader.kernels().forward(problem, _as_read(problem, tensors), out, lse, *where)
    return out, lse


def backward(
    problem: Problem,
    tensors: Tensors,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array | None,
    needs: frozenset[str],
    *,
    passes: int = 0,
) -> Grads:
    """See ``backends.Backend``.

    ``passes`` forces one pass over the scores (dQ, dK and dV together, where one thread can own a head) or two (dQ by
    query tile, then dK and dV by key tile); 0 lets the call choose. The bits are the same.
    """
    if problem.rows in ("cached", "paged"):
        raise Unsupported(name, "no gradient through a cache written in place; use dense or packed keys")
    grads = _empty_grads(problem, tensors, needs)
    where = (_sink_dtype(tensors), loader.threads(), loader.simd())
    # statistics are read by index; a mapped axis (torch.func) may hand them over expanded
    lse = np.ascontiguousarray(lse)
    given = _as_read(problem, tensors)
    loader.kernels().backward(problem, given, out, lse, dout, dlse, tuple(grads), *where, passes)
    return grads


def simd_target() -> str:
    """The instruction set that runs and why it was chosen, for people; "" if the extension is not built."""
    known = loader.describe()
    return f"{known['simd']}, {known['bits']} bits ({known['why']})" if known["built"] else ""


def _empty_grads(problem: Problem, tensors: Tensors, needs: frozenset[str]) -> Grads:
    """Where the kernel writes; what it does not write (tokens past the last sequence) is 0 already."""
    stored = storage_dtype(problem.dtype)
    dq = dk = dv = dbias = dalibi = dsink = None
    if "q" in needs:
        dq = empty_like_rows(problem, problem.out_shape[-2], problem.H, problem.D, stored)
    if "k" in needs:
        dk = empty_like_rows(problem, tensors.k.shape[-2], problem.Hkv, problem.D, stored)
    if "v" in needs:
        dv = empty_like_rows(problem, tensors.v.shape[-2], problem.Hkv, problem.Dv, stored)
    if problem.rows == "packed":
        for x, cu in ((dq, tensors.cu_q), (dk, tensors.cu_k), (dv, tensors.cu_k)):
            if x is not None:
                x[:, int(cu[-1]) :] = 0
    if "bias" in needs and problem.bias_shape is not None:
        dbias = np.empty(problem.bias_shape, storage_dtype(problem.bias_dtype))
    if "alibi_slopes" in needs and problem.has_alibi:
        dalibi = np.empty((problem.B, problem.H), problem.lse_dtype)
    if "sink" in needs and problem.has_sink:
        dsink = np.empty(problem.H, problem.lse_dtype)
    return Grads(dq, dk, dv, dbias, dalibi, dsink)


def _as_read(problem: Problem, tensors: Tensors) -> Tensors:
    """Small tensors as the kernels read them: index vectors contiguous, slopes in the dtype of lse.

    Beside float64 slopes may come in float32, and read as float32 they would be plausible and wrong.
    """
    changed: dict[str, Any] = {
        name: np.ascontiguousarray(x)
        for name in ("cu_q", "cu_k", "lengths", "rng")
        if (x := getattr(tensors, name)) is not None and not x.flags.c_contiguous
    }
    if tensors.alibi_slopes is not None:
        changed["alibi_slopes"] = tensors.alibi_slopes.astype(problem.lse_dtype, copy=False)
    return tensors._replace(**changed) if changed else tensors


def _sink_dtype(tensors: Tensors) -> str:
    """Name of the sink's dtype; uint16 is bfloat16 bits."""
    if tensors.sink is None:
        return ""
    stored = str(tensors.sink.dtype)
    return "bfloat16" if stored == "uint16" else stored
