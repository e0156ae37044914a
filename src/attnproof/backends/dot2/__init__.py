"""Backend for AMD GPUs without matrix units (gfx906 first): HIP C++ compiled at run time, no SDK on the user's side.

Files, from the inside out: ``kernels`` (device code), ``source`` (its text), ``variants`` (its compile-time facts),
``configs`` (tile sizes), ``arguments`` (the struct it is given), ``launch`` (what runs when), ``loader`` (compiler and
driver by ctypes), ``gate`` (the self-test before the first use), ``doctor`` (what an owner runs).

No AMD GPU was at hand when this was written: docs/07_mi50.md says what is proven how, and what is only modelled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from importlib.util import find_spec
from typing import Any

from ...errors import Unsupported
from ...problem import Grads, Problem, Tensors
from .configs import MAX_HEAD_DIM, MAX_HEAD_DIM_SINGLE

name = "dot2"
kind = "torch"
NUMERICS = "flash"  # fp16 weights enter their products as fp16
MAX_LENGTH = 2**29  # positions and band sides are added in 32 bits
MAX_GROUPS = 2**31

_elsewhere: Any = None  # a runner that takes the device's place


def why_not(problem: Problem) -> str | None:
    """The sentence that says what this backend cannot do, or None."""
    reason = _unfit(problem)
    if reason is not None or _elsewhere is not None:
        return reason
    if problem.device == "cpu":
        return "needs an AMD GPU, and the tensors are on cpu"
    if find_spec("torch") is None:
        return "torch is not installed; it drives the GPU that this backend runs on"
    from . import gate

    return gate.closed()


def _unfit(problem: Problem) -> str | None:
    """Why no device could run a problem, or None."""
    if problem.dtype == "float64":
        return "computes in float32 and would lose float64; use native, streaming or reference"
    widest = max(problem.D, problem.Dv)
    limit = MAX_HEAD_DIM_SINGLE if problem.dtype == "float32" else MAX_HEAD_DIM
    if widest > limit:
        return f"holds head dims up to {limit} in {problem.dtype}, got D={problem.D} and Dv={problem.Dv}"
    if max(problem.M, problem.N) >= MAX_LENGTH:
        return f"counts positions up to 2^29, got M={problem.M} and N={problem.N}"
    tiles = -(-max(problem.M, problem.N, 1) // 16)
    if problem.B * problem.H * tiles >= MAX_GROUPS:
        return f"counts workgroups in 31 bits, got {problem.B} x {problem.H} planes of {tiles} tiles"
    return None


@contextlib.contextmanager
def running_on(runner: Any) -> Generator[None, None, None]:
    """Within it, steps go to ``runner`` (an interpreter, say) instead of to a GPU, and tensors may be on cpu."""
    global _elsewhere
    before, _elsewhere = _elsewhere, runner
    try:
        yield
    finally:
        _elsewhere = before


def forward(problem: Problem, tensors: Tensors) -> tuple[Any, Any]:
    """See ``backends.Backend``."""
    from . import launch

    with _on(tensors.q) as (run, units):
        return launch.forward(problem, tensors, run, units)


def backward(
    problem: Problem, tensors: Tensors, out: Any, lse: Any, dout: Any, dlse: Any, needs: frozenset[str]
) -> Grads:
    """See ``backends.Backend``."""
    from . import launch

    if problem.rows in ("cached", "paged"):
        raise Unsupported(name, "no gradient through a cache written in place; use attention()")
    with _on(tensors.q) as (run, units):
        return launch.backward(problem, tensors, out, lse, dout, dlse, needs, run, units)


@contextlib.contextmanager
def _on(x: Any) -> Generator[tuple[Any, int], None, None]:
    """What runs steps for the device of x, and how many compute units it has."""
    if _elsewhere is not None:
        yield _elsewhere, getattr(_elsewhere, "units", 1)
        return
    import torch

    from . import loader

    with torch.cuda.device(x.device):
        device = loader.device(x.get_device())
        yield device.run, device.units
