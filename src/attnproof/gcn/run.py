"""Launch a kernel: initial registers, workgroups in batches, waves in lockstep or one by one.

Initial state as in LLVM's "User Guide for AMDGPU Backend", section "Initial Kernel Execution State", for code object V3 to
V5 on gfx906. In lockstep all waves at the lowest program counter go together (`Group`); waves that branched ahead wait
for the others there. The other orders run each wave to its barrier, one after the other.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attnproof.errors import ShapeError, expected
from attnproof.gcn import program as programs
from attnproof.gcn.codeobject import CodeObject, KernelInfo
from attnproof.gcn.counts import CLASSES, Counts, Tally, class_of
from attnproof.gcn.faults import BarrierDivergence, Fault
from attnproof.gcn.lds import Lds
from attnproof.gcn.memory import Memory
from attnproof.gcn.program import BARRIER, BRANCH, JUMP, PLAIN, Program
from attnproof.gcn.wave import LANES, Machine

ORDERS = ("lockstep", "forward", "reverse", "random")
Extent = tuple[int, int, int]
RUNNING, WAITING, ENDED = range(3)


@dataclass(frozen=True)
class Launch:
    """What every batch of one launch shares."""

    program: Program
    grid: Extent
    block: Extent
    kernarg: int
    packet: int
    memory: Memory
    order: str
    rng: random.Random
    tally: Tally | None
    races: bool
    natural: bool

    @property
    def waves(self) -> int:
        """Waves per workgroup."""
        return -(-self.block[0] * self.block[1] * self.block[2] // LANES)


class Batch:
    """Some workgroups of a launch, from their first instruction to their last."""

    def __init__(
        self, launch: Launch, groups: list[Extent], first: int, executed: npt.NDArray[np.int64]
    ) -> None:
        self.launch, self.groups, self.executed = launch, groups, executed
        self.program = launch.program
        kernel, count = self.program.kernel, len(groups) * launch.waves
        lds = Lds(len(groups), launch.waves, kernel.lds_bytes, races=launch.races)
        self.machine = Machine(count, kernel.vgprs, launch.memory, lds, launch.tally, launch.natural)
        self.machine.party[...] = (first + np.arange(count) // launch.waves)[:, None]
        self.counter: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        self.status: npt.NDArray[np.int8] = np.zeros(count, np.int8)
        self.board: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        self._fill()

    def _fill(self) -> None:
        """Registers at entry."""
        machine, launch, kernel = self.machine, self.launch, self.program.kernel
        words = machine.pairs.view(np.uint32).reshape(64, machine.waves, 2)

        def scalar(index: int, value: Any) -> None:
            words[index >> 1, :, index & 1] = value

        at = 0
        for bit, size, value in (
            (0, 4, 0),
            (1, 2, launch.packet),
            (2, 2, 0),
            (3, 2, launch.kernarg),
            (4, 2, 0),
            (5, 2, 0),
            (6, 1, 0),
        ):
            if kernel.properties >> bit & 1:
                scalar(at, value & 0xFFFFFFFF)
                if size == 2:
                    scalar(at + 1, value >> 32)
                at += size
        at = kernel.user_sgprs
        places = np.repeat(np.array(self.groups, np.uint32), launch.waves, axis=0)
        for axis in range(3):
            if kernel.rsrc2 >> (7 + axis) & 1:
                scalar(at, places[:, axis])
                at += 1
        self._fill_lanes()

    def _fill_lanes(self) -> None:
        """v0, v1, v2: the work item's place in its workgroup; lanes past the last work item are inactive."""
        machine, launch, kernel = self.machine, self.launch, self.program.kernel
        x, y, z = launch.block
        item = np.tile(np.arange(launch.waves * LANES).reshape(launch.waves, LANES), (len(self.groups), 1))
        places = (item % x, item // x % y, item // (x * y))
        for axis in range(1 + (kernel.rsrc2 >> 11 & 3)):
            machine.vectors[axis] = places[axis]
        active = item < x * y * z
        machine.pairs[63] = np.packbits(active, axis=1, bitorder="little").view(np.uint64)[:, 0]

    def _where(self, wave: int) -> str:
        group, inside = divmod(wave, self.launch.waves)
        return f"workgroup {self.groups[group]}, wave {inside}"

    def run(self) -> None:
        """To the end of every wave."""
        if self.launch.order == "lockstep":
            while (chosen := self._lowest()) is not None:
                self._execute(*chosen)
                self._meet()
            return
        while True:
            ready = [int(wave) for wave in np.nonzero(self.status == RUNNING)[0]]
            if not ready:
                return
            if self.launch.order == "reverse":
                ready.reverse()
            elif self.launch.order == "random":
                self.launch.rng.shuffle(ready)
            for wave in ready:
                while self.status[wave] == RUNNING:
                    self._execute(wave, wave + 1, 1, len(self.program.steps))
            self._meet()

    def _lowest(self) -> tuple[int, int, int, int] | None:
        """Waves at the lowest program counter as start, stop, step; and the counter at which others wait."""
        running = np.nonzero(self.status == RUNNING)[0]
        if not len(running):
            return None
        counters = self.counter[running]
        low = counters.min()
        here = running[counters == low]
        others = counters[counters > low]
        limit = int(others.min()) if len(others) else len(self.program.steps)
        start, stop, step = _progression(here, self.launch.waves)
        return start, stop, step, limit

    def _execute(self, start: int, stop: int, step: int, limit: int) -> None:
        """Run a group until it parts, meets waves ahead, waits or ends."""
        program, board = self.program, self.program.board
        steps, kinds, tracks = program.steps, program.kind, board.tracks
        group = self.machine.group(start, stop, step)
        which = slice(start, stop, step)
        here = int(self.counter[start])
        entered = here
        state, mixed = self._state(which)
        try:
            while True:
                if mixed:
                    state, mixed = self._step_mixed(which, here)
                elif state or tracks[here]:
                    state = board.step(state, here)
                kind = kinds[here]
                if kind == PLAIN:
                    steps[here](group)
                    here += 1
                    if here < limit:
                        continue
                    break
                self._count(entered, here + 1, group.size)
                ahead, alive = self._branch(which, group, here, kind)
                here = entered = ahead
                if not alive or here >= limit:
                    entered = here
                    break
        except Fault as fault:
            made = program.instructions[here]
            wave = next(iter(range(start, stop, step)))
            several = f" and {group.size - 1} more in lockstep" if group.size > 1 else ""
            raise fault.at(made.address, made.text, self._where(wave) + several) from None
        if entered != here:
            self._count(entered, here, group.size)
        if here >= 0:
            self.counter[which] = here
        if not mixed:
            self.board[which] = state

    def _count(self, first: int, end: int, waves: int) -> None:
        self.executed[first] += waves
        self.executed[end] -= waves

    def _state(self, which: slice) -> tuple[int, bool]:
        states = self.board[which]
        return int(states[0]), bool((states != states[0]).any())

    def _step_mixed(self, which: slice, here: int) -> tuple[int, bool]:
        """Waves with different histories: each state takes its own step."""
        states = self.board[which]
        for state in np.unique(states):
            after = self.program.board.step(int(state), here)
            self.board[which][states == state] = -1 - after
        self.board[which] = -1 - self.board[which]
        return self._state(which)

    def _branch(self, which: slice, group: Any, here: int, kind: int) -> tuple[int, bool]:
        """(next instruction, whether the group still runs together); -1 when the counters are already set."""
        if kind == JUMP:
            return self.program.target[here], True
        if kind == BRANCH:
            taken = self.program.condition[here](group)
            agreed = programs.uniform(taken)
            if agreed is None:
                self.counter[which] = np.where(taken, self.program.target[here], here + 1)
                return -1, False
            return (self.program.target[here] if agreed else here + 1), True
        self.counter[which] = here + 1 if kind == BARRIER else here
        self.status[which] = WAITING if kind == BARRIER else ENDED
        return -1, False

    def _meet(self) -> None:
        """Release workgroups whose waves all wait at one barrier; anything else is a divergence."""
        if not (self.status == WAITING).any():
            return
        per_group = self.status.reshape(len(self.groups), self.launch.waves)
        counters = self.counter.reshape(per_group.shape)
        for group in np.nonzero((per_group == WAITING).any(axis=1) & (per_group != RUNNING).all(axis=1))[0]:
            waiting = counters[group][per_group[group] == WAITING]
            places = [self.program.instructions[int(at) - 1].address for at in np.unique(waiting)]
            if len(waiting) != self.launch.waves:
                ended = int(np.nonzero(per_group[group] == ENDED)[0][0])
                reason = f"waves wait at the barrier at {places[0]:#x}, but wave {ended} has ended"
                raise BarrierDivergence(f"workgroup {self.groups[group]}: {reason}")
            if len(places) > 1:
                text = " and ".join(f"{place:#x}" for place in places)
                raise BarrierDivergence(
                    f"workgroup {self.groups[group]}: its waves wait at different barriers: {text}"
                )
            per_group[group] = RUNNING
            self.machine.lds.barrier(int(group))


def _progression(waves: Any, per_group: int) -> tuple[int, int, int]:
    """The longest run start, start + step, ... at the front of a sorted list, with step 1 or one workgroup."""
    best = (int(waves[0]), int(waves[0]) + 1, 1)
    count = 1
    present = {int(wave) for wave in waves}
    for step in {1, per_group}:
        last = int(waves[0])
        while last + step in present:
            last += step
        length = (last - int(waves[0])) // step + 1
        if length > count:
            best, count = (int(waves[0]), last + 1, step), length
    return best


def _hidden(kernel: KernelInfo, kernarg: bytes, grid: Extent, block: Extent) -> bytearray:
    """The kernel argument segment: the caller's bytes, then the hidden arguments that the metadata names."""
    segment = bytearray(max(kernel.kernarg_size, len(kernarg)))
    segment[: len(kernarg)] = kernarg
    values = {
        "hidden_grid_dims": 1 + (grid[1] * block[1] > 1 or grid[2] * block[2] > 1) + (grid[2] * block[2] > 1)
    }
    for axis, letter in enumerate("xyz"):
        values[f"hidden_block_count_{letter}"] = grid[axis]
        values[f"hidden_group_size_{letter}"] = block[axis]
        values[f"hidden_remainder_{letter}"] = 0
        values[f"hidden_global_offset_{letter}"] = 0
    for argument in kernel.arguments:
        kind, offset, size = argument[".value_kind"], argument[".offset"], argument[".size"]
        if kind in values and offset + size <= len(segment):
            segment[offset : offset + size] = values[kind].to_bytes(size, "little")
    return segment


def _explicit_size(kernel: KernelInfo) -> int:
    shown = [
        a[".offset"] + a[".size"] for a in kernel.arguments if not a[".value_kind"].startswith("hidden_")
    ]
    return max(shown, default=0)


def _check(kernel: KernelInfo, grid: Extent, block: Extent, kernarg: bytes, order: str) -> None:
    if order not in ORDERS:
        raise ShapeError(expected("order", f"one of {ORDERS}", repr(order)))
    if min(grid) < 1 or min(block) < 1:
        raise ShapeError(expected("grid, block", "three sizes of at least 1", f"{grid}, {block}"))
    items = block[0] * block[1] * block[2]
    if items > kernel.max_flat_workgroup_size:
        raise ShapeError(expected("block", f"at most {kernel.max_flat_workgroup_size} work items", items))
    if len(kernarg) < _explicit_size(kernel) or len(kernarg) > kernel.kernarg_size:
        wanted = f"{_explicit_size(kernel)} to {kernel.kernarg_size} bytes"
        raise ShapeError(expected("kernarg", wanted, f"{len(kernarg)} bytes"))
    if kernel.scratch_bytes:
        raise ShapeError(expected("kernel", "no scratch memory", f"{kernel.scratch_bytes} bytes per lane"))


def launch(
    code: CodeObject,
    kernel: str,
    *,
    grid: Extent,
    block: Extent,
    kernarg: bytes,
    memory: Memory,
    order: str = "lockstep",
    seed: int = 0,
    counts: bool = True,
    races: bool = True,
    alignment: str = "dword",
    batch_waves: int = 64,
) -> Counts:
    """Run a kernel to its end, or raise the `Fault` that stopped it.

    Args:
        code: a loaded code object.
        kernel: name of a kernel in it.
        grid: workgroups in x, y, z.
        block: work items per workgroup in x, y, z.
        kernarg: the explicit arguments, packed; hidden ones are filled in.
        memory: what the kernel's pointers point into.
        order: "lockstep", or waves one by one to each barrier: "forward", "reverse", "random".
        seed: of the random order.
        counts: count bank conflicts and cache lines too (about as costly as the execution itself).
        races: run the race detectors: waves in LDS, workgroups in global memory.
        alignment: "dword" (the ISA's rule for global memory) or "natural" (the whole width, up to 16 bytes).
        batch_waves: waves that run at once; more is faster until the caches are full.

    Returns:
        `Counts`.
    """
    if alignment not in ("dword", "natural"):
        raise ShapeError(expected("alignment", "'dword' or 'natural'", repr(alignment)))
    program = programs.prepare(code, kernel)
    info = program.kernel
    _check(info, grid, block, kernarg, order)
    segment = np.frombuffer(bytes(_hidden(info, kernarg, grid, block)), np.uint8)
    packet = struct.pack(
        "<4H2x6I",
        0,
        0,
        block[0],
        block[1],
        block[2],
        *(g * b for g, b in zip(grid, block, strict=True)),
        0,
        0,
    )[:40].ljust(64, b"\0")
    tally = Tally() if counts else None
    shared = Launch(
        program=program,
        grid=grid,
        block=block,
        kernarg=memory.place(segment, name="kernarg") if len(segment) else 0,
        packet=memory.place(np.frombuffer(packet, np.uint8), name="dispatch packet"),
        memory=memory,
        order=order,
        rng=random.Random(seed),
        tally=tally,
        races=races,
        natural=alignment == "natural",
    )
    # x slowest: workgroups with the same trip count are neighbours, so they stay in one progression
    groups = [(x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]
    size = max(1, batch_waves // shared.waves) if order == "lockstep" else 1
    executed: npt.NDArray[np.int64] = np.zeros(len(program.steps) + 1, np.int64)
    memory.watch(groups, races)
    with np.errstate(all="ignore"):
        for first in range(0, len(groups), size):
            Batch(shared, groups[first : first + size], first, executed).run()
    return _summary(program, np.cumsum(executed[:-1]), len(groups), tally)


def _summary(program: Program, executed: Any, workgroups: int, tally: Tally | None) -> Counts:
    classes: dict[str, int] = dict.fromkeys(CLASSES, 0)
    mnemonics: dict[str, int] = {}
    for made, count in zip(program.instructions, executed, strict=True):
        classes[class_of(made)] += int(count)
        if count:
            mnemonics[made.mnemonic] = mnemonics.get(made.mnemonic, 0) + int(count)
    traffic = tally or Tally()
    return Counts(
        instructions=int(executed.sum()),
        classes=classes,
        mnemonics=dict(sorted(mnemonics.items(), key=lambda item: -item[1])),
        executed={
            made.address: int(count) for made, count in zip(program.instructions, executed, strict=True)
        },
        workgroups=workgroups,
        lds_read_cycles=traffic.lds_read,
        lds_read_cycles_free=traffic.lds_read_free,
        lds_write_cycles=traffic.lds_write,
        lds_write_cycles_free=traffic.lds_write_free,
        load_lines=traffic.load_lines,
        store_lines=traffic.store_lines,
        load_bytes=traffic.load_bytes,
        store_bytes=traffic.store_bytes,
        traffic=tally is not None,
    )
