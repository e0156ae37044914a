"""Local data share of many workgroups: bytes, what is written, and an exact race detector.

"Vega" 7nm ISA, chapter "Data Share Operations". An access of n bytes must be n-aligned (16 for b96) and inside the
workgroup's own bytes.

Race rule, kept per byte: since the last barrier, `writer` is the one wave that wrote it and `reader` the one wave that
read it (`MANY` when several did). A wave that reads what another wrote, or writes what another read or wrote, since that
barrier is a race whatever order the waves ran in. Dwords are compared as a whole; only where one does not hold a single
answer are its bytes looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnproof.gcn.faults import MemoryFault, Race, UninitialisedRead

NONE, MANY, ATOMIC = 0xFF, 0xFE, 0xFD
_TYPES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def spread(number: int, unit: int) -> int:
    """A byte in every byte of a unit."""
    return int.from_bytes(bytes([number]) * unit, "little")


_WRITTEN: dict[int, Any] = {size: kind(spread(1, size)) for size, kind in _TYPES.items()}
_NONE: dict[int, Any] = {size: kind(spread(NONE, size)) for size, kind in _TYPES.items()}
_MANY: dict[int, Any] = {size: kind(spread(MANY, size)) for size, kind in _TYPES.items()}


class _Bytes:
    """One byte per LDS byte, seen as units of 1, 2, 4 or 8 bytes."""

    def __init__(self, size: int, value: int) -> None:
        self.raw = np.full(size, value, np.uint8)
        self.unit: dict[int, Any] = {size: self.raw.view(kind) for size, kind in _TYPES.items()}


class Lds:
    """The LDS of `groups` workgroups of `waves` waves each, `size` bytes per workgroup."""

    def __init__(self, groups: int, waves: int, size: int, *, races: bool = True) -> None:
        self.size, self.pitch = size, max(16, (size + 15) // 16 * 16)
        self.groups, self.waves, self.races = groups, waves, races
        total = groups * self.pitch
        self.data, self.written = _Bytes(total, 0xFD), _Bytes(total, 0)
        self.writer, self.reader = _Bytes(total, NONE), _Bytes(total, NONE)
        # per workgroup: something was written since its barrier
        self.dirty = np.zeros(groups, np.bool_)
        # [waves of all workgroups, 1]: where its workgroup's bytes start; per unit, its number in every byte
        number = np.arange(groups * waves)
        self.base = (number.astype(np.int64) // waves * self.pitch)[:, None]
        self.mine: dict[int, Any] = {
            size: np.repeat(((number % waves).astype(kind) * _WRITTEN[size])[:, None], 64, axis=1)
            for size, kind in _TYPES.items()
        }

    def barrier(self, group: int) -> None:
        """Forget who touched what: all waves of this workgroup have met."""
        span = slice(group * self.pitch, (group + 1) * self.pitch)
        self.dirty[group] = False
        self.writer.raw[span] = NONE
        self.reader.raw[span] = NONE

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
        if self.races:
            self._reads(index, mine[:, None], unit)
        return self.data.unit[unit][index]

    def store(self, places: Any, mine: Any, units: Any, unit: int) -> None:
        """Write units `[places, count]` at byte places."""
        index = self._index(places, unit, units.shape[1])
        self.dirty[places // self.pitch] = True
        if self.races:
            self._writes(index, mine[:, None], unit)
        self.data.unit[unit][index] = units
        self.written.unit[unit][index] = _WRITTEN[unit]

    def exchange(self, place: int, wave: int, function: Callable[[Any], Any]) -> int:
        """One atomic of a dword: old value out, function(old) in. Atomics race with plain accesses only."""
        span = slice(place, place + 4)
        if not self.written.raw[span].all():
            raise UninitialisedRead(f"LDS atomic on byte {place % self.pitch}, which nothing wrote")
        if self.races:
            self._owners(self.writer.raw[span], (NONE, ATOMIC, wave), place, wave, "wrote")
            self._owners(self.reader.raw[span], (NONE, wave), place, wave, "read")
            self.writer.raw[span] = ATOMIC
            self.dirty[place // self.pitch] = True
        word = self.data.unit[4][place // 4 : place // 4 + 1]
        old = int(word[0])
        word[...] = function(word.copy())
        return old

    def _owners(self, owners: Any, allowed: tuple[int, ...], place: int, wave: int, past: str) -> None:
        if not np.isin(owners, allowed).all():
            raise Race(
                f"LDS race: atomic of wave {wave} on byte {place % self.pitch}, which another wave {past} since the last barrier"
            )

    def _missing(self, index: Any, unit: int) -> None:
        at = (index[..., None] * unit + np.arange(unit)).ravel()
        byte = int(at[self.written.raw[at] == 0][0]) % self.pitch
        raise UninitialisedRead(f"LDS read of byte {byte}, which nothing wrote")

    def _reads(self, index: Any, mine: Any, unit: int) -> None:
        if self.dirty.any():
            writer = self.writer.unit[unit][index]
            if not ((writer == _NONE[unit]) | (writer == mine)).all():
                self._conflict(self.writer, index, mine, unit, "reads", "wrote")
        reader = self.reader.unit[unit]
        seen = reader[index]
        other = (seen != mine) & (seen != _MANY[unit])
        if not other.any():
            return
        free = seen == _NONE[unit]
        if free.any():
            reader[index[free]] = np.broadcast_to(mine, index.shape)[free]
            seen = reader[index]
            other = (seen != mine) & (seen != _MANY[unit])
            if not other.any():
                return
        owners = seen[other]
        if (owners == (owners & owners.dtype.type(0xFF)) * _WRITTEN[unit]).all():
            # each unit was read by one other wave, all of it
            reader[index[other]] = _MANY[unit]
        else:
            self._merge(index[other], np.broadcast_to(mine, index.shape)[other], unit)

    def _merge(self, index: Any, mine: Any, unit: int) -> None:
        """Byte by byte: none -> this wave, another wave -> MANY."""
        waves = (mine & mine.dtype.type(0xFF)).astype(np.uint8)
        for k in range(unit):
            at = index * unit + k
            free = self.reader.raw[at] == NONE
            self.reader.raw[at[free]] = waves[free]
            shared = self.reader.raw[at] != waves
            self.reader.raw[at[shared]] = MANY

    def _writes(self, index: Any, mine: Any, unit: int) -> None:
        for board, verb in ((self.reader, "read"), (self.writer, "wrote")):
            seen = board.unit[unit][index]
            if not ((seen == _NONE[unit]) | (seen == mine)).all():
                self._conflict(board, index, mine, unit, "writes", verb)
        writer = self.writer.unit[unit]
        writer[index] = mine
        # two waves of one lockstep step that write the same place
        if not (writer[index] == mine).all():
            self._conflict(self.writer, index, mine, unit, "writes", "wrote")

    def _conflict(self, board: _Bytes, index: Any, mine: Any, unit: int, verb: str, past: str) -> None:
        """Raise for a byte that another wave touched; units whose bytes are this wave's or nobody's pass."""
        waves = np.broadcast_to((mine & mine.dtype.type(0xFF)).astype(np.uint8), index.shape)
        for k in range(unit):
            at = index * unit + k
            owner = board.raw[at]
            wrong = (owner != NONE) & (owner != waves)
            if wrong.any():
                byte, who, other = int(at[wrong][0]) % self.pitch, int(waves[wrong][0]), int(owner[wrong][0])
                whom = "several waves" if other == MANY else f"wave {other}"
                raise Race(
                    f"LDS race: wave {who} {verb} byte {byte}, which {whom} {past} since the last barrier"
                )
