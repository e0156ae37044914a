"""The list of tiles of a call, made on the device before the kernel that walks it; see ``kernels.listing``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...masks import BIG
from ...problem import Problem, Tensors
from ..triton import registry, summaries
from ..triton.configs import Config
from ..triton.plan import Plan
from .arguments import slots
from .kernels.listing import HEAD, WIDTH, list_tiles_kernel

OPTIONS = Config(1, 1, 4, 1)  # the sizes of its tiles are those of the kernel that walks them


@dataclass(frozen=True)
class Cut:
    """Tiles of queries and keys of the kernel that walks a list."""

    block_m: int
    block_n: int


def lists(problem: Problem, t: Tensors, cut: Cut) -> tuple[Any, Any]:
    """(tiles, bounds or None) as kernels take them, made on the current stream of the current device."""
    packed = problem.rows == "packed"
    bounds = None if t.bounds is None else t.bounds.contiguous()
    n_slots = slots(problem, cut.block_m)
    programs = n_slots * (1 if packed else summaries.batches(bounds))
    tiles = torch.empty(HEAD + programs * WIDTH, dtype=torch.int32, device=t.q.device)
    arrays = (tiles, bounds, t.cu_q, t.cu_k)

    def build() -> Plan:
        tokens = problem.tokens if packed else (problem.M, problem.N)
        named = {
            **{"M": tokens[0], "N": tokens[1], "B": problem.B},
            **{"left": problem.left, "right": problem.right, "n_slots": n_slots},
            **{"BLOCK_M": cut.block_m, "BLOCK_N": cut.block_n, "ROWS": 1 << (cut.block_m - 1).bit_length()},
            **{"PACKED": packed, "HAS_BOUNDS": bounds is not None, "TOP_LEFT": problem.top_left},
            **{"HAS_LEFT": problem.left < BIG, "HAS_RIGHT": problem.right < BIG or problem.top_left},
        }
        return Plan(list_tiles_kernel, programs, len(arrays), named, OPTIONS)

    registry.run("list tiles", problem, arrays, build, cut, programs)
    return tiles, bounds
