"""Tile lists of masks that no formula describes, for one pass of a call; see ``kernels/summary``."""

from __future__ import annotations

from typing import Any

import torch

from ...problem import Problem, Tensors
from . import arguments as args
from . import registry
from .configs import Config, Pass
from .kernels.summary import classify_kernel, compact_kernel
from .plan import Plan


def batches(bounds: Any) -> int:
    """How many sequences a bounds array tells apart; its strides do not say."""
    return 0 if bounds is None else bounds.shape[0]


def lists(problem: Problem, t: Tensors, which: Pass) -> Any:
    """Tile lists of one pass, int32 [batches, heads, slots, width]."""
    config = registry.config_of(problem, which, t.q)
    by_key = which == "dkdv"
    if by_key:
        slots, width = args.key_slots(problem, config.block_n), args.cdiv(problem.M, config.block_m) + 2
    else:
        slots, width = args.query_slots(problem, config.block_m), args.cdiv(problem.N, config.block_n) + 2
    packed = problem.rows == "packed"
    keep, bounds = t.keep, t.bounds
    alike = problem.rows == "dense" and (keep is None or keep.stride(0) == 0 or problem.B == 1)
    alike = alike and (bounds is None or bounds.shape[0] == 1)
    batch_count = 1 if packed or alike else problem.B
    heads = problem.H if keep is not None and keep.stride(1) != 0 else 1
    others = width - 2
    kinds = torch.empty((batch_count * heads, slots, others), dtype=torch.int8, device=t.q.device)
    found = torch.empty((batch_count, heads, slots, width), dtype=torch.int32, device=t.q.device)
    arrays = (kinds, keep, bounds, t.cu_q, t.cu_k, t.lengths)

    def classify() -> Plan:
        named = {
            **args.constants(problem),
            **args.sizes(problem),
            **args.extras(t),
            **args.blocks(problem, config),
            "H": heads,
            "n_slots": slots,
            "n_planes": batch_count * heads,
            "n_other": others,
            "BY_KEY": by_key,
        }
        return Plan(classify_kernel, kinds.numel(), len(arrays), named, config)

    def compact() -> Plan:
        named = {"n_other": others, "list_width": width, "BLOCK": 128}
        return Plan(compact_kernel, batch_count * heads * slots, 2, named, Config(1, 1, 4, 1))

    if kinds.numel() == 0:
        return found.zero_()
    registry.run(f"classify {which}", problem, arrays, classify, batches(bounds))
    registry.run(f"compact {which}", problem, (found, kinds), compact, batch_count * heads)
    return found
