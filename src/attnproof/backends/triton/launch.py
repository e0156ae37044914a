"""What runs when: allocate, look the plan up by the structure of the call, launch.

A known structure costs a dictionary look-up per kernel; a new one is turned into named kernel arguments once
(``arguments``), compiled and kept. Nothing here waits for the device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...problem import Grads, Problem, Tensors
from . import arguments as args
from . import compat, configs
from .configs import Config, Pass
from .kernels.backward import dkdv_kernel, dq_kernel, stats_kernel
from .kernels.decode import combine_kernel, decode_kernel
from .kernels.forward import forward_kernel
from .kernels.gradients import dbias_kernel, slot_sum_kernel
from .kernels.summary import classify_kernel, compact_kernel
from .plan import Plan

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
    if problem.has_keep or problem.has_alibi or problem.bias_shape is not None:
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
        return _backward(problem, tensors, Given(out, lse, dout, dlse), needs)


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
    if problem.Dv == problem.D and (
        q.is_contiguous() if problem.layout == "bhmd" else q.transpose(1, 2).is_contiguous()
    ):
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
        return Plan(
            forward_kernel, slots * args.planes(problem, problem.H), len(arrays), named, config, boxes
        )

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
    others = width - 2
    kinds = torch.empty((batches * heads, slots, others), dtype=torch.int8, device=t.q.device)
    lists = torch.empty((batches, heads, slots, width), dtype=torch.int32, device=t.q.device)
    arrays = (kinds, keep, bounds, t.cu_q, t.cu_k, t.lengths)

    def classify() -> Plan:
        named = {
            **args.constants(problem),
            **args.sizes(problem),
            **args.extras(t),
            **args.blocks(problem, config),
            "H": heads,
            "n_slots": slots,
            "n_planes": batches * heads,
            "n_other": others,
            "BY_KEY": by_key,
        }
        return Plan(classify_kernel, kinds.numel(), len(arrays), named, config)

    def compact() -> Plan:
        named = {"n_other": others, "list_width": width, "BLOCK": 128}
        return Plan(compact_kernel, batches * heads * slots, 2, named, Config(1, 1, 4, 1))

    if kinds.numel() == 0:
        return lists.zero_()
    _run(f"classify {which}", problem, arrays, classify, _batches(bounds))
    _run(f"compact {which}", problem, (lists, kinds), compact, batches * heads)
    return lists


# ---- decode ----


def _decode(problem: Problem, t: Tensors, out: Any, lse: Any) -> None:
    config, splits = _decode_shape(problem, t.q.get_device())
    rows = problem.B * problem.H * problem.M
    parts = None
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
        return Plan(decode_kernel, programs, len(arrays), named(), config, boxes)

    _run("decode", problem, arrays, build)
    if splits > 1:
        merged = (parts, out, lse, t.sink)
        _run("combine", problem, merged, lambda: Plan(combine_kernel, rows, 4, named(), Config(1, 1, 4, 1)))


@functools.lru_cache(maxsize=1024)
def _decode_shape(problem: Problem, device: int) -> tuple[Config, int]:
    """Tile sizes, and into how many parts the keys are split."""
    if device < 0:
        config, slots = configs.INTERPRETER, 2
    else:
        config = configs.choose(problem, "decode", compat.architecture(device))
        slots = compat.multiprocessors(device) * configs.programs_per_multiprocessor(problem)
    tiles = args.cdiv(problem.N, config.block_n)
    splits = problem.num_splits or best_splits(slots, problem.B * problem.Hkv, max(1, min(tiles // 2, 128)))
    return config, max(1, min(splits, tiles))


def best_splits(slots: int, planes: int, most: int) -> int:
    """Parts per plane, at most ``most``, so that ``planes * parts`` programs nearly fill whole waves of ``slots``."""

    def busy(parts: int) -> float:
        programs = planes * parts
        return programs / (args.cdiv(programs, slots) * slots)

    choices = range(1, max(2, min(most, args.cdiv(slots, planes) + 6)))
    best = max(busy(parts) for parts in choices)
    return next(parts for parts in choices if busy(parts) >= 0.97 * best)


# ---- backward ----


class Given(NamedTuple):
    """What the forward pass left and the caller handed back."""

    out: Any
    lse: Any
    dout: Any
    dlse: Any


def _backward(problem: Problem, t: Tensors, given: Given, needs: frozenset[str]) -> Grads:
    """Statistics first, alone or as part of the pass over queries; then the pass over keys."""
    dk = dv = dq = dalibi = dbias = dsink = None
    stats = torch.empty(args.stats_shape(problem), dtype=torch.float32, device=t.q.device)
    wants_queries = bool(needs & {"q", "alibi_slopes"})
    wants_sink = "sink" in needs and problem.has_sink
    alone = wants_sink or not wants_queries
    if alone:
        dsink = _stats(problem, t, given, stats, wants_sink)
    if wants_queries:
        dq, dalibi = _dq(problem, t, given, stats, make_stats=not alone, slopes="alibi_slopes" in needs)
    if needs & {"k", "v"}:
        dk, dv = _dkdv(problem, t, stats, given.dout)
    if "bias" in needs and problem.has_bias:
        dbias = _dbias(problem, t, stats, given.dout)
    return Grads(
        dq if "q" in needs else None,
        dk if "k" in needs else None,
        dv if "v" in needs else None,
        dbias,
        dalibi,
        dsink,
    )


def _stats(problem: Problem, t: Tensors, given: Given, stats: Any, wants_sink: bool) -> Any:
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

    _run("stats", problem, arrays, build)
    return None if parts is None else parts.view(-1, problem.H, slots).sum((0, 2))


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


def _dq(
    problem: Problem, t: Tensors, given: Given, stats: Any, *, make_stats: bool, slopes: bool
) -> tuple[Any, Any]:
    """(dq, dalibi)."""
    slopes = slopes and problem.has_alibi
    dq = torch.empty_like(t.q)
    if stats.numel() == 0:
        return dq, torch.zeros((problem.B, problem.H), device=t.q.device) if slopes else None
    config = _config(problem, "dq", t.q)
    slots, planes = args.query_slots(problem, config.block_m), args.planes(problem, problem.H)
    lists = _summary(problem, t, "dq") if problem.has_keep else None
    parts = torch.empty((slots, planes), dtype=torch.float32, device=stats.device) if slopes else None
    made_from = (given.out, given.lse, given.dlse) if make_stats else (None, None, None)
    arrays = (
        *(t.q, t.k, t.v, given.dout, *stats, dq, parts, *made_from),
        *(t.bias, t.keep, t.alibi_slopes, t.bounds, t.rng, lists, t.cu_q, t.cu_k),
    )

    def build() -> Plan:
        named = {
            **_streams(problem, t, lists, given.dout),
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
