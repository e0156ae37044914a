"""Triton backend: every GPU that Triton serves, forward, backward and decode.

Files, from the inside out: ``kernels`` (pieces, and the kernels made of them), ``configs`` (tile sizes), ``plan`` (compile
once, launch fast), ``arguments`` (from a problem to named kernel arguments), ``launch`` (what runs when). Triton and
torch are imported by the first call that needs them.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from ...problem import Grads, Problem, Tensors

name = "triton"
kind = "torch"
MAX_HEAD_DIM = 256


def why_not(problem: Problem) -> str | None:
    """The sentence that says what this backend cannot do, or None."""
    if problem.dtype == "float64":
        return "computes in float32 and would lose float64; use native, streaming or reference"
    if max(problem.D, problem.Dv) > MAX_HEAD_DIM:
        return f"holds head dims up to {MAX_HEAD_DIM}, got D={problem.D} and Dv={problem.Dv}"
    if find_spec("triton") is None or find_spec("torch") is None:
        return "triton or torch is not installed; pip install 'attnproof[triton]'"
    from . import compat

    if problem.device == "cpu" and not compat.interpreting():
        return "needs a GPU, and the tensors are on cpu (TRITON_INTERPRET=1 runs it there, slowly, for tests)"
    return compat.unsupported_device() if problem.device != "cpu" else None


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
