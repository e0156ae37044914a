"""From a problem and its tensors to the named arguments of each kernel; runs once per structure of call.

Every kernel takes its arrays first, then strides, sizes and numbers, then constants. An axis that a tensor does not
have gets stride 0: the batch axis of packed rows, whatever a bias or mask broadcasts over.
"""

from __future__ import annotations

from typing import Any

from ... import philox
from ...masks import BIG
from ...problem import Problem, Tensors
from . import compat
from .configs import Config, padded

# bytes streamed by tiles that run side by side: on a 50 MB L2, 16 MB were best forward and 8 MB backward at N = 8192
FORWARD_BUDGET = 16 * 2**20
BACKWARD_BUDGET = 8 * 2**20
INT32 = 2**31


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b."""
    return -(-a // b)


def query_slots(problem: Problem, block: int) -> int:
    """Query tiles per head; packed rows reserve one more per sequence than they can need, see ``find_sequence``."""
    if problem.rows == "packed":
        return problem.tokens[0] // block + problem.B + 1
    return cdiv(problem.M, block)


def key_slots(problem: Problem, block: int) -> int:
    """Key tiles per head, likewise."""
    if problem.rows == "packed":
        return problem.tokens[1] // block + problem.B + 1
    return cdiv(problem.N, block)


def planes(problem: Problem, heads: int) -> int:
    """Independent rows of tiles: heads of sequences, or heads alone where slots already run over sequences."""
    return heads if problem.rows == "packed" else problem.B * heads


def banded(problem: Problem) -> bool:
    """Whether the band restricts anything."""
    return problem.left < BIG or problem.right < BIG or problem.top_left


def heavy_last(problem: Problem) -> bool:
    """Whether later query tiles see more keys."""
    return problem.right < BIG or problem.top_left


def folds(problem: Problem) -> bool:
    """Whether scores can stay raw products, with the scale in the exponent: a maximum needs a positive scale."""
    plain = not (problem.softcap or problem.has_alibi or problem.has_bias)
    return plain and problem.scale > 0


def strides(name: str, x: Any, axes: str) -> dict[str, int]:
    """``stride_<name><axis>`` for each axis; a missing leading (batch) axis or tensor has stride 0."""
    if x is None:
        return dict.fromkeys((f"stride_{name}{axis}" for axis in axes), 0)
    given = x.stride()
    given = (0,) * (len(axes) - len(given)) + tuple(given)
    return {f"stride_{name}{axis}": step for axis, step in zip(axes, given, strict=True)}


def pair_strides(name: str, x: Any) -> dict[str, int]:
    """Strides of an expanded bias or mask."""
    return strides(name, x, "bhmn")


def lse_strides(problem: Problem) -> dict[str, int]:
    """Strides of lse, which is contiguous: [B, H, M], packed [H, Tq]."""
    if problem.rows == "packed":
        return {"stride_lseb": 0, "stride_lseh": problem.tokens[0]}
    return {"stride_lseb": problem.H * problem.M, "stride_lseh": problem.M}


def stat_stride(problem: Problem) -> int:
    """Floats from one plane of row statistics to the next: padded, so that every plane is aligned for wide loads."""
    return cdiv(problem.tokens[0] if problem.rows == "packed" else problem.M, 16) * 16


def stats_shape(problem: Problem) -> tuple[int, int, int]:
    """[shift and delta, planes, rows] of the row statistics of backward."""
    return 2, planes(problem, problem.H), stat_stride(problem)


def given_strides(problem: Problem, given: Any) -> dict[str, Any]:
    """Strides of what the caller hands back, and of the statistics made from it."""
    return {
        **strides("o", given.out, "bhmd"),
        **strides("do", given.dout, "bhmd"),
        **strides("dlse", given.dlse, "bhm"),
        **lse_strides(problem),
        **stat_strides(problem),
        "HAS_DLSE": given.dlse is not None,
    }


def stat_strides(problem: Problem) -> dict[str, int]:
    """Strides of the row statistics of backward: one plane per (sequence, head), packed one per head."""
    step = stat_stride(problem)
    return {"stride_statb": 0 if problem.rows == "packed" else problem.H * step, "stride_stath": step}


def list_strides(lists: Any, problem: Problem) -> dict[str, int]:
    """Strides of a tile summary, 0 along what its masks do not depend on."""
    if lists is None:
        return {"stride_listb": 0, "stride_listh": 0, "list_width": 0}
    batch, heads, slots, width = lists.shape
    return {
        "stride_listb": heads * slots * width if batch > 1 else 0,
        "stride_listh": slots * width if heads > 1 else 0,
        "list_width": width,
    }


def extras(tensors: Tensors) -> dict[str, int]:
    """Strides of everything that is not q, k, v."""
    bounds = tensors.bounds
    bound_b = 0
    if bounds is not None and bounds.dim() == 3 and bounds.shape[0] > 1:
        bound_b = bounds.stride(0)
    return {
        **pair_strides("bias", tensors.bias),
        **pair_strides("keep", tensors.keep),
        **strides("slope", tensors.alibi_slopes, "bh"),
        "stride_boundb": bound_b,
        "stride_boundm": 0 if bounds is None else bounds.stride(-2),
        "stride_sink": 0 if tensors.sink is None else tensors.sink.stride(0),
        "stride_table": 0 if tensors.block_table is None else tensors.block_table.stride(0),
    }


def sizes(problem: Problem) -> dict[str, Any]:
    """Lengths (token counts if packed), heads, band and numbers."""
    packed = problem.rows == "packed"
    bits = philox.threshold(problem.dropout_p)
    return {
        "M": problem.tokens[0] if packed else problem.M,
        "N": problem.tokens[1] if packed else problem.N,
        "B": problem.B,
        "H": problem.H,
        "Hkv": problem.Hkv,
        "group": problem.G,
        "left": problem.left,
        "right": problem.right,
        "threshold": bits - 2**32 if bits >= INT32 else bits,
        "scale": float(problem.scale),
        "cap": float(problem.softcap),
        "inverse_keep": 1 / (1 - problem.dropout_p) if problem.dropout_p < 1 else 0.0,
    }


def constants(problem: Problem) -> dict[str, Any]:
    """Compile-time facts of a problem."""
    return {
        "D": problem.D,
        "DV": problem.Dv,
        "ROWS": problem.rows,
        "PAGE": problem.page,
        "GROUP": problem.G,
        "BANDED": banded(problem),
        "TOP_LEFT": problem.top_left,
        "HAS_KEEP": problem.has_keep,
        "HAS_BOUNDS": problem.has_bounds,
        "HAS_BIAS": problem.has_bias,
        "HAS_ALIBI": problem.has_alibi,
        "HAS_SOFTCAP": problem.softcap != 0.0,
        "HAS_SINK": problem.has_sink,
        "HAS_DROPOUT": problem.dropout_p > 0,
        "FOLD": folds(problem),
        "EXACT": True,
        "PRECISION": compat.precision(problem.dtype),
        "HEAVY_LAST": heavy_last(problem),
    }


def wide(block: int, problem: Problem, *streamed: Any) -> bool:
    """Whether an offset inside one tile of a streamed tensor can pass 2^31."""
    width = padded(max(problem.D, problem.Dv))
    return any(x.stride(-2) * block + x.stride(-1) * width >= INT32 for x in streamed)


def together(problem: Problem, heads: int, budget: int) -> int:
    """How many heads' tiles run side by side: as many as keep what they stream within ``budget`` bytes of L2.

    Without a band every tile of a head is as long as the next, and one head at a time keeps L2 best.
    """
    if not banded(problem):
        return 1
    itemsize = 4 if problem.dtype == "float32" else 2
    rows = max(problem.tokens[1] // max(problem.B, 1), 1) if problem.rows == "packed" else max(problem.N, 1)
    per_head = rows * max(problem.D + problem.Dv, 1) * itemsize
    shared = problem.G if heads == problem.H else 1
    return max(1, min(planes(problem, heads), budget // per_head * shared))


def grid(problem: Problem, slots: int, heads: int, budget: int) -> dict[str, int]:
    """Size of a one-dimensional grid over (slot, plane), and how it is walked."""
    return {"n_slots": slots, "n_planes": planes(problem, heads), "swizzle": together(problem, heads, budget)}


def blocks(problem: Problem, config: Config) -> dict[str, int]:
    """Tile sizes."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": padded(problem.D, config.narrowest),
        "BLOCK_DV": padded(problem.Dv, config.narrowest),
    }


def boxes(problem: Problem, config: Config, rows: int, at: dict[int, Any]) -> dict[int, tuple[int, int]]:
    """Tensor descriptor boxes of the streamed arrays ``at`` their indices; none where the hardware cannot take them."""
    if not config.tma or problem.rows == "paged" or not all(_describable(x) for x in at.values()):
        return {}
    return {index: (rows, padded(x.shape[-1], config.narrowest)) for index, x in at.items()}


def _describable(x: Any) -> bool:
    """Unit last stride, every other stride and the base a multiple of 16 bytes, no empty or broadcast axis."""
    step = 16 // x.element_size()
    aligned = x.data_ptr() % 16 == 0 and all(s % step == 0 and s > 0 for s in x.stride()[:-1])
    return x.stride(-1) == 1 and aligned and min(x.shape) > 0
