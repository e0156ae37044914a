"""Instructions that move values between lanes and scalar registers ("Vega" 7nm ISA, VOP1 and VOP3: READLANE, WRITELANE)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnproof.gcn.decode import Instruction
from attnproof.gcn.operands import Step, raw32
from attnproof.gcn.scalar import scalar_source, scalar_write
from attnproof.gcn.wave import LANES, Group


def _read_first_lane(made: Instruction) -> Step:
    """V_READFIRSTLANE_B32: the lowest active lane, lane 0 when none is."""
    read, write = raw32(made.operands[1]), scalar_write(made.operands[0])

    def step(group: Group) -> None:
        words = np.broadcast_to(read(group), (group.size, LANES))
        write(group, words[:, 0] if group.full else words[np.arange(group.size), group.mask.argmax(axis=1)])

    return step


def _read_lane(made: Instruction) -> Step:
    """V_READLANE_B32: any lane, active or not; the lane number is taken modulo 64."""
    read, which, write = (
        raw32(made.operands[1]),
        scalar_source(made.operands[2]),
        scalar_write(made.operands[0]),
    )

    def step(group: Group) -> None:
        words = np.broadcast_to(read(group), (group.size, LANES))
        write(group, words[np.arange(group.size), which(group) & np.uint32(63)])

    return step


def _write_lane(made: Instruction) -> Step:
    """V_WRITELANE_B32: one lane, whatever exec says."""
    register = made.operands[0].index
    value, which = scalar_source(made.operands[1]), scalar_source(made.operands[2])

    def step(group: Group) -> None:
        lanes = np.arange(LANES, dtype=np.uint32) == (which(group) & np.uint32(63))[:, None]
        group.put_where(register, np.asarray(value(group))[:, None], np.broadcast_to(lanes, group.mask.shape))

    return step


def _swap(made: Instruction) -> Step:
    """V_SWAP_B32."""
    left, right = made.operands[0].index, made.operands[1].index

    def step(group: Group) -> None:
        kept: Any = group.v[left].copy()
        group.put(left, group.v[right])
        group.put(right, kept)

    return step


NAMED: dict[str, Callable[[Instruction], Step]] = {
    "v_readfirstlane_b32": _read_first_lane,
    "v_readlane_b32": _read_lane,
    "v_writelane_b32": _write_lane,
    "v_swap_b32": _swap,
}


def build(made: Instruction) -> Step | None:
    """The step of a lane instruction, or None."""
    return NAMED[made.name](made) if made.name in NAMED else None
