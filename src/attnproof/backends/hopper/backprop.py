"""The backward pass: row statistics, then dk and dv, then dq; no atomics, so that equal inputs give equal bits.

Gradients of the sink and of ALiBi slopes come from the ``triton`` backend's kernels. Calls whose tensors TMA cannot
describe, or that ask for what these kernels do not make, run there as a whole; ``declines`` says why.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import torch

from ...masks import BIG
from ...problem import Grads, Problem, Tensors
from ..triton import arguments as args
from ..triton import backprop as portable
from ..triton import launch as portable_launch
from ..triton import registry
from . import backward_configs as configs
from .arguments import LOG2E, cdiv, descriptor, undescribable
from .compat import gl
from .kernels.backward_keys import dkdv_kernel
from .kernels.backward_keys_split import dkdv_split_kernel
from .kernels.backward_queries import dq_kernel
from .kernels.backward_rows import rows_kernel

logger = logging.getLogger(__name__)


# said aloud because the compiler's own default changes in 3.10
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


class Launch(NamedTuple):
    """One kernel with its grid and everything it is given."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]

    def run(self) -> None:
        """Launch on the current stream of the current device."""
        self.kernel[(self.programs,)](**self.arguments, **OPTIONS)


def backward(
    problem: Problem, tensors: Tensors, out: Any, lse: Any, dout: Any, dlse: Any, needs: frozenset[str]
) -> Grads:
    """See ``backends.Backend``."""
    reason = declines(problem, tensors, dout)
    if reason is not None:
        say(f"hopper: {reason}; triton serves such gradients")
        return portable_launch.backward(problem, tensors, out, lse, dout, dlse, needs)
    tensors = tensors.expand(problem)
    with registry.device_of(tensors.q):
        return _run(problem, tensors, portable.Given(out, lse, dout, dlse), needs)


@functools.cache
def say(sentence: str) -> None:
    """Log a sentence, once."""
    logger.warning(sentence)


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
    q, k, v = tensors[:3]
    if min(*q.shape, *v.shape) == 0:
        return "has nothing to compute where an axis is empty"
    # the gradient of an input is stored like it, but densely
    like = {f"d{name}": torch.empty_like(x, device="meta") for name, x in zip("qkv", (q, k, v), strict=True)}
    return undescribable(q=q, k=k, v=v, dout=dout, **like)


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
    """Shift and delta of every row."""
    stats = empty_statistics(problem, given.lse.device)
    statistics_launch(problem, given, stats).run()
    return stats


def empty_statistics(problem: Problem, device: Any) -> Any:
    """[2, B * H, rows], rows padded to whole tiles of every kernel."""
    rows = cdiv(problem.M, configs.QUERIES) * configs.QUERIES
    return torch.empty((2, problem.B * problem.H, rows), dtype=torch.float32, device=device)


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


def right_of(problem: Problem) -> int:
    """Right side of the band around i + N - M; ``j <= i`` is one more bound on it."""
    return min(problem.right, problem.M - problem.N) if problem.top_left else problem.right


def factors(problem: Problem) -> dict[str, float]:
    """Of the gradients of q and k, and what ``Scoring`` multiplies by."""
    scale, cap = float(problem.scale), float(problem.softcap)
    unit = LOG2E
    if not problem.has_alibi:
        unit *= cap or scale
    return {"grad_scale": scale, "scale": scale / cap if cap else scale, "cap": cap, "unit": unit}


def _shared(problem: Problem, t: Tensors, stats: Any, registers: tuple[int, int]) -> dict[str, Any]:
    """Arguments that both kernels take."""
    return {
        **{"shift": stats[0], "delta": stats[1], "stride_stat": stats.stride(1)},
        "slopes": t.alibi_slopes,
        **args.strides("slope", t.alibi_slopes, "bh"),
        **{"M": problem.M, "N": problem.N, "H": problem.H, "Hkv": problem.Hkv},
        **{"left": problem.left, "right": right_of(problem)},
        **factors(problem),
        **{"HAS_LEFT": problem.left < BIG, "HAS_RIGHT": right_of(problem) < BIG},
        "HAS_SOFTCAP": problem.softcap != 0.0,
        "HAS_ALIBI": problem.has_alibi,
        "WIDTH": configs.padded(problem),
        **{"CONSUMER_REGISTERS": registers[0], "PRODUCER_REGISTERS": registers[1]},
    }


def _grid(problem: Problem, slots: int, planes: int) -> dict[str, int]:
    return {"n_slots": slots, "n_planes": planes, "together": configs.together(problem, planes)}


def keys(problem: Problem, t: Tensors, stats: Any, dout: Any, dk: Any, dv: Any) -> Launch:
    """The launch that fills dk and dv."""
    config, width = configs.keys_config(problem), configs.padded(problem)
    slots, planes = cdiv(problem.N, config.keys), problem.B * problem.Hkv
    arguments = {
        **_shared(problem, t, stats, config.registers),
        **_grid(problem, slots, planes),
        **{
            "q_desc": descriptor(t.q, config.block_m, width),
            "do_desc": descriptor(dout, config.block_m, width),
        },
        **{"k_desc": descriptor(t.k, 64, width), "v_desc": descriptor(t.v, 64, width)},
        **{"dk_desc": descriptor(dk, 64, width), "dv_desc": descriptor(dv, 64, width)},
        **{"BLOCK_M": config.block_m, "STAGES": config.stages, "GROUPED": problem.G > 1},
    }
    if config.slots == 0:
        return Launch(dkdv_kernel, slots * planes, arguments)
    layout = gl.NVMMASharedLayout.get_default_for([64, config.block_m], gl.float32)
    return Launch(dkdv_split_kernel, slots * planes, {**arguments, "SLOTS": config.slots, "P_LAYOUT": layout})


def queries(problem: Problem, t: Tensors, stats: Any, dout: Any, dq: Any) -> Launch:
    """The launch that fills dq."""
    config, width = configs.queries_config(problem), configs.padded(problem)
    slots, planes = cdiv(problem.M, configs.QUERIES), problem.B * problem.H
    arguments = {
        **_shared(problem, t, stats, config.registers),
        **_grid(problem, slots, planes),
        **{"q_desc": descriptor(t.q, 64, width), "do_desc": descriptor(dout, 64, width)},
        **{
            "k_desc": descriptor(t.k, config.block_n, width),
            "v_desc": descriptor(t.v, config.block_n, width),
        },
        "dq_desc": descriptor(dq, 64, width),
        **{"BLOCK_N": config.block_n, "K_STAGES": config.k_stages, "V_STAGES": config.v_stages},
        "PIPELINED": config.pipelined,
        "HEAVY_LAST": args.heavy_last(problem),
        "TAIL": problem.N % config.block_n != 0,
    }
    return Launch(dq_kernel, slots * planes, arguments)
