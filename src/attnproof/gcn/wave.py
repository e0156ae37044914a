"""Registers of many waves that run in lockstep, and the group of waves that executes one instruction.

Layout: a vector register is `[waves, 64]` uint32, a scalar pair `[waves]` uint64 whose halves are the two
32-bit registers ("Vega" 7nm ISA, section "Kernel State"; scalar numbers as encoded, so vcc is 106:107 and
exec 126:127). A `Group` is an arithmetic progression of waves at one program counter: its registers are views,
so one NumPy call does the work of all its waves.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attnproof.gcn.decode import EXEC

if TYPE_CHECKING:
    from attnproof.gcn.counts import Tally
    from attnproof.gcn.lds import Lds
    from attnproof.gcn.memory import Memory

LANES = 64
Words = npt.NDArray[np.uint32]
Bools = npt.NDArray[np.bool_]
# what an undefined register holds: a NaN as fp32 and as fp16, and no address
POISON = 0xFFFDFFFD
_FULL = np.uint64(0xFFFFFFFFFFFFFFFF)


def unpack_mask(masks: npt.NDArray[np.uint64]) -> Bools:
    """Lane masks `[n]` uint64 -> booleans `[n, 64]`."""
    raw = np.ascontiguousarray(masks).view(np.uint8).reshape(len(masks), 8)
    return np.unpackbits(raw, axis=1, bitorder="little").view(np.bool_)


def pack_mask(lanes: Bools) -> npt.NDArray[np.uint64]:
    """Booleans `[n, 64]` -> lane masks `[n]` uint64."""
    return np.packbits(lanes, axis=1, bitorder="little").view(np.uint64)[:, 0]


class Machine:
    """Register files and memories of all waves of one batch of workgroups."""

    def __init__(
        self, waves: int, vgprs: int, memory: Memory, lds: Lds, tally: Tally | None, natural: bool = False
    ) -> None:
        self.natural = natural
        self.waves, self.memory, self.lds, self.tally = waves, memory, lds, tally
        # a few more than the kernel declares: the disassembler may name a neighbour of the last granule
        self.vectors: Any = np.full((max(vgprs + 8, 16), waves, LANES), POISON, np.uint32)
        self.pairs: Any = np.full((64, waves), POISON << 32 | POISON, np.uint64)
        self.scc: Bools = np.zeros(waves, np.bool_)
        self.pairs[EXEC >> 1] = _FULL
        # [waves, 64]: number of the workgroup in the launch
        self.party: Any = np.zeros((waves, LANES), np.uint16)
        # register -> (group, low halves, high halves) as fp32, until the register is written
        self.halves: dict[int, tuple[Any, Any, Any]] = {}
        self.groups: dict[tuple[int, int, int], Group] = {}

    def group(self, start: int, stop: int, step: int) -> Group:
        """The waves start, start + step, ... below stop, with exec read anew."""
        key = (start, stop, step)
        found = self.groups.get(key)
        if found is None:
            found = self.groups[key] = Group(self, slice(start, stop, step))
        found.read_exec()
        return found


class Group:
    """Waves that execute the same instruction now; every attribute is a view into the machine."""

    def __init__(self, machine: Machine, which: slice) -> None:
        self.machine, self.which = machine, which
        self.v: list[Words] = [register[which] for register in machine.vectors]
        self.size: int = len(self.v[0])
        self.pair: list[Any] = [pair[which] for pair in machine.pairs]
        words = machine.pairs.view(np.uint32).reshape(64, machine.waves, 2)
        self.s: list[Words] = [words[index >> 1, which, index & 1] for index in range(128)]
        # the same, shaped to meet [waves, 64]
        self.column: list[Words] = [word[:, None] for word in self.s]
        self.scc: Bools = machine.scc[which]
        self.halves = machine.halves
        self.natural = machine.natural
        self.memory, self.lds, self.tally = machine.memory, machine.lds, machine.tally
        self.party = machine.party[which]
        self.lds_base = machine.lds.base[which]
        self.lds_mine = {unit: mine[which] for unit, mine in machine.lds.mine.items()}
        self.mask: Bools = np.ones((self.size, LANES), np.bool_)
        self.full = True

    def read_exec(self) -> None:
        """Refresh the lane mask after exec was written."""
        masks = self.pair[EXEC >> 1]
        self.full = bool((masks == _FULL).all())
        self.mask = unpack_mask(masks)

    def write_exec(self, masks: Any) -> None:
        """Set exec of every wave."""
        self.pair[EXEC >> 1][...] = masks
        self.read_exec()

    def put(self, register: int, words: Any) -> None:
        """Write the active lanes of a vector register."""
        if self.full:
            self.v[register][...] = words
        else:
            np.copyto(self.v[register], words, where=self.mask)
        self.halves.pop(register, None)

    def put_where(self, register: int, words: Any, lanes: Bools) -> None:
        """Write some lanes of a vector register."""
        np.copyto(self.v[register], words, where=lanes)
        self.halves.pop(register, None)

    def put_pair(self, register: int, words: Any) -> None:
        """Write 64-bit values to two vector registers."""
        self.put(register, (words & np.uint64(0xFFFFFFFF)).astype(np.uint32))
        self.put(register + 1, (words >> np.uint64(32)).astype(np.uint32))

    def half(self, register: int) -> tuple[Any, Any]:
        """Both fp16 halves of a vector register as fp32, kept until the register is written."""
        found = self.halves.get(register)
        if found is not None and found[0] is self:
            return found[1], found[2]
        low, high = widen(self.v[register])
        self.halves[register] = (self, low, high)
        return low, high


@functools.cache
def _halves_table() -> Any:
    """fp32 value of every fp16 pattern: one look-up is several times faster than NumPy's conversion."""
    return np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)


def widen_bits(bits: Any) -> Any:
    """fp16 bits in uint32 words -> fp32, exactly."""
    return _halves_table().take(bits)


def widen(words: Words) -> tuple[Any, Any]:
    """Low and high fp16 halves of words as fp32."""
    table = _halves_table()
    return table.take(words & np.uint32(0xFFFF)), table.take(words >> np.uint32(16))


def narrow(values: Any) -> Any:
    """fp32 or fp64 -> fp16 bits in uint32 words, round to nearest even."""
    return values.astype(np.float16).view(np.uint16).astype(np.uint32)
