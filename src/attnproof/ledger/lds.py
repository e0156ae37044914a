"""Bank conflicts of shared memory (NVIDIA) and LDS (AMD): 32 banks of 4 bytes, one dword a bank a clock.

A wide access is served in phases, each by a group of lanes that together could use every bank once. Inside a
phase the clocks are the largest number of *different* dwords that one bank must give; lanes that want the
same dword share it.

    width   NVIDIA warp of 32          AMD wave of 64
    b32     1 phase of 32              2 of 32
    b64     2 of 16                    4 of 16
    b128    4 of 8, neighbours         8 of 8; writes: neighbours; reads: lanes 0-3 with 20-23, 4-7 with
    16-19,
                                       8-11 with 28-31, 12-15 with 24-27, and the same 32 lanes on

The groups for AMD reads are those that Composable Kernel documents for its matrix-core devices; that gfx906
has the same is an assumption. RDNA waves of 32 are taken as NVIDIA's, which is an assumption too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import ShapeError

BANKS = 32
BANK_BYTES = 4
WIDTHS = (4, 8, 16)  # bytes of one lane's access: b32, b64, b128

Addresses = npt.NDArray[np.int64]


def phases(wave: int, width: int, *, write: bool = False) -> tuple[tuple[int, ...], ...]:
    """Lanes that are served together, phase by phase, for `width` bytes a lane in a wave of 32 or 64."""
    if wave not in (32, 64) or width not in WIDTHS:
        raise ShapeError(f"phases: expected wave 32 or 64 and width {WIDTHS}, got {wave} and {width}")
    group = BANKS * BANK_BYTES // width
    if wave == 64 and width == 16 and not write:
        quads = ((0, 20), (4, 16), (8, 28), (12, 24))
        pairs = [(a + half, b + half) for half in (0, 32) for a, b in quads]
        return tuple((*range(a, a + 4), *range(b, b + 4)) for a, b in pairs)
    return tuple(tuple(range(start, start + group)) for start in range(0, wave, group))


@dataclass(frozen=True)
class Conflicts:
    """Result of one access: its clocks, the clocks without conflicts, dwords per phase and bank."""

    clocks: int
    best: int
    loads: npt.NDArray[np.int64]  # [phases, BANKS]

    @property
    def extra(self) -> int:
        """Clocks lost to conflicts."""
        return self.clocks - self.best

    @property
    def ways(self) -> int:
        """The worst bank's number of different dwords in one phase; 1 is conflict-free."""
        return int(self.loads.max(initial=1))


def conflicts(addresses: npt.ArrayLike, width: int, *, write: bool = False) -> Conflicts:
    """Count the conflicts of one access by a wave.

    Args:
        addresses: byte address of each lane, [32] or [64]; negative for a lane that is switched off.
        width: bytes that each lane reads or writes, 4, 8 or 16; addresses must be multiples of it.
        write: whether it is a write (only AMD's b128 groups differ).
    """
    where = np.asarray(addresses, dtype=np.int64)
    active = where >= 0
    if where.ndim != 1 or np.any(where[active] % width):
        raise ShapeError(f"addresses: expected one multiple of {width} per lane, got {where.tolist()}")
    groups = phases(where.size, width, write=write)
    loads = np.zeros((len(groups), BANKS), dtype=np.int64)
    for phase, lanes in enumerate(groups):
        lane_addresses = where[list(lanes)]
        starts = lane_addresses[lane_addresses >= 0] // BANK_BYTES
        dwords = np.unique(starts[:, None] + np.arange(width // BANK_BYTES))
        loads[phase] = np.bincount(dwords % BANKS, minlength=BANKS)
    # counted as if a phase without an active lane still took its slot, which no source states
    clocks = int(np.maximum(loads.max(axis=1, initial=0), 1).sum())
    return Conflicts(clocks, len(groups), loads)


def column(row_bytes: int, wave: int, offset: int = 0) -> Addresses:
    """Lane i reads row i at the same column: how a transposed operand is fetched."""
    return np.arange(wave, dtype=np.int64) * row_bytes + offset


def contiguous(width: int, wave: int, offset: int = 0) -> Addresses:
    """Lane i reads the i-th neighbour: how a row is fetched."""
    return np.arange(wave, dtype=np.int64) * width + offset


def fragment(
    row_bytes: int, wave: int, rows_per_lane: int, rows_across: int = 16, offset: int = 0
) -> Addresses:
    """A register tile's operand: `rows_across` threads, each `rows_per_lane` rows on; the rest share."""
    lane = np.arange(wave, dtype=np.int64)
    return (lane % rows_across) * rows_per_lane * row_bytes + offset


def swizzled_column(row_bytes: int, wave: int, width: int, chunk: int = 0) -> Addresses:
    """A column of a tile whose `width`-byte chunks are stored at `chunk ^ row`: no conflict, no padding."""
    row = np.arange(wave, dtype=np.int64)
    per_row = row_bytes // width
    if per_row & (per_row - 1):
        raise ShapeError(f"row_bytes: expected a power-of-two number of {width}-byte chunks, got {row_bytes}")
    return row * row_bytes + ((chunk ^ row) % per_row) * width


@dataclass(frozen=True)
class Advice:
    """What padding does to a column access: `clocks` by bytes of padding, and the least that is best."""

    row_bytes: int
    width: int
    wave: int
    clocks: dict[int, int]
    padding: int

    @property
    def before(self) -> int:
        """Clocks of one access without padding."""
        return self.clocks[0]

    @property
    def after(self) -> int:
        """Clocks of one access with the advised padding."""
        return self.clocks[self.padding]

    @property
    def price(self) -> float:
        """Share of the buffer that the padding adds."""
        return self.padding / self.row_bytes

    def __str__(self) -> str:
        if self.padding == 0:
            return f"rows of {self.row_bytes} B need no padding: {self.before} clocks for b{8 * self.width}"
        gain = f"{self.before} -> {self.after} clocks"
        return f"pad rows of {self.row_bytes} B by {self.padding} B: {gain}, {self.price:.0%} more memory"


def padding_advice(
    row_bytes: int, width: int, wave: int, *, rows_per_lane: int = 1, limit: int = 128
) -> Advice:
    """The least padding, in steps of `width` bytes to keep alignment, that makes a column access cheapest."""
    if row_bytes <= 0 or row_bytes % width:
        raise ShapeError(f"row_bytes: expected a positive multiple of {width}, got {row_bytes}")
    clocks: dict[int, int] = {}
    for padding in range(0, limit + 1, width):
        addresses = column((row_bytes + padding) * rows_per_lane, wave)
        clocks[padding] = conflicts(addresses, width).clocks
    best = min(clocks.values())
    padding = next(size for size, count in clocks.items() if count == best)
    return Advice(row_bytes, width, wave, clocks, padding)


def picture(result: Conflicts) -> str:
    """The access as text: a line per phase, a column per bank, the number of dwords each bank must give."""
    lines = ["bank    " + "".join(f"{bank % 10}" for bank in range(BANKS))]
    for phase, loads in enumerate(result.loads):
        cells = "".join("." if load == 0 else (str(load) if load < 10 else "+") for load in loads)
        clocks = max(1, int(loads.max()))
        lines.append(f"phase {phase} {cells}  {clocks} clock{'s' if clocks > 1 else ''}")
    return "\n".join(lines)
