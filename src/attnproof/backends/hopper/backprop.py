"""The backward pass: row statistics, then dk and dv, then dq; no atomics, so that equal inputs give equal bits.

Gradients of the sink and of ALiBi slopes come from the ``triton`` backend's kernels. Calls whose tensors TMA cannot
describe, or that ask for what these kernels do not make, run there as a whole; ``declines`` says why.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...problem import Grads, Problem, Tensors
from ..triton import arguments as args
from ..triton import backprop as portable
from ..triton import launch as portable_launch
from ..triton import registry
from . import backward_configs as configs
from .kernels.backward_keys import dkdv_kernel
from .kernels.backward_keys_split import dkdv_split_kernel
from .kernels.backward_queries import dq_kernel
from .kernels.backward_rows import rows_kernel

DTYPES: dict[Any, Any] = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


class Launch(NamedTuple):
    """One kernel with its grid and everything it is given."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]

    def run(self) -> None:
        """Launch on the current stream of the current device; said aloud because Triton's default changes in 3.10."""
        self.kernel[(self.programs,)](**self.arguments, num_warps=4, enable_fp_fusion=True)


def backward(
    problem: Problem, tensors: Tensors, out: Any, lse: Any, dout: Any, dlse: Any, needs: frozenset[str]
) -> Grads:
    """See ``backends.Backend``."""
    if declines(problem, tensors, dout) is not None:
        return portable_launch.backward(problem, tensors, out, lse, dout, dlse, needs)
    tensors = tensors.expand(problem)
    with registry.device_of(tensors.q):
        return _run(problem, tensors, portable.Given(out, lse, dout, dlse), needs)


def declines(problem: Problem, tensors: Tensors, dout: Any) -> str | None:
    """Why the ``triton`` backend runs a backward, or None."""
    if problem.dtype not in ("float16", "bfloat16"):
        return f"needs float16 or bfloat16, got {problem.dtype}"
    if problem.rows != "dense":
        return f"needs dense rows, got {problem.rows}"
    for option in ("has_bias", "has_keep", "has_bounds", "dropout_p"):
        if getattr(problem, option):
            return f"has no {option.removeprefix('has_').removesuffix('_p')}"
    if max(problem.D, problem.Dv) > configs.WIDTHS[-1]:
        return f"holds head dims up to {configs.WIDTHS[-1]}"
    for name, x in (*zip("qkv", tensors[:3], strict=True), ("dout", dout)):
        if not describable(x):
            return f"{name}: TMA cannot describe strides {tuple(x.stride())}"
        # the gradient of an input is stored like it, but densely
        if name != "dout" and not describable(torch.empty_like(x, device="meta")):
            return f"d{name}: TMA cannot describe a dense tensor of shape {tuple(x.shape)}"
    return None


def describable(x: Any) -> bool:
    """Unit last stride, every other stride and the base a multiple of 16 bytes, no empty or broadcast axis."""
    step = 16 // x.element_size()
    aligned = x.device.type == "meta" or x.data_ptr() % 16 == 0
    return (
        min(x.shape) > 0
        and x.stride(-1) == 1
        and aligned
        and all(at % step == 0 and at > 0 for at in x.stride()[:-1])
    )


def describe(x: Any, rows: int, width: int) -> Any:
    """A descriptor of [B, heads, rows, columns] in boxes of ``rows`` x ``width``."""
    box = [1, 1, rows, width]
    layout = gl.NVMMASharedLayout.get_default_for(box, DTYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout)


def _run(problem: Problem, t: Tensors, given: portable.Given, needs: frozenset[str]) -> Grads:
    dq = dk = dv = dalibi = dsink = None
    stats = statistics(problem, given) if needs & {"q", "k", "v"} else None
    if "alibi_slopes" in needs and problem.has_alibi:
        scratch = _portable_stats(problem, t)
        dq, dalibi = portable.queries_pass(problem, t, given, scratch, make_stats=True, slopes=True)
    elif "q" in needs:
        dq = torch.empty_like(t.q)
        queries(problem, t, stats, given.dout, dq).run()
    if needs & {"k", "v"}:
        dk, dv = torch.empty_like(t.k), torch.empty_like(t.v)
        keys(problem, t, stats, given.dout, dk, dv).run()
    if "sink" in needs and problem.has_sink:
        dsink = portable.stats_alone(problem, t, given, _portable_stats(problem, t), True)
    asked = {"q": dq, "k": dk, "v": dv}
    dq, dk, dv = (x if name in needs else None for name, x in asked.items())
    return Grads(dq, dk, dv, None, dalibi, dsink)


def _portable_stats(problem: Problem, t: Tensors) -> Any:
    return torch.empty(args.stats_shape(problem), dtype=torch.float32, device=t.q.device)


def statistics(problem: Problem, given: portable.Given) -> Any:
    """[2, B * H, rows] shift and delta, rows padded to whole tiles of every kernel."""
    planes = problem.B * problem.H
    rows = args.cdiv(problem.M, configs.QUERIES) * configs.QUERIES
    stats = torch.empty((2, planes, rows), dtype=torch.float32, device=given.lse.device)
    statistics_launch(problem, given, stats).run()
    return stats


def statistics_launch(problem: Problem, given: portable.Given, stats: Any) -> Launch:
    """The launch of ``rows_kernel``."""
    slots = stats.shape[2] // configs.ROWS
    arguments = {
        **{"out": given.out, "dout": given.dout, "lse": given.lse, "dlse": given.dlse},
        **{"shift": stats[0], "delta": stats[1], "stride_stat": stats.stride(1)},
        **args.strides("o", given.out, "bhmd"),
        **args.strides("do", given.dout, "bhmd"),
        **args.strides("dlse", given.dlse, "bhm"),
        **{"n_rows": problem.M, "H": problem.H, "n_slots": slots},
        **{"DV": problem.Dv, "BLOCK_DV": configs.padded(problem), "BLOCK_M": configs.ROWS},
        "HAS_DLSE": given.dlse is not None,
    }
    return Launch(rows_kernel, slots * stats.shape[1], arguments)


def _shared(problem: Problem, t: Tensors, stats: Any, registers: tuple[int, int]) -> dict[str, Any]:
    """Arguments that both kernels take."""
    return {
        **{"shift": stats[0], "delta": stats[1], "stride_stat": stats.stride(1)},
        "slopes": t.alibi_slopes,
        **args.strides("slope", t.alibi_slopes, "bh"),
        **{"M": problem.M, "N": problem.N, "H": problem.H, "Hkv": problem.Hkv},
        **{"left": problem.left, "right": problem.right, "TOP_LEFT": problem.top_left},
        **{"scale": float(problem.scale), "cap": float(problem.softcap)},
        "BANDED": configs.banded(problem),
        "FOLD": args.folds(problem),
        "HAS_SOFTCAP": problem.softcap != 0.0,
        "HAS_ALIBI": problem.has_alibi,
        "WIDTH": configs.padded(problem),
        **{"CONSUMER_REGISTERS": registers[0], "PRODUCER_REGISTERS": registers[1]},
    }


def _grid(problem: Problem, slots: int, planes: int) -> dict[str, int]:
    return {"n_slots": slots, "n_planes": planes, "swizzle": configs.together(problem, planes)}


def keys(problem: Problem, t: Tensors, stats: Any, dout: Any, dk: Any, dv: Any) -> Launch:
    """The launch that fills dk and dv."""
    config, width = configs.keys_config(problem), configs.padded(problem)
    slots, planes = args.cdiv(problem.N, config.keys), problem.B * problem.Hkv
    arguments = {
        **_shared(problem, t, stats, config.registers),
        **_grid(problem, slots, planes),
        **{"q_desc": describe(t.q, config.block_m, width), "do_desc": describe(dout, config.block_m, width)},
        **{"k_desc": describe(t.k, 64, width), "v_desc": describe(t.v, 64, width)},
        **{"dk_desc": describe(dk, 64, width), "dv_desc": describe(dv, 64, width)},
        **{"BLOCK_M": config.block_m, "STAGES": config.stages, "GROUPED": problem.G > 1},
    }
    if config.slots == 0:
        return Launch(dkdv_kernel, slots * planes, arguments)
    layout = gl.NVMMASharedLayout.get_default_for([64, config.block_m], gl.float32)
    return Launch(dkdv_split_kernel, slots * planes, {**arguments, "SLOTS": config.slots, "P_LAYOUT": layout})


def queries(problem: Problem, t: Tensors, stats: Any, dout: Any, dq: Any) -> Launch:
    """The launch that fills dq."""
    config, width = configs.queries_config(problem), configs.padded(problem)
    slots, planes = args.cdiv(problem.M, configs.QUERIES), problem.B * problem.H
    arguments = {
        **_shared(problem, t, stats, config.registers),
        **_grid(problem, slots, planes),
        **{"q_desc": describe(t.q, 64, width), "do_desc": describe(dout, 64, width)},
        **{"k_desc": describe(t.k, config.block_n, width), "v_desc": describe(t.v, config.block_n, width)},
        "dq_desc": describe(dq, 64, width),
        **{"BLOCK_N": config.block_n, "K_STAGES": config.k_stages, "V_STAGES": config.v_stages},
        "PIPELINED": config.pipelined,
        "HEAVY_LAST": args.heavy_last(problem),
        "TAIL": problem.N % config.block_n != 0,
    }
    return Launch(dq_kernel, slots * planes, arguments)
