"""Who touched which byte: the rule behind the LDS and the global race check.

Per byte, since the last reset, `writer` is the one party that wrote it and `reader` the one that read it (`many` when several
did). Reading what another party wrote, or writing what another read or wrote, is a race, whatever order they ran in.
A party is a wave of a workgroup in LDS (one byte per byte), a workgroup in global memory (two bytes per byte). Units of
several bytes are compared as a whole; only where one does not hold a single answer are its bytes looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnproof.gcn.faults import Race

_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# (party doing, verb, byte, other party or None for several, what it did)
Describe = Callable[[int, str, int, int | None, str], str]


def spread(number: int, entry: int, unit: int) -> int:
    """A number of `entry` bytes, `unit` times."""
    return int.from_bytes(number.to_bytes(entry, "little") * unit, "little")


class Tracker:
    """Readers and writers of `size` bytes.

    Args:
        size: bytes watched.
        entry: bytes per party number; parties are below 2**(8 * entry) - 3.
        describe: makes the message of a race.
    """

    def __init__(self, size: int, entry: int, describe: Describe) -> None:
        self.entry, self.describe = entry, describe
        top = 1 << 8 * entry
        self.none, self.many, self.atomic = top - 1, top - 2, top - 3
        padded = -(-size // 8) * 8
        self.writer: Any = np.full(padded, self.none, _UNSIGNED[entry])
        self.reader: Any = np.full(padded, self.none, _UNSIGNED[entry])
        self.units = [unit for unit in (1, 2, 4, 8) if unit * entry <= 8]
        self._writers = {unit: self.writer.view(_UNSIGNED[unit * entry]) for unit in self.units}
        self._readers = {unit: self.reader.view(_UNSIGNED[unit * entry]) for unit in self.units}
        self._none = {unit: self._fixed(self.none, unit) for unit in self.units}
        self._many = {unit: self._fixed(self.many, unit) for unit in self.units}
        self._ones = {unit: self._fixed(1, unit) for unit in self.units}

    def _fixed(self, number: int, unit: int) -> Any:
        return _UNSIGNED[unit * self.entry](spread(number, self.entry, unit))

    def mine(self, parties: Any, unit: int) -> Any:
        """Party numbers as they look in every byte of a unit."""
        return parties.astype(_UNSIGNED[unit * self.entry]) * self._ones[unit]

    def reset(self, span: slice) -> None:
        """Forget what happened to some bytes."""
        self.writer[span] = self.none
        self.reader[span] = self.none

    def reads(self, index: Any, mine: Any, unit: int, written: bool = True) -> None:
        """Units at `index` are read by `mine` (broadcasts to index); `written` False when nobody can have written."""
        if written:
            seen = self._writers[unit][index]
            if not ((seen == self._none[unit]) | (seen == mine)).all():
                self._conflict(self.writer, index, mine, unit, "reads", "wrote")
        reader = self._readers[unit]
        seen = reader[index]
        other = (seen != mine) & (seen != self._many[unit])
        if not other.any():
            return
        free = seen == self._none[unit]
        if free.any():
            reader[index[free]] = np.broadcast_to(mine, index.shape)[free]
            seen = reader[index]
            other = (seen != mine) & (seen != self._many[unit])
            if not other.any():
                return
        owners = seen[other]
        low = owners & owners.dtype.type((1 << 8 * self.entry) - 1)
        if (owners == low * self._ones[unit]).all():
            # each unit was read by one other party, all of it
            reader[index[other]] = self._many[unit]
        else:
            self._merge(index[other], np.broadcast_to(mine, index.shape)[other], unit)

    def _parties(self, mine: Any) -> Any:
        return (mine & mine.dtype.type((1 << 8 * self.entry) - 1)).astype(_UNSIGNED[self.entry])

    def _merge(self, index: Any, mine: Any, unit: int) -> None:
        """Byte by byte: none -> this party, another party -> many."""
        parties = self._parties(mine)
        for k in range(unit):
            at = index * unit + k
            free = self.reader[at] == self.none
            self.reader[at[free]] = parties[free]
            shared = self.reader[at] != parties
            self.reader[at[shared]] = self.many

    def writes(self, index: Any, mine: Any, unit: int) -> None:
        """Units at `index` are written by `mine`."""
        for board, units, verb in (
            (self.reader, self._readers, "read"),
            (self.writer, self._writers, "wrote"),
        ):
            seen = units[unit][index]
            if not ((seen == self._none[unit]) | (seen == mine)).all():
                self._conflict(board, index, mine, unit, "writes", verb)
        writer = self._writers[unit]
        writer[index] = mine
        # two parties of one lockstep step that write the same place
        if not (writer[index] == mine).all():
            self._conflict(self.writer, index, mine, unit, "writes", "wrote")

    def _conflict(self, board: Any, index: Any, mine: Any, unit: int, verb: str, past: str) -> None:
        """Raise for a byte that another party touched; units whose bytes are this party's or nobody's pass."""
        parties = np.broadcast_to(self._parties(mine), index.shape)
        for k in range(unit):
            at = index * unit + k
            owner = board[at]
            wrong = (owner != self.none) & (owner != parties)
            if wrong.any():
                other = int(owner[wrong][0])
                known = None if other in (self.many, self.atomic) else other
                raise Race(self.describe(int(parties[wrong][0]), verb, int(at[wrong][0]), known, past))

    def atomics(self, span: slice, party: int) -> None:
        """One atomic: other atomics are welcome, plain accesses of other parties are not."""
        for board, allowed, past in (
            (self.writer, (self.none, self.atomic, party), "wrote"),
            (self.reader, (self.none, party), "read"),
        ):
            if not np.isin(board[span], allowed).all():
                raise Race(self.describe(party, "adds to", span.start, None, past))
        self.writer[span] = self.atomic
