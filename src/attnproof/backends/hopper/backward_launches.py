"""From a problem and its tensors to the launches of the backward, and from a launch to one that costs little the next time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...masks import BIG
from ...problem import Problem, Tensors
from ..triton import arguments as args
from ..triton.backprop import Given
from . import backward_configs as configs
from . import launcher
from .arguments import LOG2E, TYPES, cdiv, descriptor, ragged, slots
from .backward_configs import JointConfig, KeysConfig
from .compat import TensorDescriptor, gl
from .kernels.backward_joint import joint_kernel
from .kernels.backward_keys import dkdv_kernel
from .kernels.backward_keys_split import dkdv_split_kernel
from .kernels.backward_queries import dq_kernel
from .kernels.backward_rows import rows_kernel

# said aloud because the compiler's own default changes in 3.10
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


class Lists(NamedTuple):
    """Lists of tiles on the device, where there are some; see ``listings``."""

    queries: Any = None
    keys: Any = None
    bounds: Any = None


NO_LISTS = Lists()


class Launch(NamedTuple):
    """One kernel with its grid and everything it is given; its parameters are descriptors, tensors, numbers, constants."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]

    def run(self) -> Any:
        """Launch on the current stream of the current device through Triton, and return the compiled kernel."""
        return self.kernel[(self.programs,)](**self.arguments, **OPTIONS)

    def compiled_in(self, parameter: Any) -> bool:
        """Whether Triton turns an argument into a constant."""
        value = self.arguments[parameter.name]
        one = type(value) is int and value == 1 and not parameter.do_not_specialize
        return parameter.is_constexpr or value is None or one

    def adopt(self, compiled: Any) -> Callable[..., None] | None:
        """A function of (stream, addresses of the described tensors and of the others) that launches it again, or None."""
        passed = [self.arguments[at.name] for at in self.kernel.params if not self.compiled_in(at)]
        described = tuple(x for x in passed if isinstance(x, TensorDescriptor))
        pointers = sum(isinstance(x, torch.Tensor) for x in passed)
        numbers = tuple(x for x in passed if isinstance(x, (int, float)))
        if not all(isinstance(x, float) or -(2**31) <= x < 2**31 for x in numbers):
            return None  # the launcher knows 32-bit numbers
        return launcher.adopt(compiled, self.programs, described, pointers, numbers)


def empty_statistics(problem: Problem, device: Any) -> Any:
    """[2, B * H, rows], rows padded to whole tiles of every kernel; packed [2, H, rows] by tiles."""
    rows = query_slots(problem) * configs.QUERIES
    return torch.empty((2, _planes(problem, problem.H), rows), dtype=torch.float32, device=device)


def query_slots(problem: Problem) -> int:
    """Tiles of queries per plane; packed one more than there can be, for what has no row."""
    return slots(problem, configs.QUERIES) + (problem.rows == "packed")


def key_slots(problem: Problem) -> int:
    """Tiles of keys per plane, or a bound of it."""
    keys = configs.keys_config(problem).keys
    return problem.tokens[1] // keys + problem.B + 1 if problem.rows == "packed" else cdiv(problem.N, keys)


def _planes(problem: Problem, heads: int) -> int:
    return heads if problem.rows == "packed" else problem.B * heads


def statistics(problem: Problem, given: Given, stats: Any) -> Launch:
    """The launch that fills shift and delta."""
    n_slots = stats.shape[2] // configs.ROWS
    arguments = {
        **{"out": given.out, "dout": given.dout, "lse": given.lse, "dlse": given.dlse},
        **{"shift": stats[0], "delta": stats[1], "stride_stat": stats.stride(1)},
        **args.strides("o", given.out, "bhmd"),
        **args.strides("do", given.dout, "bhmd"),
        **args.strides("dlse", given.dlse, "bhm"),
        **{"n_rows": problem.M, "H": problem.H, "n_slots": n_slots},
        **{"DV": problem.Dv, "BLOCK_DV": configs.padded(problem), "BLOCK_M": configs.ROWS},
        "HAS_DLSE": given.dlse is not None,
    }
    return Launch(rows_kernel, n_slots * stats.shape[1], arguments)


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
    packed = problem.rows == "packed"
    tokens = problem.tokens if packed else (problem.M, problem.N)
    return {
        **{"shift": stats[0], "delta": stats[1], "stride_stat": stats.stride(1)},
        "slopes": t.alibi_slopes,
        **args.strides("slope", t.alibi_slopes, "bh"),
        **{"M": tokens[0], "N": tokens[1], "H": problem.H, "Hkv": problem.Hkv},
        **{"left": problem.left, "right": problem.right if packed else right_of(problem)},
        **factors(problem),
        **{"HAS_LEFT": problem.left < BIG, "HAS_RIGHT": problem.right < BIG or problem.top_left},
        "HAS_SOFTCAP": problem.softcap != 0.0,
        "HAS_ALIBI": problem.has_alibi,
        "WIDTH": configs.padded(problem),
        **{"CONSUMER_REGISTERS": registers[0], "PRODUCER_REGISTERS": registers[1]},
    }


def _grid(problem: Problem, n_slots: int, planes: int) -> dict[str, int]:
    return {"n_slots": n_slots, "n_planes": planes, "together": configs.together(problem, planes)}


def _listed(problem: Problem, tiles: Any, bounds: Any) -> dict[str, Any]:
    packed = problem.rows == "packed"
    return {
        **{"tiles": tiles, "bounds": bounds, "LISTED": tiles is not None, "PACKED": packed},
        **{"TOP_LEFT": packed and problem.top_left, "HAS_BOUNDS": bounds is not None},
    }


def _describe(problem: Problem, x: Any, rows: int, width: int) -> Any:
    return (ragged if problem.rows == "packed" else descriptor)(x, rows, width)


def _keys_arguments(
    problem: Problem,
    t: Tensors,
    stats: Any,
    dout: Any,
    dk: Any,
    dv: Any,
    config: KeysConfig | JointConfig,
    n_slots: int,
) -> dict[str, Any]:
    """What kernels that own a tile of keys take."""
    width = configs.padded(problem)
    return {
        **_shared(problem, t, stats, config.registers),
        **_grid(problem, n_slots, _planes(problem, problem.Hkv)),
        **{
            "q_desc": _describe(problem, t.q, config.block_m, width),
            "do_desc": _describe(problem, dout, config.block_m, width),
        },
        **{"k_desc": _describe(problem, t.k, 64, width), "v_desc": _describe(problem, t.v, 64, width)},
        **{"dk_desc": _describe(problem, dk, 64, width), "dv_desc": _describe(problem, dv, 64, width)},
        **{"BLOCK_M": config.block_m, "STAGES": config.stages, "GROUPED": problem.G > 1},
    }


def keys(
    problem: Problem, t: Tensors, stats: Any, dout: Any, dk: Any, dv: Any, lists: Lists = NO_LISTS
) -> Launch:
    """The launch that fills dk and dv."""
    config = configs.keys_config(problem)
    n_slots = key_slots(problem)
    arguments = {
        **_keys_arguments(problem, t, stats, dout, dk, dv, config, n_slots),
        **_listed(problem, lists.keys, lists.bounds),
    }
    programs = n_slots * _planes(problem, problem.Hkv)
    if config.slots == 0:
        return Launch(dkdv_kernel, programs, arguments)
    layout = gl.NVMMASharedLayout.get_default_for([64, config.block_m], gl.float32)
    return Launch(dkdv_split_kernel, programs, {**arguments, "SLOTS": config.slots, "P_LAYOUT": layout})


def joint(problem: Problem, t: Tensors, stats: Any, dout: Any, dk: Any, dv: Any, total: Any) -> Launch:
    """The launch that fills dk and dv, and adds dq / scale to ``total``, fp32 and zeros before."""
    config, width = configs.joint_config(problem), configs.padded(problem)
    if config is None:
        raise ValueError(f"problem: expected a head dim with a joint pass, got {width}")
    n_slots = cdiv(problem.N, configs.JOINT_KEYS)
    rows, columns = (64, width) if config.split_rows else (config.block_m, width // 2)
    arguments = {
        **_keys_arguments(problem, t, stats, dout, dk, dv, config, n_slots),
        "dq_desc": descriptor(total, rows, columns),
        **{"SLOTS": config.slots, "SPLIT_ROWS": config.split_rows},
        "DS_LAYOUT": gl.NVMMASharedLayout.get_default_for([64, config.block_m], TYPES[t.q.dtype]),
    }
    return Launch(joint_kernel, n_slots * problem.B * problem.Hkv, arguments)


def queries(
    problem: Problem,
    t: Tensors,
    stats: Any,
    given: Given,
    dq: Any,
    lists: Lists = NO_LISTS,
    *,
    make_stats: bool = True,
) -> Launch:
    """The launch that fills dq, and with ``make_stats`` shift and delta."""
    out, lse, dlse = (given.out, given.lse, given.dlse) if make_stats else (None, None, None)
    out_steps = args.strides("o", out, "bhmd")
    out_steps.pop("stride_od")
    config, width = configs.queries_config(problem), configs.padded(problem)
    n_slots, planes = query_slots(problem), _planes(problem, problem.H)
    arguments = {
        **_shared(problem, t, stats, config.registers),
        **_grid(problem, n_slots, planes),
        **_listed(problem, lists.queries, lists.bounds),
        **{
            "q_desc": _describe(problem, t.q, 64, width),
            "do_desc": _describe(problem, given.dout, 64, width),
        },
        **{
            "k_desc": _describe(problem, t.k, config.block_n, width),
            "v_desc": _describe(problem, t.v, config.block_n, width),
        },
        "dq_desc": _describe(problem, dq, 64, width),
        **{"BLOCK_N": config.block_n, "K_STAGES": config.k_stages, "V_STAGES": config.v_stages},
        "PIPELINED": config.pipelined,
        **{"out": out, "lse": lse, "dlse": dlse, **out_steps, **args.strides("dlse", dlse, "bhm")},
        **{"DV": problem.Dv, "MAKE_STATS": make_stats, "HAS_DLSE": dlse is not None},
        "HEAVY_LAST": args.heavy_last(problem),
        "TAIL": problem.rows == "packed" or problem.N % config.block_n != 0,
    }
    return Launch(dq_kernel, n_slots * planes, arguments)
