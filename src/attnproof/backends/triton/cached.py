"""Calls against a key/value cache: few queries split along the keys, and new rows appended in place."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...problem import Problem, Tensors
from . import arguments as args
from . import compat, configs, registry
from .configs import Config
from .kernels.decode import append_kernel, combine_kernel, decode_kernel
from .plan import Plan

MAX_DECODE_ROWS = 64


def serves(problem: Problem) -> bool:
    """Whether the split kernel serves a call: a cache, few queries, and nothing that differs per pair."""
    pairs = problem.has_bias or problem.has_keep or problem.has_bounds or problem.dropout_p > 0
    return problem.rows in ("cached", "paged") and problem.M * problem.G <= MAX_DECODE_ROWS and not pairs


def decode(problem: Problem, t: Tensors, out: Any, lse: Any) -> None:
    """Fill out and lse; the parts are merged by a second kernel where there is more than one."""
    config, splits = (
        _rehearsed_shape(problem) if registry.rehearsal() else _decode_shape(problem, t.q.get_device())
    )
    rows = problem.B * problem.H * problem.M
    parts = None
    # the merge is started early and waits on the device
    leads = splits > 1 and registry.architecture_of(t.q) in configs.DEPENDENT
    if splits > 1:
        parts = torch.empty(rows * splits * (problem.Dv + 1), dtype=torch.float32, device=t.q.device)
    arrays = (t.q, t.k, t.v, out, lse, parts, t.alibi_slopes, t.sink, t.lengths, t.block_table)

    def named() -> dict[str, Any]:
        return {
            **args.constants(problem),
            **args.sizes(problem),
            **args.extras(t),
            **args.strides("q", t.q, "bhmd"),
            **args.strides("k", t.k, "bhnd"),
            **args.strides("v", t.v, "bhnd"),
            **args.strides("o", out, "bhmd"),
            **args.lse_strides(problem),
            **args.blocks(problem, config),
            "BLOCK_M": configs.padded(problem.M * problem.G),
            "BLOCK_S": configs.padded(splits),
            "SPLITS": splits,
            "WIDE": args.wide(config.block_n, problem, t.k, t.v),
        }

    def build() -> Plan:
        programs = problem.B * problem.Hkv * splits
        boxes = args.boxes(problem, config, config.block_n, {1: t.k, 2: t.v})
        return Plan(decode_kernel, programs, len(arrays), {**named(), "LEADS": leads}, config, boxes)

    registry.run("decode", problem, arrays, build)
    if splits > 1:
        merged = (parts, out, lse, t.sink)
        registry.run(
            "combine",
            problem,
            merged,
            lambda: Plan(combine_kernel, rows, 4, named(), Config(1, 1, 4, 1), early=leads),
        )


def _rehearsed_shape(problem: Problem) -> tuple[Config, int]:
    config = registry.config_of(problem, "decode", None)
    return config, _splits(problem, config, registry.REHEARSED_MULTIPROCESSORS)


@functools.lru_cache(maxsize=1024)
def _decode_shape(problem: Problem, device: int) -> tuple[Config, int]:
    """Tile sizes, and into how many parts the keys are split."""
    if device < 0:
        return configs.INTERPRETER, _splits(problem, configs.INTERPRETER, 2)
    config = configs.choose(problem, "decode", compat.architecture(device))
    return config, _splits(problem, config, compat.multiprocessors(device))


def _splits(problem: Problem, config: Config, multiprocessors: int) -> int:
    tiles = args.cdiv(problem.N, config.block_n)
    slots = multiprocessors * configs.programs_per_multiprocessor(problem, multiprocessors)
    splits = problem.num_splits or best_splits(slots, problem.B * problem.Hkv, max(1, min(tiles // 2, 128)))
    return max(1, min(splits, tiles))


def best_splits(slots: int, planes: int, most: int) -> int:
    """Parts per plane, at most ``most``, so that ``planes * parts`` programs nearly fill whole waves of ``slots``."""

    def busy(parts: int) -> float:
        programs = planes * parts
        return programs / (args.cdiv(programs, slots) * slots)

    choices = range(1, min(most, args.cdiv(slots, planes) + 6) + 1)
    best = max(busy(parts) for parts in choices)
    return next(parts for parts in choices if busy(parts) >= 0.97 * best)


def append(cache: Any, new: Any, lengths: Any, block_table: Any) -> None:
    """Write new [B, Hkv, L, width] behind ``lengths`` valid rows of a cache, or of the pages of a pool, in place.

    Nothing is read back and lengths stay on the device; a token past the capacity is dropped.
    """
    if new.numel() == 0:
        return
    batch, heads, count, width = new.shape
    page = cache.shape[2] if block_table is not None else 0
    capacity = page * block_table.shape[1] if block_table is not None else cache.shape[2]
    arrays = (cache, new, lengths, block_table)

    def build() -> Plan:
        named = {
            **args.strides("c", cache, "bhnd"),
            **args.strides("n", new, "bhld"),
            "stride_table": 0 if block_table is None else block_table.stride(0),
            "L": count,
            "Hkv": heads,
            "capacity": capacity,
            "n_pages": cache.shape[0],
            "WIDTH": width,
            "BLOCK": configs.padded(width),
            "PAGE": page,
        }
        return Plan(append_kernel, batch * heads * count, len(arrays), named, Config(1, 1, 1, 1))

    with registry.device_of(cache):
        registry.run("append", (tuple(cache.shape), tuple(new.shape), cache.dtype, capacity), arrays, build)
