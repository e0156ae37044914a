"""What a launch cost: wave instructions per class, LDS and memory traffic, and the cycle bound of every pipe.

The model (not a measurement): a wave64 instruction holds its SIMD for 4 cycles, a quarter-rate one (transcendental,
32-bit integer multiply, fp64) for 16; a compute unit has 4 SIMDs, one LDS of 32 banks of 4 bytes, one scalar unit.
LDS phases: b32 two groups of 32 lanes, b64 four of 16, b128 eight of 8, and b128 reads in the
lane groups that composable_kernel documents (0-3 with 20-23, 4-7 with 16-19, 8-11 with 28-31, 12-15 with 24-27, and
the same 32 higher). The same dword read twice in a phase is one access.
Which of these hold on gfx906 silicon is not verified here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnproof.gcn.decode import Instruction

LINE = 64  # bytes of a gfx906 vector cache line
_QUARTER = (
    "v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_", "v_mul_lo_u32", "v_mul_hi_u32", "v_mul_hi_i32",
    "v_mad_u64_u32", "v_mad_i64_i32", "v_div_scale", "v_div_fmas", "v_div_fixup",
)  # fmt: skip
CLASSES = ("valu", "quarter", "dot2", "salu", "lds", "vmem", "smem", "branch", "other")
_OTHER = frozenset(("s_waitcnt", "s_barrier", "s_nop", "s_endpgm", "s_setprio", "s_sleep", "s_inst_prefetch"))


def class_of(made: Instruction) -> str:
    """The class of an instruction.

    >>> from attnproof.gcn.decode import decode_line
    >>> class_of(decode_line("    v_exp_f32_e32 v1, v2    // 000000001000: 00000000"))
    'quarter'
    """
    return _class_of_name(made.name)


@functools.cache
def _class_of_name(name: str) -> str:
    if name.startswith("v_"):
        if "dot" in name:
            return "dot2"
        return "quarter" if name.startswith(_QUARTER) or name.endswith("f64") else "valu"
    if name.startswith("ds_"):
        return "lds"
    if name.startswith(("global_", "flat_", "buffer_", "scratch_")):
        return "vmem"
    if name.startswith(("s_load", "s_buffer", "s_memtime", "s_dcache", "s_store", "s_scratch")):
        return "smem"
    if name.startswith(("s_branch", "s_cbranch")):
        return "branch"
    return "other" if name in _OTHER else "salu"


def _consecutive(lanes: int) -> list[Any]:
    return [np.arange(first, first + lanes) for first in range(0, 64, lanes)]


_READ_128: list[Any] = [
    np.r_[low + half : low + half + 4, high + half : high + half + 4]
    for half in (0, 32)
    for low, high in ((0, 20), (4, 16), (8, 28), (12, 24))
]
_PHASES = {
    (size, load): np.stack(_READ_128 if size == 16 and load else _consecutive(128 // max(4, size)))
    for size in (4, 8, 16)
    for load in (False, True)
}


def lds_cycles(addresses: Any, mask: Any, size: int, load: bool) -> tuple[int, int]:
    """Cycles of one LDS instruction of every wave (with conflicts, without), summed over waves.

    Args:
        addresses: byte addresses, [waves, 64] int64.
        mask: active lanes, [waves, 64].
        size: bytes per lane.
        load: a read (b128 reads have lane groups of their own).
    """
    words = max(1, size // 4)
    width = 16 if size > 8 else max(4, size)
    groups = _PHASES[width, load]  # [phases, lanes]
    dword = (addresses[:, groups] >> 2)[..., None] + np.arange(words)
    shape = (addresses.shape[0] * groups.shape[0], groups.shape[1] * words)
    # inactive lanes ask for nothing
    active = np.repeat(mask[:, groups].reshape(*dword.shape[:3]), words, axis=-1).reshape(shape)
    flat = np.where(active, dword.reshape(shape), -1)
    flat.sort(axis=1)
    fresh = np.ones(shape, np.bool_)
    fresh[:, 1:] = flat[:, 1:] != flat[:, :-1]
    fresh &= flat >= 0
    row = np.broadcast_to(np.arange(shape[0])[:, None], shape)[fresh]
    per_bank = np.bincount(row * 32 + (flat[fresh] & 31), minlength=32 * shape[0]).reshape(shape[0], 32)
    return int(per_bank.max(axis=1).sum()), int(active.any(axis=1).sum())


def lines_touched(addresses: Any, mask: Any, size: int) -> int:
    """Distinct cache lines of one global instruction, per wave, summed over waves."""
    first, last = addresses // LINE, (addresses + size - 1) // LINE
    both = np.concatenate([np.where(mask, first, -1), np.where(mask, last, -1)], axis=1)
    both.sort(axis=1)
    fresh = np.ones(both.shape, np.bool_)
    fresh[:, 1:] = both[:, 1:] != both[:, :-1]
    return int((fresh & (both >= 0)).sum())


class Tally:
    """Traffic while a launch runs; `Counts` is what remains."""

    def __init__(self) -> None:
        self.lds_read = self.lds_read_free = self.lds_write = self.lds_write_free = 0
        self.load_lines = self.store_lines = self.load_bytes = self.store_bytes = 0

    def lds(self, addresses: Any, mask: Any, size: int, load: bool) -> None:
        """Count one LDS access of a group."""
        cycles, free = lds_cycles(addresses, mask, size, load)
        if load:
            self.lds_read += cycles
            self.lds_read_free += free
        else:
            self.lds_write += cycles
            self.lds_write_free += free

    def vmem(self, addresses: Any, mask: Any, size: int, load: bool) -> None:
        """Count one global access of a group."""
        lines, moved = lines_touched(addresses, mask, size), size * int(mask.sum())
        if load:
            self.load_lines += lines
            self.load_bytes += moved
        else:
            self.store_lines += lines
            self.store_bytes += moved


@dataclass(frozen=True)
class Bound:
    """Seconds that each pipe needs at least, and the bound on the launch; a model, never a measurement."""

    seconds: float
    pipes: dict[str, float]
    overlap: bool


@dataclass(frozen=True)
class Counts:
    """Wave instructions and traffic of a launch."""

    instructions: int
    classes: dict[str, int]
    mnemonics: dict[str, int]
    executed: dict[int, int] = field(repr=False)
    workgroups: int = 0
    lds_read_cycles: int = 0
    lds_read_cycles_free: int = 0
    lds_write_cycles: int = 0
    lds_write_cycles_free: int = 0
    load_lines: int = 0
    store_lines: int = 0
    load_bytes: int = 0
    store_bytes: int = 0
    traffic: bool = True

    @property
    def pipes(self) -> dict[str, int]:
        """Cycles per pipe: `valu` summed over SIMDs, the others over compute units."""
        vector = self.classes["valu"] + self.classes["dot2"]
        return {
            "valu": 4 * vector + 16 * self.classes["quarter"],
            "salu": 4 * (self.classes["salu"] + self.classes["branch"]),
            "lds": self.lds_read_cycles + self.lds_write_cycles,
            "vmem": self.load_lines + self.store_lines,
        }

    def bound(self, clock_hz: float, compute_units: int, overlap: bool = True) -> Bound:
        """Least time of the launch on a device: with overlap the busiest pipe, without it their sum.

        Work is taken as evenly spread over compute units and their four SIMDs.
        """
        cycles = self.pipes
        seconds = {
            name: cycles[name] / (4 if name in ("valu", "salu") else 1) / compute_units / clock_hz
            for name in cycles
        }
        whole = max(seconds.values()) if overlap else sum(seconds.values())
        return Bound(whole, seconds, overlap)
