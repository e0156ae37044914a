"""Attention in plain torch operations, in chunks of query rows: any device, any dtype, every option.

This is what runs where no kernel does (an option a kernel lacks, float64 on a GPU), so it is written for being
right: the softmax of a chunk is complete, nothing is rescaled, and backward builds a chunk's softmax again from its
logits instead of trusting a stored lse. A chunk holds at most ``blocks.BUDGET`` scores: nothing M x N exists.

``differentiable`` is the same arithmetic in one piece and without writing in place, O(M N) memory: torch can
differentiate it any number of times and in forward mode. It is the slow path behind higher-order gradients.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import Any

from ...problem import Grads, Problem, Tensors

name = "math"
kind = "torch"


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("torch") is not None


def why_not(problem: Problem) -> str | None:
    """Everything is served, once torch is there."""
    # a None there forbids the import
    there = bool(sys.modules["torch"]) if "torch" in sys.modules else _installed()
    return None if there else "needs torch, which is not installed; pip install 'attnproof[torch]'"


def forward(problem: Problem, tensors: Tensors) -> tuple[Any, Any]:
    """See ``backends.Backend``."""
    from . import formulas

    out, lse = formulas.forward(problem, tensors)
    return out, lse.contiguous()


def backward(
    problem: Problem, tensors: Tensors, out: Any, lse: Any, dout: Any, dlse: Any, needs: frozenset[str]
) -> Grads:
    """See ``backends.Backend``; ``out`` and ``lse`` are not used."""
    from . import formulas

    return formulas.backward(problem, tensors, dout, dlse, needs)


def differentiable(problem: Problem, tensors: Tensors) -> tuple[Any, Any]:
    """``forward`` as one differentiable expression, O(M N) memory; see the module docstring."""
    from . import formulas

    return formulas.differentiable(problem, tensors)
