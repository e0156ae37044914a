"""Hopper backend: forward and backward in Gluon for compute capability 9.0, in halves, on dense rows.

Files, from the inside out: ``compat`` (Gluon's names by version), ``kernels``, ``configs`` (how kernels are cut and what
they are compiled for), ``arguments`` (from a problem to numbers and descriptors), ``listings`` (tiles that numbers alone
do not describe), ``counters`` (tiles drawn by programs that stay), ``launch`` (what runs when), ``offline`` and
``compile_matrix`` (machine code without a GPU). The backward has the same in ``backprop`` and the files named after it.

It is the fast path of the ``triton`` backend, whose kernels make the gradients of ALiBi slopes and sinks, and to which a
call goes whose tensors the copy engine cannot describe; the only backend that imports another.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

from ...problem import Grads, Problem, Tensors

name = "hopper"
NUMERICS = "flash"  # p and dS enter their products in the dtype of the inputs
kind = "torch"
unordered_backward = True  # with deterministic=False, up to head dim 128
MAX_HEAD_DIM = 256
GRAIN = 8  # elements: the copy engine wants rows of out at multiples of 16 bytes
# what has not run on a device yet, and is refused until it has: "packed", "bounds"; the device tests lift it
ON_TRIAL: frozenset[str] = frozenset({"packed", "bounds"})


def why_not(problem: Problem) -> str | None:
    """The sentence that says what this backend cannot do, or None."""
    if problem.device != "cuda":
        return f"needs a GPU of compute capability 9.0, and the tensors are on {problem.device}"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"computes in float16 and bfloat16, got {problem.dtype}; use triton"
    if problem.rows not in _rows():
        return f"serves {' and '.join(_rows())} rows, got {problem.rows}; use triton"
    if not 0 < problem.D <= MAX_HEAD_DIM or not 0 < problem.Dv <= MAX_HEAD_DIM:
        return f"holds head dims from 1 to {MAX_HEAD_DIM}, got D={problem.D} and Dv={problem.Dv}"
    if problem.Dv % GRAIN:
        return f"stores rows of a multiple of {GRAIN} elements, got Dv={problem.Dv}; use triton"
    has = {
        "bias": problem.has_bias,
        "boolean mask": problem.has_keep,
        "mask by bounds": problem.has_bounds and "bounds" in ON_TRIAL,
        "dropout": problem.dropout_p > 0,
    }
    for option, given in has.items():
        if given:
            return f"has no {option}; use triton"
    if not _installed():
        return "triton or torch is not installed; pip install 'attnproof[torch,triton]'"
    from . import device

    return device.unsupported()


def _rows() -> tuple[str, ...]:
    return ("dense",) if "packed" in ON_TRIAL else ("dense", "packed")


@functools.cache
def _installed() -> bool:
    return find_spec("triton") is not None and find_spec("torch") is not None


def forward(problem: Problem, tensors: Tensors) -> tuple[Any, Any]:
    """See ``backends.Backend``."""
    from . import launch

    return launch.forward(problem, tensors)


def backward(
    problem: Problem,
    tensors: Tensors,
    out: Any,
    lse: Any,
    dout: Any,
    dlse: Any,
    needs: frozenset[str],
) -> Grads:
    """See ``backends.Backend``."""
    from . import launch

    return launch.backward(problem, tensors, out, lse, dout, dlse, needs)
