"""Local data share of many workgroups: bytes, what is written, and who touched it.

"Vega" 7nm ISA, chapter "Data Share Operations". An access of n bytes must be n-aligned (16 for b96) and inside the
workgroup's own bytes. Races between the waves of a workgroup are kept per byte since its last barrier (`races.Tracker`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnproof.gcn.faults import MemoryFault, UninitialisedRead
from attnproof.gcn.races import Tracker, spread

_TYPES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_WRITTEN: dict[int, Any] = {size: kind(spread(1, 1, size)) for size, kind in _TYPES.items()}


class _Bytes:
    """One byte per LDS byte, seen as units of 1, 2, 4 or 8 bytes."""

    def __init__(self, size: int, value: int) -> None:
        self.raw = np.full(size, value, np.uint8)
        self.unit: dict[int, Any] = {size: self.raw.view(kind) for size, kind in _TYPES.items()}


class Lds:
    """The LDS of `groups` workgroups of `waves` waves each, `size` bytes per workgroup."""

    def __init__(self, groups: int, waves: int, size: int, *, races: bool = True) -> None:
        self.size, self.pitch = size, max(16, (size + 15) // 16 * 16)
        self.groups, self.waves = groups, waves
        total = groups * self.pitch
        self.data, self.written = _Bytes(total, 0xFD), _Bytes(total, 0)
        self.tracker = Tracker(total, 1, self._describe) if races else None
        # per workgroup: something was written since its barrier
        self.dirty = np.zeros(groups, np.bool_)
        # [waves of all workgroups, 1]: where its workgroup's bytes start; per unit, its number in every byte
        number = np.arange(groups * waves)
        self.base = (number.astype(np.int64) // waves * self.pitch)[:, None]
        self.mine: dict[int, Any] = {
            size: np.repeat(((number % waves).astype(kind) * _WRITTEN[size])[:, None], 64, axis=1)
            for size, kind in _TYPES.items()
        }

    def _describe(self, wave: int, verb: str, place: int, other: int | None, past: str) -> str:
        whom = "several waves" if other is None else f"wave {other}"
        return f"LDS race: wave {wave} {verb} byte {place % self.pitch}, which {whom} {past} since the last barrier"

    def barrier(self, group: int) -> None:
        """Forget who touched what: all waves of this workgroup have met."""
        self.dirty[group] = False
        if self.tracker is not None:
            self.tracker.reset(slice(group * self.pitch, (group + 1) * self.pitch))

    def check(self, addresses: Any, size: int, alignment: int) -> None:
        """Bounds and alignment of byte addresses (int64, inside the workgroup)."""
        top = int(addresses.max())
        if top + size > self.size:
            raise MemoryFault(
                f"LDS access of {size} bytes at byte {top}: outside the workgroup's {self.size} bytes"
            )
        if alignment > 1 and (addresses & np.int64(alignment - 1)).any():
            wrong = int(addresses[(addresses & np.int64(alignment - 1)) != 0][0])
            raise MemoryFault(
                f"misaligned LDS access of {size} bytes at byte {wrong}: not a multiple of {alignment}"
            )

    @staticmethod
    def unit_of(size: int, alignment: int) -> int:
        """The widest unit in which an access can be handled."""
        return 8 if size % 8 == 0 and alignment >= 8 else min(size, 4)

    @staticmethod
    def _index(places: Any, unit: int, count: int) -> Any:
        at = places // unit if unit > 1 else places
        return at[:, None] + np.arange(count) if count > 1 else at[:, None]

    def load(self, places: Any, mine: Any, unit: int, count: int) -> Any:
        """Units `[places, count]` at byte places of the whole LDS; `mine` who reads, in the unit's form."""
        index = self._index(places, unit, count)
        if not (self.written.unit[unit][index] == _WRITTEN[unit]).all():
            self._missing(index, unit)
        if self.tracker is not None:
            self.tracker.reads(index, mine[:, None], unit, bool(self.dirty.any()))
        return self.data.unit[unit][index]

    def store(self, places: Any, mine: Any, units: Any, unit: int) -> None:
        """Write units `[places, count]` at byte places."""
        index = self._index(places, unit, units.shape[1])
        self.dirty[places // self.pitch] = True
        if self.tracker is not None:
            self.tracker.writes(index, mine[:, None], unit)
        self.data.unit[unit][index] = units
        self.written.unit[unit][index] = _WRITTEN[unit]

    def exchange(self, place: int, wave: int, function: Callable[[Any], Any]) -> int:
        """One atomic of a dword: old value out, function(old) in. Atomics race with plain accesses only."""
        span = slice(place, place + 4)
        if not self.written.raw[span].all():
            raise UninitialisedRead(f"LDS atomic on byte {place % self.pitch}, which nothing wrote")
        if self.tracker is not None:
            self.dirty[place // self.pitch] = True
            self.tracker.atomics(span, wave)
        word = self.data.unit[4][place // 4 : place // 4 + 1]
        old = int(word[0])
        word[...] = function(word.copy())
        return old

    def _missing(self, index: Any, unit: int) -> None:
        at = (index[..., None] * unit + np.arange(unit)).ravel()
        byte = int(at[self.written.raw[at] == 0][0]) % self.pitch
        raise UninitialisedRead(f"LDS read of byte {byte}, which nothing wrote")
