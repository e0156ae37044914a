"""Triton backend: every GPU that Triton serves, forward, backward and decode.

Files, from the inside out: ``kernels`` (pieces, and the kernels made of them), ``configs`` (tile sizes), ``plan`` (compile
once, launch fast), ``registry`` (plans by structure), ``arguments`` (from a problem to named kernel arguments),
``summaries``, ``backprop`` and ``cached`` (the parts of a call), ``launch`` (what runs when). Triton and torch are imported
by the first call that needs them.
"""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec
from typing import Any

from ...problem import Grads, Problem, Tensors

name = "triton"
NUMERICS = "flash"  # p and dS enter their products in the dtype of the inputs
kind = "torch"
MAX_HEAD_DIM = 256


def why_not(problem: Problem) -> str | None:
    """The sentence that says what this backend cannot do, or None."""
    if problem.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "needs a GPU, and the tensors are on cpu (TRITON_INTERPRET=1 runs it there, slowly, for tests)"
    if problem.dtype == "float64":
        return "computes in float32 and would lose float64; use native, streaming or reference"
    if max(problem.D, problem.Dv) > MAX_HEAD_DIM:
        return f"holds head dims up to {MAX_HEAD_DIM}, got D={problem.D} and Dv={problem.Dv}"
    if not _installed():
        return "triton or torch is not installed; pip install 'attnproof[torch,triton]'"
    if problem.device == "cpu":
        return None
    from . import compat

    return compat.unsupported_device()


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


def append(cache: Any, new: Any, lengths: Any, block_table: Any) -> None:
    """Write new rows behind the valid ones of a device cache, in place; see ``cached.append``."""
    from . import cached

    cached.append(cache, new, lengths, block_table)


def appends(cache: Any) -> bool:
    """Whether ``append`` serves this cache: a device that the kernels run on, and a dtype that they copy."""
    if not _installed() or cache.dtype.itemsize > 4:
        return False
    from . import compat

    return compat.unsupported_device() is None
