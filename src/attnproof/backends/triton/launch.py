"""What runs when: allocate, look the plan up by the structure of the call, launch.

A known structure costs a dictionary look-up per kernel; a new one is turned into named kernel arguments once
(``arguments``), compiled and kept. Nothing here waits for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ...problem import Grads, Problem, Tensors
from . import arguments as args
from . import compat, configs
from .kernels.backward import dkdv_kernel, dq_kernel, stats_kernel
from .configs import Config, Pass
from .kernels.decode import combine_kernel, decode_kernel
from .kernels.forward import forward_kernel
from .kernels.gradients import dbias_kernel, slot_sum_kernel
from .plan import Plan
from .kernels.summary import summary_kernel

_PLANS: dict[Any, Plan] = {}
MAX_PLANS = 4096  # a runaway of shapes must not hold memory for ever
MAX_DECODE_ROWS = 64
NOTHING = (None,) * (len(Tensors._fields) - 3)
AFTER_LSE = (None,) * 11  # arrays of forward_kernel behind lse


def forward(problem: Problem, tensors: Tensors) -> tuple[Any, Any]:
    """See ``backends.Backend``."""
    q, k, v = tensors[:3]
    out = _empty_out(problem, q)
    lse = torch.empty(problem.out_shape[:-1], dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    key = None
    if tensors[3:] == NOTHING:
        # the short way: three arrays, one kernel, one look-up
        unaligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
        key = (problem, q.stride(), k.stride(), v.stride(), unaligned == 0, q.get_device())
        plan = _PLANS.get(key)
        if plan is not None and (key[-1] < 0 or key[-1] == compat.current_device()):
            plan(q, k, v, out, lse, *AFTER_LSE)
            return out, lse
    tensors = tensors.expand(problem)
    with _on(q):
        if decodes(problem):
            _decode(problem, tensors, out, lse)
        else:
            plan = _forward(problem, tensors, out, lse)
            if key is not None:
                _PLANS[key] = plan
    return out, lse


def backward(
    problem: Problem, tensors: Tensors, out: Any, lse: Any, dout: Any, dlse: Any, needs: frozenset[str]
) -> Grads:
    """See ``backends.Backend``."""
    if problem.rows not in ("dense", "packed"):
        raise NotImplementedError("a cache has no gradient")  # api refuses before
    tensors = tensors.expand(problem)
    with _on(tensors.q):
        return _backward(problem, tensors, out, lse, dout, dlse, needs)


def decodes(problem: Problem) -> bool:
    """Whether the split kernel serves a call: a cache, few queries, and nothing that differs per pair."""
    pairs = problem.has_bias or problem.has_keep or problem.has_bounds or problem.dropout_p > 0
    return problem.rows in ("cached", "paged") and problem.M * problem.G <= MAX_DECODE_ROWS and not pairs


# ---- plans ----


def _run(tag: str, problem: Problem, arrays: tuple[Any, ...], build: Callable[[], Plan], *more: Any) -> Plan:
    """Launch the plan of this structure, and return it; everything that Triton specialises on is in the key."""
    facts = [None if x is None else (x.stride(), x.data_ptr() & 15 == 0) for x in arrays]
    key = (tag, problem, arrays[0].get_device(), more, *facts)
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) >= MAX_PLANS:
            _PLANS.clear()
        plan = _PLANS[key] = build()
    plan(*arrays)
    return plan


def _on(x: Any) -> contextlib.AbstractContextManager[Any]:
    """The device of x, without the cost of switching where it is current."""
    if x.device.type == "cpu" or x.get_device() == compat.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def _config(problem: Problem, which: Pass, x: Any) -> Config:
    architecture = "interpreter" if x.device.type == "cpu" else compat.architecture(x.get_device())
    return configs.choose(problem, which, architecture)


def _empty_out(problem: Problem, q: Any) -> Any:
    """Unwritten output of ``problem.out_shape``, stored in the order of the axes of q."""
    if problem.D == problem.Dv and (q.is_contiguous() if problem.layout == "bhmd" else q.transpose(1, 2).is_contiguous()):
        return torch.empty_like(q)  # keeps the order of the axes
    shape = problem.out_shape
    if problem.rows == "packed" or problem.layout == "bmhd":
        swapped = (*shape[:-3], shape[-2], shape[-3], shape[-1])
        return torch.empty(swapped, dtype=q.dtype, device=q.device).transpose(-2, -3)
    return torch.empty(shape, dtype=q.dtype, device=q.device)


# ---- forward ----


def _forward(problem: Problem, t: Tensors, out: Any, lse: Any) -> Plan:
    lists = _summary(problem, t, "forward") if problem.has_keep else None
    arrays = (
        *(t.q, t.k, t.v, out, lse, t.bias, t.keep, t.alibi_slopes, t.sink, t.bounds, t.rng, lists),
        *(t.cu_q, t.cu_k, t.lengths, t.block_table),
    )

    def build() -> Plan:
        config = _config(problem, "forward", t.q)
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
        return Plan(forward_kernel, slots * args.planes(problem, problem.H), len(arrays), named, config, boxes)

    return _run("forward", problem, arrays, build, _batches(t.bounds))


def _batches(bounds: Any) -> int:
    """How many sequences a bounds array tells apart; its strides do not say."""
    return 0 if bounds is None else bounds.shape[0]


def _summary(problem: Problem, t: Tensors, which: Pass) -> Any:
    """Tile lists of one pass, int32 [batches, heads, slots, width]."""
    config = _config(problem, which, t.q)
    by_key = which == "dkdv"
    if by_key:
        slots, width = args.key_slots(problem, config.block_n), args.cdiv(problem.M, config.block_m) + 2
    else:
        slots, width = args.query_slots(problem, config.block_m), args.cdiv(problem.N, config.block_n) + 2
    packed = problem.rows == "packed"
    keep, bounds = t.keep, t.bounds
    alike = problem.rows == "dense" and (keep is None or keep.stride(0) == 0 or problem.B == 1)
    alike = alike and (bounds is None or bounds.shape[0] == 1)
    batches = 1 if packed or alike else problem.B
    heads = problem.H if keep is not None and keep.stride(1) != 0 else 1
    lists = torch.empty((batches, heads, slots, width), dtype=torch.int32, device=t.q.device)
    arrays = (lists, keep, bounds, t.cu_q, t.cu_k, t.lengths)
    if not packed and problem.rows != "dense" and by_key:
        raise NotImplementedError("a cache has no gradient")

    def build() -> Plan:
        named = {
            **args.constants(problem),
            **args.sizes(problem),
            **args.extras(t),
            **args.list_strides(lists, problem),
            **args.blocks(problem, config),
            "H": heads,
            "n_slots": slots,
            "n_planes": batches * heads,
            "BY_KEY": by_key,
        }
        return Plan(summary_kernel, slots * batches * heads, len(arrays), named, config)

    _run(f"summary {which}", problem, arrays, build, _batches(bounds))
    return lists


# ---- decode ----


def _decode(problem: Problem, t: Tensors, out: Any, lse: Any) -> None:
    config = _config(problem, "decode", t.q)
    splits = problem.num_splits or default_splits(problem, config, t.q)
    splits = max(1, min(splits, args.cdiv(problem.N, config.block_n)))
    parts = part_lse = None
    if splits > 1:
        rows = problem.B * problem.H * problem.M
        parts = torch.empty((rows, splits, problem.Dv), dtype=torch.float32, device=t.q.device)
        part_lse = torch.empty((rows, splits), dtype=torch.float32, device=t.q.device)
    arrays = (t.q, t.k, t.v, out, lse, parts, part_lse, t.alibi_slopes, t.sink, t.lengths, t.block_table)

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
        return Plan(decode_kernel, programs, len(arrays), named(), config, boxes)

    _run("decode", problem, arrays, build, splits)
    if splits == 1:
        return
    merged = (parts, part_lse, out, lse, t.sink)
    rows = problem.B * problem.H * problem.M
    plain = Config(1, 1, 4, 1)
    _run("combine", problem, merged, lambda: Plan(combine_kernel, rows, len(merged), named(), plain), splits)


def default_splits(problem: Problem, config: Config, q: Any) -> int:
    """The fewest parts that leave no multiprocessor without work for long; every part is at least two tiles."""
    if q.device.type == "cpu":
        return 2
    slots, planes = compat.multiprocessors(q.get_device()), problem.B * problem.Hkv
    most = max(1, min(problem.N // (2 * config.block_n), 128))
    return best_splits(slots, planes, most)


def best_splits(slots: int, planes: int, most: int) -> int:
    """Parts per plane, at most ``most``, so that ``planes * parts`` programs nearly fill whole waves of ``slots``."""

    def busy(parts: int) -> float:
        programs = planes * parts
        return programs / (args.cdiv(programs, slots) * slots)

    choices = range(1, max(2, min(most, args.cdiv(slots, planes) + 6)))
    best = max(busy(parts) for parts in choices)
    return next(parts for parts in choices if busy(parts) >= 0.97 * best)


# ---- backward ----


def _backward(
    problem: Problem, t: Tensors, out: Any, lse: Any, dout: Any, dlse: Any, needs: frozenset[str]
) -> Grads:
    stats, dsink = _stats(problem, t, out, lse, dout, dlse, "sink" in needs)
    dk = dv = dq = dalibi = dbias = None
    if needs & {"k", "v"}:
        dk, dv = _dkdv(problem, t, stats, dout)
    if needs & {"q", "alibi_slopes"}:
        dq, dalibi = _dq(problem, t, stats, dout, "alibi_slopes" in needs)
    if "bias" in needs and problem.has_bias:
        dbias = _dbias(problem, t, stats, dout)
    return Grads(
        dq if "q" in needs else None,
        dk if "k" in needs else None,
        dv if "v" in needs else None,
        dbias,
        dalibi,
        dsink,
    )


def _stats(
    problem: Problem, t: Tensors, out: Any, lse: Any, dout: Any, dlse: Any, need_sink: bool
) -> tuple[Any, Any]:
    """(stats, dsink); stats [2, planes, rows] are the shift of p and delta. Packed rows are one plane per head."""
    need_sink = need_sink and problem.has_sink
    config = Config(32, 1, 4, 1)
    n_rows = problem.tokens[0] if problem.rows == "packed" else problem.M
    slots, planes = args.cdiv(n_rows, config.block_m), args.planes(problem, problem.H)
    stats = torch.empty((2, planes, args.stat_stride(problem)), dtype=torch.float32, device=lse.device)
    if lse.numel() == 0:
        return stats, torch.zeros(problem.H, device=lse.device) if need_sink else None
    parts = torch.empty((planes, slots), dtype=torch.float32, device=lse.device) if need_sink else None
    arrays = (out, dout, lse, dlse, *stats, t.sink if need_sink else None, parts)

    def build() -> Plan:
        named = {
            **args.constants(problem),
            **args.extras(t),
            **args.strides("o", out, "bhmd"),
            **args.strides("do", dout, "bhmd"),
            **args.strides("dlse", dlse, "bhm"),
            **args.lse_strides(problem),
            **args.stat_strides(problem),
            "n_rows": n_rows,
            "H": problem.H,
            "n_slots": slots,
            **args.blocks(problem, config),
            "HAS_DLSE": dlse is not None,
            "HAS_SINK": need_sink,
        }
        return Plan(stats_kernel, slots * planes, len(arrays), named, config)

    _run("stats", problem, arrays, build)
    return stats, None if parts is None else parts.view(-1, problem.H, slots).sum((0, 2))


def _streams(problem: Problem, t: Tensors, lists: Any, dout: Any) -> dict[str, Any]:
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
        **args.list_strides(lists, problem),
    }


def _dkdv(problem: Problem, t: Tensors, stats: Any, dout: Any) -> tuple[Any, Any]:
    dk, dv = torch.empty_like(t.k), torch.empty_like(t.v)
    if dk.numel() == 0 and dv.numel() == 0:
        return dk, dv
    lists = _summary(problem, t, "dkdv") if problem.has_keep or problem.has_bounds else None
    arrays = (
        *(t.q, t.k, t.v, dout, *stats, dk, dv, t.bias, t.keep, t.alibi_slopes, t.bounds, t.rng, lists),
        *(t.cu_q, t.cu_k),
    )

    def build() -> Plan:
        config = _config(problem, "dkdv", t.q)
        slots = args.key_slots(problem, config.block_n)
        named = {
            **_streams(problem, t, lists, dout),
            **args.strides("dk", dk, "bhnd"),
            **args.strides("dv", dv, "bhnd"),
            **args.grid(problem, slots, problem.Hkv, args.BACKWARD_BUDGET),
            **args.blocks(problem, config),
            "WIDE": args.wide(config.block_m, problem, t.q, dout),
        }
        boxes = args.boxes(problem, config, config.block_m, {0: t.q, 3: dout})
        return Plan(dkdv_kernel, slots * args.planes(problem, problem.Hkv), len(arrays), named, config, boxes)

    _run("dkdv", problem, arrays, build, _batches(t.bounds))
    return dk, dv


def _dq(problem: Problem, t: Tensors, stats: Any, dout: Any, need_slopes: bool) -> tuple[Any, Any]:
    need_slopes = need_slopes and problem.has_alibi
    dq = torch.empty_like(t.q)
    if stats.numel() == 0:
        zeros = torch.zeros((problem.B, problem.H), device=t.q.device) if need_slopes else None
        return dq, zeros
    config = _config(problem, "dq", t.q)
    slots, planes = args.query_slots(problem, config.block_m), args.planes(problem, problem.H)
    lists = _summary(problem, t, "dq") if problem.has_keep else None
    parts = torch.empty((slots, planes), dtype=torch.float32, device=stats.device) if need_slopes else None
    arrays = (
        *(t.q, t.k, t.v, dout, *stats, dq, parts),
        *(t.bias, t.keep, t.alibi_slopes, t.bounds, t.rng, lists, t.cu_q, t.cu_k),
    )

    def build() -> Plan:
        named = {
            **_streams(problem, t, lists, dout),
            **args.strides("dq", dq, "bhmd"),
            **args.grid(problem, slots, problem.H, args.BACKWARD_BUDGET),
            **args.blocks(problem, config),
            "NEED_SLOPES": need_slopes,
            "WIDE": args.wide(config.block_n, problem, t.k, t.v),
        }
        boxes = args.boxes(problem, config, config.block_n, {1: t.k, 2: t.v})
        return Plan(dq_kernel, slots * planes, len(arrays), named, config, boxes)

    _run("dq", problem, arrays, build, _batches(t.bounds))
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
    _run("slots", problem, arrays, lambda: Plan(slot_sum_kernel, dalibi.numel(), len(arrays), named, plain))
    return dalibi


def _dbias(problem: Problem, t: Tensors, stats: Any, dout: Any) -> Any:
    shape = problem.bias_shape
    assert shape is not None
    dbias = torch.zeros(shape, dtype=t.bias.dtype, device=t.bias.device)
    if dbias.numel() == 0 or stats.numel() == 0 or problem.N == 0:
        return dbias
    config = _config(problem, "dbias", t.q)
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

    _run("dbias", problem, arrays, build, _batches(t.bounds))
    return dbias
