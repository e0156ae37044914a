"""What runs when: allocate, describe each launch as a ``Step``, hand it to a runner.

The runner is the device (``loader``) or, in tests, an interpreter of the compiled code: both get the same steps and
the same argument bytes. Nothing here waits for the device, apart from the range guard of the opt-in below.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...problem import Grads, Problem, Tensors
from . import arguments as args
from . import configs
from .configs import Config, Pass
from .source import Kernel
from .variants import DTYPES, NARROWED, Step, Variant, common, defines, folds, pairwise

Runner = Callable[[Step], None]
HALF_MAX = 65504.0
UNITS = 60  # compute units that a decode is split for where the device is not known


@dataclass(frozen=True)
class Call:
    """A problem with its stretched tensors, and how it is to be run.

    Attributes:
        run: takes each step in order.
        units: compute units to fill.
        dtype: the DTYPE flag.
    """

    problem: Problem
    t: Tensors
    run: Runner
    units: int
    dtype: int


def narrows(problem: Problem, *tensors: Any) -> bool:
    """Whether bf16 shall be, and can be, narrowed to fp16: asked for, and every value finite and within its range.

    ATTNPROOF_DOT2_BF16=half asks. The guard reads the inputs once and waits for the answer; what it refuses runs in
    fp32 as without the opt-in. Values below 6e-8 become 0, which is the price of the doubled rate.
    """
    if problem.dtype != "bfloat16" or os.environ.get("ATTNPROOF_DOT2_BF16") != "half":
        return False
    return all(x.numel() == 0 or bool(x.abs().amax() <= HALF_MAX) for x in tensors)


def forward(problem: Problem, tensors: Tensors, run: Runner, units: int = UNITS) -> tuple[Any, Any]:
    """See ``backends.Backend``."""
    out = _empty_out(problem, tensors.q)
    lse = torch.empty(problem.out_shape[:-1], dtype=torch.float32, device=tensors.q.device)
    if lse.numel() == 0:
        return out, lse
    if problem.rows == "packed":
        # tokens past the last sequence belong to no tile
        out.zero_()
        lse.fill_(-torch.inf)
    if problem.B == 0 or problem.M == 0:
        return out, lse
    dtype = NARROWED if narrows(problem, *tensors[:3]) else DTYPES[problem.dtype]
    call = Call(problem, tensors.expand(problem), run, units, dtype)
    if decodes(problem):
        _decode(call, out, lse)
    else:
        _forward(call, out, lse)
    return out, lse


def decodes(problem: Problem) -> bool:
    """Whether the rows of a group share a tile and the keys are split: few queries, not packed."""
    return problem.rows != "packed" and problem.M * problem.G <= configs.DECODE_ROWS


def _empty_out(problem: Problem, q: Any) -> Any:
    """Unwritten output of ``problem.out_shape``, stored in the caller's layout."""
    shape = problem.out_shape
    if problem.rows == "packed" or problem.layout == "bmhd":
        swapped = (*shape[:-3], shape[-2], shape[-3], shape[-1])
        return torch.empty(swapped, dtype=q.dtype, device=q.device).transpose(-2, -3)
    return torch.empty(shape, dtype=q.dtype, device=q.device)


def _wide(call: Call, *tensors: Any) -> bool:
    p = call.problem
    return args.wide(p.D, call.t.q, call.t.k) and args.wide(p.Dv, call.t.v, *tensors)


def _config(call: Call, which: Pass, wide: bool) -> Config:
    return configs.choose(call.problem, which, wide=wide, halves=call.dtype in (0, NARROWED))


def _launch(
    call: Call, kernel: Kernel, config: Config, groups: int, wide: bool, facts: dict[str, int],
    numbers: dict[str, Any], arrays: dict[str, Any], entry: str = "",
) -> None:  # fmt: skip
    """Run a kernel on the caller's inputs and these arrays; strides of the arrays are in ``numbers``."""
    if groups == 0:
        return
    flags = defines(**common(call.problem, config, wide=wide, dtype=call.dtype), **facts)
    given = args.inputs(call.problem, call.t)
    inputs = {name: x for name, x in args.tensors(call.t).items() if x is not None}
    everything = {**inputs, **{name: x for name, x in arrays.items() if x is not None}}
    call.run(Step(Variant(kernel, flags, entry), groups, config.threads, {**given, **numbers}, everything))


def _sink(call: Call) -> int:
    """The SINK flag: 0 none, 1 in the dtype of q, 2 in fp32 beside it."""
    if call.t.sink is None:
        return 0
    return 2 if call.t.sink.dtype == torch.float32 and call.dtype != DTYPES["float32"] else 1


def _kinds(call: Call, config: Config) -> tuple[Any, dict[str, int]]:
    """What the boolean mask says about each tile of this size, and the strides of that table."""
    keep = call.t.keep
    if keep is None:
        return None, {}
    p = call.problem
    batch = p.B if keep.stride(0) != 0 else 1
    heads = p.H if keep.stride(1) != 0 else 1
    m_tiles, n_tiles = args.cdiv(p.M, config.block_m), args.cdiv(p.N, config.block_n)
    kinds = torch.empty((batch, heads, m_tiles, n_tiles), dtype=torch.uint8, device=keep.device)
    numbers = {"tiles": m_tiles, "splits": n_tiles, "bias_H": heads}
    plain = replace(configs.ROWS, block_m=config.block_m, block_n=config.block_n)
    _launch(call, "attn_kinds", plain, kinds.numel(), True, {}, numbers, {"parts": kinds})
    size = m_tiles * n_tiles
    return kinds, {
        "kinds_b": heads * size if batch > 1 else 0,
        "kinds_h": size if heads > 1 else 0,
        "kinds_m": n_tiles,
    }


def _forward(call: Call, out: Any, lse: Any) -> None:
    p, wide = call.problem, _wide(call, out)
    config = _config(call, "forward", wide)
    kinds, strides = _kinds(call, config)
    tiles = args.cdiv(p.M, config.block_m)
    facts = {**pairwise(p), "FOLD": int(folds(p)), "SINK": _sink(call)}
    numbers = {**strides, **args.strides("out", out, "bhmd"), "tiles": tiles}
    arrays = {"out": out, "lse": lse, "kinds": kinds}
    _launch(call, "attn_forward", config, p.B * p.H * tiles, wide, facts, numbers, arrays)


def splits_of(problem: Problem, config: Config, units: int) -> int:
    """Parts per plane: the caller's number, or enough for two workgroups per compute unit, in whole tiles."""
    tiles = max(1, args.cdiv(problem.N, config.block_n))
    wanted = problem.num_splits or args.cdiv(2 * units, max(1, problem.B * problem.Hkv))
    return max(1, min(wanted, tiles if problem.num_splits else max(1, tiles // 2)))


def _decode(call: Call, out: Any, lse: Any) -> None:
    p, wide = call.problem, _wide(call, out)
    config = _config(call, "decode", wide)
    splits = splits_of(p, config, call.units)
    tiles = args.cdiv(p.M * p.G, config.block_m)
    facts = {**pairwise(p), "FOLD": int(folds(p)), "GROUPED": 1}
    sink = {"SINK": _sink(call)}
    numbers = {**args.strides("out", out, "bhmd"), "tiles": tiles, "splits": splits}
    groups = p.B * p.Hkv * tiles * splits
    if splits == 1:
        arrays = {"out": out, "lse": lse}
        _launch(call, "attn_forward", config, groups, wide, {**facts, **sink}, numbers, arrays)
        return
    parts = torch.empty((p.B, p.H, p.M, splits, p.Dv + 1), dtype=torch.float32, device=out.device)
    _launch(call, "attn_forward", config, groups, wide, {**facts, "SPLIT": 1}, numbers, {"parts": parts})
    arrays = {"out": out, "lse": lse, "parts": parts}
    rows = args.cdiv(p.B * p.H * p.M, configs.ROWS.threads // configs.LANES)
    _launch(call, "attn_combine", configs.ROWS, rows, False, sink, numbers, arrays)


# ---- backward ----


@dataclass(frozen=True)
class Saved:
    """What the forward pass left, the caller handed back, and the statistics made from both."""

    out: Any
    lse: Any
    dout: Any
    dlse: Any
    delta: Any


def backward(
    problem: Problem, tensors: Tensors, out: Any, lse: Any, dout: Any, dlse: Any, needs: frozenset[str],
    run: Runner, units: int = UNITS,
) -> Grads:  # fmt: skip
    """See ``backends.Backend``."""
    if problem.rows not in ("dense", "packed"):
        raise NotImplementedError("a cache has no gradient")  # api refuses before
    dtype = NARROWED if narrows(problem, *tensors[:3], dout) else DTYPES[problem.dtype]
    call = Call(problem, tensors.expand(problem), run, units, dtype)
    saved = Saved(out, lse, dout, dlse, torch.empty_like(lse))
    alive = lse.numel() > 0 and problem.B > 0
    if alive:
        _stats(call, saved)
    dk = dv = dq = dalibi = None
    if needs & {"k", "v"}:
        dk, dv = _dkdv(call, saved, alive)
    if needs & {"q", "alibi_slopes"}:
        dq, dalibi = _dq(call, saved, alive, slopes="alibi_slopes" in needs and problem.has_alibi)
    return Grads(
        dq if "q" in needs else None,
        dk if "k" in needs else None,
        dv if "v" in needs else None,
        _dbias(call, saved, alive) if "bias" in needs and problem.has_bias else None,
        dalibi,
        _dsink(call, saved, alive) if "sink" in needs and problem.has_sink else None,
    )


def _row_numbers(call: Call, saved: Saved) -> dict[str, Any]:
    """Rows as planes: packed tokens are one plane per head, whatever sequences they belong to."""
    p = call.problem
    planes = {"M": p.tokens[0], "B": 1} if p.rows == "packed" else {}
    return {
        **args.strides("out", saved.out, "bhmd"),
        **args.strides("dout", saved.dout, "bhmd"),
        **args.strides("dlse", saved.dlse, "bhm"),
        **planes,
    }


def _stats(call: Call, saved: Saved) -> None:
    rows = args.cdiv(saved.lse.numel(), configs.ROWS.threads // configs.LANES)
    arrays = {
        "out": saved.out,
        "dout": saved.dout,
        "lse": saved.lse,
        "dlse": saved.dlse,
        "delta": saved.delta,
    }
    facts = {"DLSE": int(saved.dlse is not None)}
    _launch(call, "attn_stats", configs.ROWS, rows, False, facts, _row_numbers(call, saved), arrays)


def _dsink(call: Call, saved: Saved, alive: bool) -> Any:
    p = call.problem
    dsink = torch.zeros(p.H, dtype=torch.float32, device=saved.lse.device)
    if alive:
        arrays = {"lse": saved.lse, "delta": saved.delta, "parts": dsink}
        numbers = _row_numbers(call, saved)
        facts = {"SINK": _sink(call)}
        _launch(call, "attn_stats", configs.ROWS, p.H, False, facts, numbers, arrays, entry="attn_dsink")
    return dsink


def _backward_numbers(call: Call, saved: Saved) -> dict[str, Any]:
    return {**args.strides("dout", saved.dout, "bhmd")}


def _dq(call: Call, saved: Saved, alive: bool, *, slopes: bool) -> tuple[Any, Any]:
    """(dq, dalibi)."""
    p, q = call.problem, call.t.q
    dq = _like(q, zero=p.rows == "packed")
    if not alive or p.M == 0:
        return dq, torch.zeros((p.B, p.H), device=q.device) if slopes else None
    wide = _wide(call, saved.dout) and args.wide(p.D, dq)
    config = _config(call, "dq", wide)
    kinds, strides = _kinds(call, config)
    tiles = args.cdiv(p.M, config.block_m)
    parts = torch.empty((p.B, p.H, tiles), dtype=torch.float32, device=q.device) if slopes else None
    facts = {**pairwise(p), **({"SLOPES": 1} if slopes else {})}
    numbers = {
        **strides,
        **_backward_numbers(call, saved),
        **args.strides("dq", dq, "bhmd"),
        "tiles": tiles,
    }
    arrays = {
        "dout": saved.dout, "lse": saved.lse, "delta": saved.delta, "dq": dq, "parts": parts, "kinds": kinds,
    }  # fmt: skip
    _launch(call, "attn_dq", config, p.B * p.H * tiles, wide, facts, numbers, arrays)
    return dq, None if parts is None else parts.sum(-1)


def _dkdv(call: Call, saved: Saved, alive: bool) -> tuple[Any, Any]:
    p, t = call.problem, call.t
    unseen = not alive or p.M == 0 or p.rows == "packed"
    dk, dv = _like(t.k, zero=unseen), _like(t.v, zero=unseen)
    if not alive or p.M == 0 or p.N == 0:
        return dk, dv
    wide = _wide(call, saved.dout, dv) and args.wide(p.D, dk)
    config = _config(call, "dkdv", wide)
    kinds, strides = _kinds(call, config)
    tiles = args.cdiv(p.N, config.block_n)
    numbers = {
        **strides,
        **_backward_numbers(call, saved),
        **args.strides("dk", dk, "bhnd"),
        **args.strides("dv", dv, "bhnd"),
        "tiles": tiles,
    }
    arrays = {
        "dout": saved.dout, "lse": saved.lse, "delta": saved.delta, "dk": dk, "dv": dv, "kinds": kinds,
    }  # fmt: skip
    _launch(call, "attn_dkdv", config, p.B * p.Hkv * tiles, wide, pairwise(p), numbers, arrays)
    return dk, dv


def _like(x: Any, *, zero: bool) -> Any:
    return torch.zeros_like(x) if zero else torch.empty_like(x)


def _dbias(call: Call, saved: Saved, alive: bool) -> Any:
    p, shape = call.problem, call.problem.bias_shape
    if shape is None:
        raise ValueError("bias: expected a shape to reduce to, got None")
    bias = call.t.bias
    dbias = torch.zeros(shape, dtype=torch.float32, device=bias.device)
    if alive and dbias.numel() and p.M and p.N:
        wide = _wide(call, saved.dout)
        config = _config(call, "dbias", wide)
        batch, heads, rows, columns = shape
        m_tiles = args.cdiv(p.M, config.block_m) if rows > 1 else 1
        n_tiles = args.cdiv(p.N, config.block_n) if columns > 1 else 1
        facts = {**pairwise(p), "SUM_M": int(rows == 1), "SUM_N": int(columns == 1)}
        numbers = {
            **_backward_numbers(call, saved),
            **dict(zip(("bias_B", "bias_H", "bias_M", "bias_N"), shape, strict=True)),
        }
        arrays = {"dout": saved.dout, "lse": saved.lse, "delta": saved.delta, "dbias": dbias}
        groups = batch * heads * m_tiles * n_tiles
        _launch(call, "attn_dbias", config, groups, wide, facts, numbers, arrays)
    return dbias.to(bias.dtype)
