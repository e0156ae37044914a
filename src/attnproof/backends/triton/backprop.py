"""The backward pass: which kernels run for which gradients, and what they are given."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...problem import Grads, Problem, Tensors
from . import arguments as args
from . import registry
from .configs import Config
from .kernels.backward import dkdv_kernel, dq_kernel
from .kernels.gradients import dbias_kernel, slot_sum_kernel
from .kernels.statistics import stats_kernel
from .plan import Plan
from .summaries import batches, lists


class Given(NamedTuple):
    """What the forward pass left and the caller handed back."""

    out: Any
    lse: Any
    dout: Any
    dlse: Any


def run(problem: Problem, t: Tensors, given: Given, needs: frozenset[str]) -> Grads:
    """Statistics first, alone or as part of the pass over queries; then the pass over keys."""
    dk = dv = dq = dalibi = dbias = dsink = None
    stats = torch.empty(args.stats_shape(problem), dtype=torch.float32, device=t.q.device)
    wants_queries = bool(needs & {"q", "alibi_slopes"})
    wants_sink = "sink" in needs and problem.has_sink
    alone = wants_sink or not wants_queries
    if alone:
        dsink = stats_alone(problem, t, given, stats, wants_sink)
    if wants_queries:
        dq, dalibi = queries_pass(
            problem, t, given, stats, make_stats=not alone, slopes="alibi_slopes" in needs
        )
    if needs & {"k", "v"}:
        dk, dv = keys_pass(problem, t, stats, given.dout)
    if "bias" in needs and problem.has_bias:
        dbias = bias_pass(problem, t, stats, given.dout)
    return Grads(
        dq if "q" in needs else None,
        dk if "k" in needs else None,
        dv if "v" in needs else None,
        dbias,
        dalibi,
        dsink,
    )


def stats_alone(problem: Problem, t: Tensors, given: Given, stats: Any, wants_sink: bool) -> Any:
    """Fill stats [2, planes, rows] (the shift of p, and delta) and return dsink; packed rows are one plane per head."""
    config = Config(32, 1, 4, 1)
    n_rows = problem.tokens[0] if problem.rows == "packed" else problem.M
    slots, planes = args.cdiv(n_rows, config.block_m), args.planes(problem, problem.H)
    if given.lse.numel() == 0:
        return torch.zeros(problem.H, device=stats.device) if wants_sink else None
    parts = torch.empty((planes, slots), dtype=torch.float32, device=stats.device) if wants_sink else None
    arrays = (given.out, given.dout, given.lse, given.dlse, *stats, t.sink if wants_sink else None, parts)

    def build() -> Plan:
        named = {
            **args.constants(problem),
            **args.extras(t),
            **args.given_strides(problem, given),
            **args.blocks(problem, config),
            "n_rows": n_rows,
            "H": problem.H,
            "n_slots": slots,
            "HAS_SINK": wants_sink,
        }
        return Plan(stats_kernel, slots * planes, len(arrays), named, config)

    registry.run("stats", problem, arrays, build)
    return None if parts is None else parts.view(-1, problem.H, slots).sum((0, 2))


def _streams(problem: Problem, t: Tensors, tiles: Any, dout: Any) -> dict[str, Any]:
    """Arguments that both passes of the backward share."""
    return {
        **args.constants(problem),
        **args.sizes(problem),
        **args.extras(t),
        **args.strides("q", t.q, "bhmd"),
        **args.strides("k", t.k, "bhnd"),
        **args.strides("v", t.v, "bhnd"),
        **args.strides("do", dout, "bhmd"),
        **args.stat_strides(problem),
        **args.list_strides(tiles, problem),
    }


def keys_pass(problem: Problem, t: Tensors, stats: Any, dout: Any) -> tuple[Any, Any]:
    """(dk, dv)."""
    dk, dv = torch.empty_like(t.k), torch.empty_like(t.v)
    if dk.numel() == 0 and dv.numel() == 0:
        return dk, dv
    tiles = lists(problem, t, "dkdv") if problem.has_keep or problem.has_bounds else None
    arrays = (
        *(t.q, t.k, t.v, dout, *stats, dk, dv, t.bias, t.keep, t.alibi_slopes, t.bounds, t.rng, tiles),
        *(t.cu_q, t.cu_k),
    )

    def build() -> Plan:
        config = registry.config_of(problem, "dkdv", t.q)
        slots = args.key_slots(problem, config.block_n)
        named = {
            **_streams(problem, t, tiles, dout),
            **args.strides("dk", dk, "bhnd"),
            **args.strides("dv", dv, "bhnd"),
            **args.grid(problem, slots, problem.Hkv, args.BACKWARD_BUDGET),
            **args.blocks(problem, config),
            "WIDE": args.wide(config.block_m, problem, t.q, dout),
        }
        boxes = args.boxes(problem, config, config.block_m, {0: t.q, 3: dout})
        return Plan(dkdv_kernel, slots * args.planes(problem, problem.Hkv), len(arrays), named, config, boxes)

    registry.run("dkdv", problem, arrays, build, batches(t.bounds))
    return dk, dv


def queries_pass(
    problem: Problem, t: Tensors, given: Given, stats: Any, *, make_stats: bool, slopes: bool
) -> tuple[Any, Any]:
    """(dq, dalibi)."""
    slopes = slopes and problem.has_alibi
    dq = torch.empty_like(t.q)
    if stats.numel() == 0:
        return dq, torch.zeros((problem.B, problem.H), device=t.q.device) if slopes else None
    config = registry.config_of(problem, "dq", t.q)
    slots, planes = args.query_slots(problem, config.block_m), args.planes(problem, problem.H)
    tiles = lists(problem, t, "dq") if problem.has_keep else None
    parts = torch.empty((slots, planes), dtype=torch.float32, device=stats.device) if slopes else None
    made_from = (given.out, given.lse, given.dlse) if make_stats else (None, None, None)
    arrays = (
        *(t.q, t.k, t.v, given.dout, *stats, dq, parts, *made_from),
        *(t.bias, t.keep, t.alibi_slopes, t.bounds, t.rng, tiles, t.cu_q, t.cu_k),
    )

    def build() -> Plan:
        named = {
            **_streams(problem, t, tiles, given.dout),
            **args.given_strides(problem, given),
            **args.strides("dq", dq, "bhmd"),
            **args.grid(problem, slots, problem.H, args.BACKWARD_BUDGET),
            **args.blocks(problem, config),
            "NEED_SLOPES": slopes,
            "MAKE_STATS": make_stats,
            "WIDE": args.wide(config.block_n, problem, t.k, t.v),
        }
        boxes = args.boxes(problem, config, config.block_n, {1: t.k, 2: t.v})
        return Plan(dq_kernel, slots * planes, len(arrays), named, config, boxes)

    registry.run("dq", problem, arrays, build, batches(t.bounds))
    if parts is None:
        return dq, None
    if problem.rows == "packed":
        return dq, _slopes_of_slots(problem, t, parts, config)
    return dq, parts.sum(0).view(problem.B, problem.H)


def _slopes_of_slots(problem: Problem, t: Tensors, parts: Any, config: Config) -> Any:
    """[B, H] sums of the slots of each packed sequence."""
    dalibi = torch.empty((problem.B, problem.H), dtype=torch.float32, device=parts.device)
    arrays = (parts, dalibi, t.cu_q)
    named = {"H": problem.H, "BLOCK": config.block_m}
    plain = Config(1, 1, 1, 1)
    registry.run(
        "slots", problem, arrays, lambda: Plan(slot_sum_kernel, dalibi.numel(), len(arrays), named, plain)
    )
    return dalibi


def bias_pass(problem: Problem, t: Tensors, stats: Any, dout: Any) -> Any:
    """dbias of the caller's shape."""
    shape = problem.bias_shape
    if shape is None:
        raise ValueError("bias: expected a shape to reduce to, got None")
    dbias = torch.zeros(shape, dtype=t.bias.dtype, device=t.bias.device)
    if dbias.numel() == 0 or stats.numel() == 0 or problem.N == 0:
        return dbias
    config = registry.config_of(problem, "dbias", t.q)
    m_tiles, n_tiles = args.cdiv(problem.M, config.block_m), args.cdiv(problem.N, config.block_n)
    batch, heads, rows, cols = shape
    arrays = (
        *(t.q, t.k, t.v, dout, *stats, dbias, t.bias, t.keep, t.alibi_slopes, t.bounds, t.rng),
        *(t.cu_q, t.cu_k),
    )
    own_m, own_n = (m_tiles if rows > 1 else 1), (n_tiles if cols > 1 else 1)

    def build() -> Plan:
        named = {
            **_streams(problem, t, None, dout),
            **args.pair_strides("dbias", dbias),
            **args.blocks(problem, config),
            "M": problem.M,
            "N": problem.N,
            "heads": heads,
            "tiles_m": own_m,
            "tiles_n": own_n,
            "walk_b": problem.B if batch == 1 else 1,
            "walk_h": problem.H if heads == 1 else 1,
            "walk_m": m_tiles // own_m,
            "walk_n": n_tiles // own_n,
            "SUM_M": rows == 1,
            "SUM_N": cols == 1,
        }
        return Plan(dbias_kernel, batch * heads * own_m * own_n, len(arrays), named, config)

    registry.run("dbias", problem, arrays, build, batches(t.bounds))
    return dbias
