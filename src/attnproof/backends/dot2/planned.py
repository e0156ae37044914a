"""Which kernels a call would run, without running any: the steps of ``launch`` on tensors that hold no data."""

from __future__ import annotations

from typing import Any

from ...problem import Problem, Tensors
from .variants import Step, Variant


def steps(problem: Problem, *, gradients: bool = True, units: int = 60) -> list[Step]:
    """The launches of a call with contiguous, aligned inputs, forward and (if it has one) backward."""
    import torch

    from . import launch

    found: list[Step] = []
    tensors = _tensors(problem, torch)
    out, lse = launch.forward(problem, tensors, found.append, units)
    if gradients and problem.rows in ("dense", "packed"):
        needs = {"q", "k", "v"}
        needs |= {"bias"} if problem.has_bias else set()
        needs |= {"sink"} if problem.has_sink else set()
        needs |= {"alibi_slopes"} if problem.has_alibi else set()
        launch.backward(problem, tensors, out, lse, out, None, frozenset(needs), found.append, units)
    return found


def variants(problem: Problem, *, gradients: bool = True) -> list[Variant]:
    """The kernels of a call, each once."""
    return list(dict.fromkeys(step.variant for step in steps(problem, gradients=gradients)))


def _tensors(problem: Problem, torch: Any) -> Tensors:
    """Tensors of a problem's shapes, never written and never read."""
    p = problem
    dtype = getattr(torch, p.dtype)

    def plain(*shape: int, of: Any = dtype) -> Any:
        return torch.empty(shape, dtype=of)

    table = lengths = cu_q = cu_k = None
    if p.rows == "packed":
        shapes = [(p.H, p.tokens[0], p.D), (p.Hkv, p.tokens[1], p.D), (p.Hkv, p.tokens[1], p.Dv)]
        cu_q = cu_k = plain(p.B + 1, of=torch.int32)
    elif p.rows == "paged":
        pages = p.B * p.N // max(p.page, 1)
        shapes = [(p.B, p.H, p.M, p.D), (pages, p.Hkv, p.page, p.D), (pages, p.Hkv, p.page, p.Dv)]
        table = plain(p.B, p.N // max(p.page, 1), of=torch.int32)
    else:
        shapes = [(p.B, p.H, p.M, p.D), (p.B, p.Hkv, p.N, p.D), (p.B, p.Hkv, p.N, p.Dv)]
    if p.rows in ("cached", "paged"):
        lengths = plain(p.B, of=torch.int32)
    bounds = (p.tokens[0], 2) if p.rows == "packed" else (1, p.M, 2)
    return Tensors(
        *(plain(*shape) for shape in shapes),
        bias=None if p.bias_shape is None else plain(*p.bias_shape, of=getattr(torch, p.bias_dtype)),
        keep=plain(1, 1, p.M, p.N, of=torch.bool) if p.has_keep else None,
        alibi_slopes=plain(1, p.H, of=torch.float32) if p.has_alibi else None,
        sink=plain(p.H) if p.has_sink else None,
        cu_q=cu_q,
        cu_k=cu_k,
        lengths=lengths,
        block_table=table,
        bounds=plain(*bounds, of=torch.int32) if p.has_bounds else None,
        rng=plain(2, of=torch.int64) if p.dropout_p > 0 else None,
    )
