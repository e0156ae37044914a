"""How the backward is cut, by head dim and by whether a band cuts rows unevenly.

Measured on an H200 with Triton 3.6 and a prototype of these kernels: bfloat16, B * N = 16384, H * D = 2048, the products
really done in TFLOP/s at N = 8192. results/h200/attention.json times these kernels, not their rows against others.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...masks import BIG
from ...problem import Problem

WIDTHS = (64, 128, 256)
QUERIES = 128  # per program of the dq kernel: two warpgroups of 64
JOINT_KEYS = 128  # per program of the joint kernel
ROWS = 32  # per program of the statistics
L2_BUDGET = 40 * 2**20  # bytes that tiles running side by side stream; an H200 has 50 MB of L2


@dataclass(frozen=True)
class KeysConfig:
    """One row for dk and dv.

    Attributes:
        keys: per program, 64 for every warpgroup that holds both gradients; 64 where each warpgroup holds one.
        block_m: queries per block.
        stages: blocks of q, and of dout, in flight.
        slots: blocks of P on the way from one warpgroup to the other; 0 where none travel.
        registers: per thread of a consumer and of the producer.
        why: what was seen when it was chosen.
    """

    keys: int
    block_m: int
    stages: int
    slots: int = 0
    registers: tuple[int, int] = (240, 24)
    why: str = ""


@dataclass(frozen=True)
class QueriesConfig:
    """One row for dq.

    Attributes:
        block_n: keys per block.
        k_stages, v_stages: blocks of k and of v in flight.
        pipelined: S of the next block is started before the block's last product has ended.
        registers: per thread of a consumer and of the producer.
        why: what was seen when it was chosen.
    """

    block_n: int
    k_stages: int
    v_stages: int
    pipelined: bool
    registers: tuple[int, int] = (240, 24)
    why: str = ""


@dataclass(frozen=True)
class JointConfig:
    """One row for all three gradients in one pass.

    Attributes:
        block_m: queries per block.
        stages: blocks of q, and of dout, in flight.
        slots: blocks of dS in shared memory.
        split_rows: each warpgroup makes half of the rows of dq; else half of its columns.
        least: queries and keys from which it is faster than the two kernels that need no order.
        registers: per thread of a consumer and of the producer.
        why: what was seen when it was chosen.
    """

    block_m: int
    stages: int
    slots: int
    split_rows: bool
    least: int = 0
    registers: tuple[int, int] = (240, 24)
    why: str = ""


_KEYS = {
    64: KeysConfig(128, 64, 3, why="as at 128"),
    128: KeysConfig(128, 64, 3, why="705 full; 618 where S of the next block was not started early"),
    256: KeysConfig(64, 64, 2, slots=2, why="643-661 full; P in bfloat16 gave 1% and cost dk accuracy"),
}
_QUERIES = {
    64: QueriesConfig(128, 2, 2, pipelined=True, why="not compared with the plain loop"),
    128: QueriesConfig(128, 2, 2, pipelined=False, why="713-747; pipelined lost 0-3% full, 6-9% causal"),
    256: QueriesConfig(64, 2, 1, pipelined=True, why="735 full, 683 causal; 565 and 561 with the plain loop"),
}


_JOINT = {
    64: JointConfig(128, 2, 2, split_rows=True, why="blocks of 64 queries lost 5-12%"),
    128: JointConfig(64, 2, 2, split_rows=False, least=8192, why="no gain over two kernels at shorter ones"),
}


def padded(problem: Problem) -> int:
    """The head dim that tiles are filled up to: D and Dv share it."""
    return next(width for width in WIDTHS if width >= max(problem.D, problem.Dv))


def keys_config(problem: Problem) -> KeysConfig:
    """The configuration of dk and dv."""
    return _KEYS[padded(problem)]


def queries_config(problem: Problem) -> QueriesConfig:
    """The configuration of dq."""
    return _QUERIES[padded(problem)]


def joint_config(problem: Problem) -> JointConfig | None:
    """The configuration of the pass that makes all three gradients, where there is one."""
    return _JOINT.get(padded(problem))


def joint_gains(problem: Problem) -> bool:
    """Whether that pass is there and is the faster way at this length."""
    found = joint_config(problem)
    return found is not None and min(problem.M, problem.N) >= found.least


def banded(problem: Problem) -> bool:
    """Whether the band restricts anything."""
    return problem.left < BIG or problem.right < BIG or problem.top_left


def together(problem: Problem, planes: int) -> int:
    """How many planes' tiles run side by side: under a band as many as stay in L2, else one."""
    if not banded(problem):
        return 1
    per_plane = max(problem.M, problem.N) * (problem.D + problem.Dv) * 4
    return max(1, min(planes, L2_BUDGET // max(per_plane, 1)))
