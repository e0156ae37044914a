"""Global memory: allocations with gaps between them, and a check on every access.

An access must lie inside one allocation, be aligned, and read only bytes that something wrote ("Vega" 7nm ISA,
section "Memory: alignment": a dword or more needs dword alignment; `natural` asks for the full width). Two workgroups of
one launch that touch the same bytes, one of them writing, are a race: nothing orders them (atomics excepted).
"""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
import numpy.typing as npt

from attnproof.errors import ShapeError, expected
from attnproof.gcn.faults import MemoryFault, UninitialisedRead
from attnproof.gcn.races import Tracker

_BASE, _GAP, _PAGE = 0x7F00_0000_0000, 1 << 16, 1 << 12
_VIEWS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Allocation:
    """One named range of addresses, and the bytes behind it."""

    def __init__(
        self, name: str, address: int, data: npt.NDArray[np.uint8], writable: bool, written: bool
    ) -> None:
        self.name, self.address, self.data, self.writable = name, address, data, writable
        self.end = address + len(data)
        # per byte, None when all is written
        self.written: npt.NDArray[np.bool_] | None = None if written else np.zeros(len(data), np.bool_)
        self._views = {size: self._view(data, size) for size in _VIEWS}
        # workgroups of the present launch that touched its bytes; nobody looks where no store is allowed
        self.watched = False
        self._tracker: Tracker | None = None
        self._groups: list[tuple[int, int, int]] = []

    def watch(self, groups: list[tuple[int, int, int]], races: bool) -> None:
        """A launch of these workgroups begins."""
        self.watched, self._tracker, self._groups = races and self.writable, None, groups

    def _describe(self, party: int, verb: str, place: int, other: int | None, past: str) -> str:
        whom = "other workgroups" if other is None else f"workgroup {self._groups[other]}"
        where = f"byte {place} of {self.name}"
        return (
            f"global race: workgroup {self._groups[party]} {verb} {where}, which {whom} {past} in this launch"
        )

    @property
    def tracker(self) -> Tracker:
        """Readers and writers by workgroup, made when first needed."""
        if self._tracker is None:
            self._tracker = Tracker(len(self.data), 2, self._describe)
        return self._tracker

    def touch(self, offsets: Any, unit: int, count: int, parties: Any, store: bool) -> None:
        """Note an access of these workgroups, or raise a race."""
        tracker = self.tracker
        index = (offsets // unit)[:, None] + np.arange(count)
        (tracker.writes if store else tracker.reads)(index, tracker.mine(parties, unit)[:, None], unit)

    @staticmethod
    def _view(data: npt.NDArray[np.uint8], size: int) -> Any:
        return data[: len(data) // size * size].view(_VIEWS[size])

    def load(self, offsets: Any, unit: int, count: int) -> list[Any]:
        """`count` units of `unit` bytes at byte offsets, as uint32 columns."""
        view, at = self._views[unit], offsets // unit if unit > 1 else offsets
        if self.written is not None:
            for k in range(unit * count):
                if not self.written[offsets + k].all():
                    missing = int(offsets[~self.written[offsets + k]][0]) + k
                    raise UninitialisedRead(f"load of {self.name}[byte {missing}], which nothing wrote")
        return [view[at + k].astype(np.uint32, copy=False) for k in range(count)]

    def store(self, offsets: Any, unit: int, columns: list[Any]) -> None:
        """Write columns of uint32 at byte offsets."""
        if not self.writable:
            raise MemoryFault(f"store to {self.name}, which is read-only")
        view, at = self._views[unit], offsets // unit if unit > 1 else offsets
        for k, column in enumerate(columns):
            view[at + k] = column
        if self.written is not None:
            for k in range(unit * len(columns)):
                self.written[offsets + k] = True


class Memory:
    """Allocations of one device; kernels see the addresses that `place` and `reserve` return."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._allocations: list[Allocation] = []
        self._arrays: dict[int, npt.NDArray[Any]] = {}
        self._top = _BASE

    def _add(self, name: str, data: npt.NDArray[np.uint8], writable: bool, written: bool) -> int:
        address = self._top
        self._top = (address + len(data) + _GAP + _PAGE - 1) // _PAGE * _PAGE
        self._starts.append(address)
        self._allocations.append(Allocation(name, address, data, writable, written))
        return address

    def place(self, array: npt.NDArray[Any], *, name: str = "array", writable: bool | None = None) -> int:
        """Map a C-contiguous array; a kernel's stores go straight into it. Read-only arrays stay so."""
        if not array.flags.c_contiguous:
            raise ShapeError(
                expected(
                    name, "a C-contiguous array (pass strides to the kernel)", f"strides {array.strides}"
                )
            )
        allowed = bool(array.flags.writeable) if writable is None else writable
        address = self._add(name, array.reshape(-1).view(np.uint8), allowed, written=True)
        self._arrays[address] = array
        return address

    def reserve(self, nbytes: int, name: str) -> int:
        """Memory whose bytes are uninitialised until a kernel stores to them."""
        data = np.full(nbytes, 0xFD, np.uint8)
        return self._add(name, data, True, written=False)

    def read(
        self, address: int, shape: tuple[int, ...] | None = None, dtype: Any = np.uint8
    ) -> npt.NDArray[Any]:
        """The array placed at an address, or bytes from there as `dtype` (a copy, and all of them written)."""
        if shape is None and address in self._arrays:
            return self._arrays[address]
        allocation = self.find(address)
        if allocation is None:
            raise ShapeError(expected("address", "an address inside an allocation", f"{address:#x}"))
        start = address - allocation.address
        size = allocation.end - address if shape is None else int(np.prod(shape)) * np.dtype(dtype).itemsize
        if start + size > len(allocation.data):
            raise ShapeError(expected("shape", f"at most {allocation.end - address} bytes", f"{size} bytes"))
        if allocation.written is not None and not allocation.written[start : start + size].all():
            missing = start + int(np.argmin(allocation.written[start : start + size]))
            raise UninitialisedRead(f"read of {allocation.name}[byte {missing}], which nothing wrote")
        found = allocation.data[start : start + size].copy().view(dtype)
        return found if shape is None else found.reshape(shape)

    def find(self, address: int) -> Allocation | None:
        """The allocation that holds an address."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0 or address >= self._allocations[at].end:
            return None
        return self._allocations[at]

    def _near(self, address: int) -> str:
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return f"address {address:#x} is below every allocation"
        near = self._allocations[at]
        if address < near.end:
            return f"address {address:#x} is byte {address - near.address} of {near.name} ({len(near.data)} bytes)"
        return f"address {address:#x} is {address - near.end} bytes past the end of {near.name} ({len(near.data)} bytes)"

    def spans(self, addresses: Any, size: int, alignment: int) -> list[tuple[Allocation, Any]]:
        """Check an access of `size` bytes per lane; [(allocation, lanes)], lanes None for all."""
        if alignment > 1 and (addresses & np.int64(alignment - 1)).any():
            wrong = int(addresses[(addresses & np.int64(alignment - 1)) != 0][0])
            raise MemoryFault(
                f"misaligned access of {size} bytes: {self._near(wrong)}, not a multiple of {alignment}"
            )
        low, high = int(addresses.min()), int(addresses.max())
        first = self.find(low)
        if first is not None and high + size <= first.end:
            return [(first, None)]
        found: list[tuple[Allocation, Any]] = []
        rank = np.searchsorted(np.array(self._starts, np.int64), addresses, side="right") - 1
        for at in np.unique(rank):
            lanes = rank == at
            inside = None if at < 0 else self._allocations[at]
            chosen = addresses[lanes]
            if inside is None or int(chosen.max()) + size > inside.end:
                wrong = int(chosen.max())
                raise MemoryFault(f"out of bounds access of {size} bytes: {self._near(wrong)}")
            found.append((inside, lanes))
        return found

    def watch(self, groups: list[tuple[int, int, int]], races: bool) -> None:
        """A launch of these workgroups begins; more than 16 bits can name go unwatched."""
        for allocation in self._allocations:
            allocation.watch(groups, races and len(groups) < 65000)

    def load(self, addresses: Any, unit: int, count: int, alignment: int, parties: Any = None) -> list[Any]:
        """Columns of `count` units of `unit` bytes for a flat list of addresses (int64); `parties`: workgroup numbers."""
        spans = self.spans(addresses, unit * count, alignment)
        if spans[0][1] is None:
            return self._part(spans[0][0], addresses, unit, count, parties)
        columns: list[Any] = [np.empty(len(addresses), np.uint32) for _ in range(count)]
        for allocation, lanes in spans:
            who = None if parties is None else parties[lanes]
            parts = self._part(allocation, addresses[lanes], unit, count, who)
            for column, part in zip(columns, parts, strict=True):
                column[lanes] = part
        return columns

    @staticmethod
    def _part(allocation: Allocation, addresses: Any, unit: int, count: int, parties: Any) -> list[Any]:
        offsets = addresses - np.int64(allocation.address)
        if allocation.watched and parties is not None:
            allocation.touch(offsets, unit, count, parties, store=False)
        return allocation.load(offsets, unit, count)

    def store(
        self, addresses: Any, unit: int, columns: list[Any], alignment: int, parties: Any = None
    ) -> None:
        """Write columns at a flat list of addresses."""
        for allocation, lanes in self.spans(addresses, unit * len(columns), alignment):
            offsets, parts, who = addresses - np.int64(allocation.address), columns, parties
            if lanes is not None:
                offsets, parts = offsets[lanes], [column[lanes] for column in columns]
                who = None if parties is None else parties[lanes]
            if allocation.watched and who is not None:
                allocation.touch(offsets, unit, len(columns), who, store=True)
            allocation.store(offsets, unit, parts)

    def atomic(self, address: int, party: int) -> None:
        """Note an atomic of a dword (checked by the load that follows)."""
        allocation = self.find(address)
        if allocation is not None and allocation.watched:
            start = address - allocation.address
            allocation.tracker.atomics(slice(start, start + 4), party)
