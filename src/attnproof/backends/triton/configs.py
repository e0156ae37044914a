"""Tile sizes per (architecture class, dtype, head dim bucket, pass): measured where a record is named, else started
from register and shared memory reports of the offline compile matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

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
