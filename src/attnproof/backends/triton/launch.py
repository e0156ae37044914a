"""What runs when: allocate, look the plan up by the structure of the call, launch.

A known structure costs a dictionary look-up per kernel; a new one is turned into named kernel arguments once
(``arguments``), compiled and kept (``registry``). Nothing here waits for the device.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...problem import Grads, Problem, Tensors
from . import arguments as args
from . import backprop, cached, compat, registry, summaries
from .kernels.forward import forward_kernel
from .plan import Plan

NOTHING = (None,) * (len(Tensors._fields) - 3)
AFTER_LSE = (None,) * 11  # arrays of forward_kernel behind lse


def forward(problem: Problem, tensors: Tensors) -> tuple[Any, Any]:
    """See ``backends.Backend``."""
    q, k, v = tensors[:3]
    out = empty_out(problem, q)
    lse = torch.empty_like(_lse_form(problem, q.device))
    if lse.numel() == 0:
        return out, lse
    key = None
    if tensors[3:] == NOTHING and registry.rehearsal() is None:
        # the short way: three arrays, one kernel, one look-up
        unaligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
        key = (problem, q.stride(), k.stride(), v.stride(), unaligned == 0, q.get_device())
        plan = registry.PLANS.get(key)
        if plan is not None and (key[-1] < 0 or key[-1] == compat.current_device()):
            if not plan.five(q, k, v, out, lse):
                plan(q, k, v, out, lse, *AFTER_LSE)
            return out, lse
    if problem.has_keep or problem.has_alibi or problem.bias_shape is not None:
        tensors = tensors.expand(problem)
    with registry.device_of(q):
        if cached.serves(problem):
            cached.decode(problem, tensors, out, lse)
        else:
            plan = _forward(problem, tensors, out, lse)
            if key is not None:
                registry.PLANS[key] = plan
    return out, lse


def backward(
    problem: Problem, tensors: Tensors, out: Any, lse: Any, dout: Any, dlse: Any, needs: frozenset[str]
) -> Grads:
    """See ``backends.Backend``."""
    if problem.rows not in ("dense", "packed"):
        raise NotImplementedError("a cache has no gradient")  # api refuses before
    tensors = tensors.expand(problem)
    with registry.device_of(tensors.q):
        return backprop.run(problem, tensors, backprop.Given(out, lse, dout, dlse), needs)


def empty_out(problem: Problem, q: Any) -> Any:
    """Unwritten output of ``problem.out_shape``, stored in the order of the axes of q."""
    if problem.Dv == problem.D and (
        q.is_contiguous() if problem.layout == "bhmd" else q.transpose(1, 2).is_contiguous()
    ):
        return torch.empty_like(q)  # keeps the order of the axes
    shape = problem.out_shape
    if problem.rows == "packed" or problem.layout == "bmhd":
        swapped = (*shape[:-3], shape[-2], shape[-3], shape[-1])
        return torch.empty(swapped, dtype=q.dtype, device=q.device).transpose(-2, -3)
    return torch.empty(shape, dtype=q.dtype, device=q.device)


@functools.lru_cache(maxsize=registry.MAX_PLANS)
def _lse_form(problem: Problem, device: torch.device) -> Any:
    """What lse looks like: one float spread out. To allocate like it takes less time than to name a shape and a dtype."""
    form = torch.empty((), dtype=torch.float32, device=device).expand(problem.out_shape[:-1])
    return (
        form if form.numel() > 1 else form.clone(memory_format=torch.contiguous_format)
    )  # torch would keep its strides


def _forward(problem: Problem, t: Tensors, out: Any, lse: Any) -> Plan:
    lists = summaries.lists(problem, t, "forward") if problem.has_keep else None
    arrays = (
        *(t.q, t.k, t.v, out, lse, t.bias, t.keep, t.alibi_slopes, t.sink, t.bounds, t.rng, lists),
        *(t.cu_q, t.cu_k, t.lengths, t.block_table),
    )

    def build() -> Plan:
        config = registry.config_of(problem, "forward", t.q)
        slots = args.query_slots(problem, config.block_m)
        named = {
            **args.constants(problem),
            **args.sizes(problem),
            **args.extras(t),
            **args.strides("q", t.q, "bhmd"),
            **args.strides("k", t.k, "bhnd"),
            **args.strides("v", t.v, "bhnd"),
            **args.strides("o", out, "bhmd"),
            **args.lse_strides(problem),
            **args.list_strides(lists, problem),
            **args.grid(problem, slots, problem.H, args.FORWARD_BUDGET),
            **args.blocks(problem, config),
            "WIDE": args.wide(config.block_n, problem, t.k, t.v),
        }
        boxes = args.boxes(problem, config, config.block_n, {1: t.k, 2: t.v})
        return Plan(
            forward_kernel, slots * args.planes(problem, problem.H), len(arrays), named, config, boxes
        )

    return registry.run("forward", problem, arrays, build, summaries.batches(t.bounds))
