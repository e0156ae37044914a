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


def forward(problem: Problem, tensors: Tensors) -> tuple[Array, Array]:
    """See ``backends.Backend``."""
    out = empty_like_rows(problem, problem.out_shape[-2], problem.H, problem.Dv, storage_dtype(problem.dtype))
    lse = np.empty(problem.out_shape[:-1], dtype=problem.lse_dtype)
    if problem.rows == "packed":  # tokens past the last sequence
        used = int(tensors.cu_q[-1])
        out[:, used:], lse[:, used:] = 0, -np.inf
    loader.kernels().forward(problem, tensors, out, lse, _sink_dtype(tensors), loader.threads(), loader.simd())
    return out, lse


def backward(
    problem: Problem,
    tensors: Tensors,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array | None,
    needs: frozenset[str],
) -> Grads:
    """See ``backends.Backend``."""
    raise Unsupported(name, "backward is not there yet")


def _sink_dtype(tensors: Tensors) -> str:
    """Name of the sink's dtype; uint16 is bfloat16 bits."""
    if tensors.sink is None:
        return ""
    stored = str(tensors.sink.dtype)
    return "bfloat16" if stored == "uint16" else stored
