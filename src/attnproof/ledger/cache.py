"""Which requests reach memory: the accesses of an account, replayed through a write-back cache.

The last cache before memory is taken as fully associative, least recently used, in chunks. A read of what is
not there is a read from memory; a write stays until its chunk is pushed out, and only then is it a write to
memory. So a tensor that one kernel writes and the next one reads costs nothing as long as everything touched
in between fits, and what is still in the cache when the last kernel ends was not written at all. Both are
what counters show.

    fits           a head at a time of a short sequence: a few MB, not the account's 130 MiB
    does not fit   every byte of s and p goes out and comes back
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from .accounts import Account
from .hardware import Hardware
from .materialised import Product
from .traffic import Touch

CHUNKS = 512  # pieces of the capacity: coarse enough to be quick, fine enough that edges do not show
STREAM = 500  # a kernel that passes its operands once, this many capacities of them, cannot meet them again


class _Pieces:
    """Disjoint half-open pieces of one chunk, in order, and their total length."""

    __slots__ = ("pieces", "total")

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int]] = []
        self.total = 0

    def add(self, start: int, stop: int) -> int:
        """Add a piece; returns how many bytes of it are new."""
        before = self.total
        apart: list[tuple[int, int]] = []
        for old_start, old_stop in self.pieces:
            if old_stop < start or old_start > stop:
                apart.append((old_start, old_stop))
            else:
                start, stop = min(start, old_start), max(stop, old_stop)
        apart.append((start, stop))
        self.pieces = sorted(apart)
        self.total = sum(b - a for a, b in self.pieces)
        return self.total - before


@dataclass
class _Chunk:
    """What is present of one chunk, and what of that memory does not have yet."""

    present: _Pieces
    dirty: _Pieces


class Cache:
    """A write-back LRU cache of `capacity` bytes that counts what passes between it and memory."""

    def __init__(self, capacity: int) -> None:
        """An empty cache."""
        self.capacity = capacity
        self.chunk = max(capacity // CHUNKS, 4096)
        self.read = 0
        self.written = 0
        self._held = 0
        self._chunks: OrderedDict[tuple[str, int], _Chunk] = OrderedDict()

    @property
    def dirty(self) -> int:
        """Bytes that memory has not got yet."""
        return sum(chunk.dirty.total for chunk in self._chunks.values())

    def touch(self, access: Touch) -> None:
        """One access, chunk by chunk."""
        size = self.chunk
        for index in range(access.start // size, -(-access.stop // size)):
            start = max(access.start - index * size, 0)
            stop = min(access.stop - index * size, size)
            self._touch((access.tensor, index), start, stop, access.write)

    def stream(self, accesses: Iterable[Touch]) -> None:
        """Accesses that all miss: counted as they are, and what the cache held is pushed out."""
        self.written += self.dirty
        self._chunks.clear()
        self._held = 0
        for access in accesses:
            size = access.stop - access.start
            self.read += 0 if access.write else size
            self.written += size if access.write else 0

    def _touch(self, key: tuple[str, int], start: int, stop: int, write: bool) -> None:
        chunk = self._chunks.get(key)
        if chunk is None:
            chunk = self._chunks[key] = _Chunk(_Pieces(), _Pieces())
        else:
            self._chunks.move_to_end(key)
        new = chunk.present.add(start, stop)
        self._held += new
        if write:
            chunk.dirty.add(start, stop)
        else:
            self.read += new
        while self._held > self.capacity and len(self._chunks) > 1:
            _, old = self._chunks.popitem(last=False)
            self._held -= old.present.total
            self.written += old.dirty.total


@dataclass(frozen=True)
class Moved:
    """Bytes of one kernel between cache and memory."""

    kernel: str
    read: int
    written: int


@dataclass(frozen=True)
class Memory:
    """Bytes of a pass between cache and memory; `resident` were written but have not left the cache."""

    kernels: tuple[Moved, ...]
    resident: int

    @property
    def read(self) -> int:
        """Bytes read from memory."""
        return sum(kernel.read for kernel in self.kernels)

    @property
    def written(self) -> int:
        """Bytes written to memory before the last kernel ended."""
        return sum(kernel.written for kernel in self.kernels)

    @property
    def total(self) -> int:
        """Bytes moved either way."""
        return self.read + self.written


def replay(
    accounts: Account | Iterable[Account], capacity: int, wave: int, *, counted: int | None = None
) -> Memory:
    """Replay accounts one after the other, from an empty cache.

    Args:
        accounts: the passes in order.
        capacity: bytes of the cache.
        wave: blocks that run at a time.
        counted: report the last so many passes and let the others warm the cache; None reports all.
    """
    passes = [accounts] if isinstance(accounts, Account) else list(accounts)
    counted = len(passes) if counted is None else counted
    cache = Cache(capacity)
    moved: list[Moved] = []
    for number, account in enumerate(passes):
        for kernel in account.kernels:
            before = cache.read, cache.written
            if isinstance(kernel, Product) and kernel.square_bytes > STREAM * capacity:
                cache.stream(kernel.touches(wave))
            else:
                for access in kernel.touches(wave):
                    cache.touch(access)
            if number >= len(passes) - counted:
                moved.append(Moved(kernel.name, cache.read - before[0], cache.written - before[1]))
    return Memory(tuple(moved), cache.dirty)


def on(
    hardware: Hardware, *accounts: Account, blocks_per_unit: int = 1, counted: int | None = None
) -> Memory:
    """`replay` with the last cache of a device and as many blocks at a time as it runs."""
    wave = int(hardware.units.value) * blocks_per_unit
    return replay(accounts, int(hardware.l2_bytes), wave, counted=counted)
