"""The lists of tiles of a call, made on the device before the kernel that walks them; see ``kernels.listing``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...masks import BIG
from ...problem import Problem, Tensors
from ..triton import registry, summaries
from ..triton.configs import Config
from ..triton.plan import Plan
from .kernels.listing import HEAD, WIDTH, list_tiles_kernel
from .kernels.listing_keys import list_keys_kernel

OPTIONS = Config(1, 1, 4, 1)  # the sizes of its tiles are those of the kernel that walks them


@dataclass(frozen=True)
class Cut:
    """Tiles of the kernel that walks a list, ``own`` side and ``streamed`` side, and how many tiles it may have."""

    own: int
    streamed: int
    n_slots: int


def query_tiles(problem: Problem, t: Tensors, cut: Cut) -> tuple[Any, Any]:
    """(list of tiles of queries, what bounds leave to them or None), made on the current stream of the current device."""
    named = {"BLOCK_M": cut.own, "BLOCK_N": cut.streamed, "ROWS": 1 << (cut.own - 1).bit_length()}
    seen = None
    if t.bounds is not None:
        # a tile may run over the last row
        rows = t.bounds.numel() // 2 + named["ROWS"]
        seen = torch.empty(2 * rows, dtype=torch.int32, device=t.q.device)
    return _make(list_tiles_kernel, problem, t, (seen,), cut, named), seen


def key_tiles(problem: Problem, t: Tensors, cut: Cut, queries: Cut) -> Any:
    """The list of tiles of keys; ``queries`` is how row statistics lie."""
    named = {"KEYS": cut.own, "BLOCK_M": cut.streamed, "QUERIES": queries.own, "nothing": queries.n_slots - 1}
    return _make(list_keys_kernel, problem, t, (), cut, named)


def _make(
    kernel: Any, problem: Problem, t: Tensors, more: tuple[Any, ...], cut: Cut, named: dict[str, int]
) -> Any:
    bounds = None if t.bounds is None else t.bounds.contiguous()
    packed = problem.rows == "packed"
    programs = cut.n_slots * (1 if packed else summaries.batches(t.bounds))
    tiles = torch.empty(HEAD + programs * WIDTH, dtype=torch.int32, device=t.q.device)
    arrays = (tiles, *more, bounds, t.cu_q, t.cu_k)

    def build() -> Plan:
        tokens = problem.tokens if packed else (problem.M, problem.N)
        whole = {
            **{"M": tokens[0], "N": tokens[1], "B": problem.B},
            **{"left": problem.left, "right": problem.right, "n_slots": cut.n_slots},
            **{"PACKED": packed, "HAS_BOUNDS": bounds is not None, "TOP_LEFT": problem.top_left},
            **{"HAS_LEFT": problem.left < BIG, "HAS_RIGHT": problem.right < BIG or problem.top_left},
            **named,
        }
        return Plan(kernel, programs, len(arrays), whole, OPTIONS)

    registry.run("list tiles", problem, arrays, build, kernel, cut, programs)
    return tiles
