"""Tile sizes per pass, dtype and head dim: the first of a list whose LDS fits, none of them measured on the hardware.

They follow the model in docs/07_mi50.md: at least four rows by two columns of scores per thread, or LDS is the limit, and
two workgroups per compute unit where registers and LDS allow it. ``results/compile/gfx.json`` holds what the compiler
made of each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ...problem import Problem

Pass = Literal["forward", "decode", "dq", "dkdv", "dbias", "kinds", "rows"]
LANES = 16  # threads along the columns of a score tile
LDS_LIMIT = 65536
MAX_HEAD_DIM = 512
MAX_HEAD_DIM_SINGLE = 256
DECODE_ROWS = 16  # (query, head of the group) pairs that make a call a decode


@dataclass(frozen=True)
class Config:
    """How one kernel is cut.

    Attributes:
        block_m: queries per tile; decode: pairs of query and head.
        block_n: keys per tile.
        threads: of one workgroup.
        waves: waves per SIMD that the register budget allows; 2 is 128 registers on gfx906.
    """

    block_m: int
    block_n: int
    threads: int = 256
    waves: int = 1


ROWS = Config(LANES, LANES)  # kernels that walk rows, not tiles
KINDS_THREADS = 256

_FORWARD = {
    64: (Config(64, 64, waves=2), Config(32, 64)),
    128: (Config(64, 32, waves=2), Config(32, 32)),
    256: (Config(64, 32), Config(32, 32), Config(16, 32)),
    512: (Config(32, 16), Config(16, 16)),
}
_DECODE = {
    64: (Config(16, 64, waves=2),),
    128: (Config(16, 64, waves=2), Config(16, 32)),
    256: (Config(16, 64), Config(16, 32)),
    512: (Config(16, 32), Config(16, 16)),
}
_DQ = {
    64: (Config(64, 32, waves=2), Config(32, 32)),
    128: (Config(64, 32), Config(32, 32)),
    256: (Config(32, 32), Config(16, 16)),
    512: (Config(16, 16),),
}
_DKDV = {
    64: (Config(32, 64), Config(32, 32)),
    128: (Config(32, 64), Config(32, 32)),
    256: (Config(32, 32), Config(16, 16)),
    512: (Config(16, 16),),
}
_DBIAS = {width: (Config(16, 16),) for width in (64, 128, 256, 512)}
_TABLES: dict[Pass, dict[int, tuple[Config, ...]]] = {
    "forward": _FORWARD,
    "decode": _DECODE,
    "dq": _DQ,
    "dkdv": _DKDV,
    "dbias": _DBIAS,
}


def padded(width: int) -> int:
    """A head dim as LDS holds it: a multiple of 16."""
    return max(16, -(-width // 16) * 16)


def bucket(problem: Problem) -> int:
    """64, 128, 256 or 512: the smallest that holds both head dims."""
    return next(width for width in (64, 128, 256, 512) if width >= max(problem.D, problem.Dv))


def crowded(problem: Problem) -> bool:
    """Whether the addresses of packed rows and of several options together take more than 128 registers."""
    options = (problem.has_keep, problem.has_bias, problem.has_bounds, problem.has_alibi, problem.softcap > 0)
    return problem.rows == "packed" and sum((*options, problem.dropout_p > 0)) > 1


def choose(problem: Problem, which: Pass, *, wide: bool = True, halves: bool = True) -> Config:
    """The configuration of one pass.

    Args:
        problem: the call.
        which: the pass.
        wide: rows are loaded 16 bytes at a time.
        halves: products are of fp16 (fp16 itself, or bf16 narrowed to it).
    """
    if which in ("rows", "kinds"):
        return ROWS
    fits = [c for c in _TABLES[which][bucket(problem)] if lds_bytes(problem, which, c) <= LDS_LIMIT]
    if not fits:
        raise ValueError(f"{which}: expected a tile within {LDS_LIMIT} bytes of LDS, got none for {problem}")
    # loads of single elements, and products by FMA, take more registers than two waves per SIMD leave
    return fits[0] if wide and halves and not crowded(problem) else replace(fits[0], waves=1)


def lds_bytes(problem: Problem, which: Pass, config: Config) -> int:
    """LDS of one workgroup, in closed form; a test holds it against the compiled kernels."""
    element = 4 if problem.dtype == "float32" else 2
    pair = 4 // element
    weight = 2 if problem.dtype == "float16" else 4
    d, dv, m, n = padded(problem.D), padded(problem.Dv), config.block_m, config.block_n

    def rows(count: int, width: int) -> int:
        return count * (width * element + 16)

    def pairs(count: int, width: int) -> int:
        return count // pair * (width * 4 + 16)

    def weights(count: int, across: int) -> int:
        return count * (across * weight + 16)

    if which in ("forward", "decode"):
        return rows(m, d) + max(rows(n, d), pairs(n, dv)) + weights(m, n)
    if which == "dq":
        return rows(m, d) + rows(m, dv) + max(pairs(n, d), rows(n, d), rows(n, dv)) + weights(m, n)
    if which == "dkdv":
        return rows(n, d) + rows(n, dv) + max(rows(m, max(d, dv)), pairs(m, max(d, dv))) + weights(n, m)
    return rows(m, max(d, dv)) + rows(n, max(d, dv)) + 4 * m * n
