"""Which registers a memory operation still owns: a check that every s_waitcnt is there.

"Vega" 7nm ISA, section "Manually inserted wait states and s_waitcnt": VM_CNT counts vector memory in order; LGKM_CNT
counts LDS, scalar memory; LDS returns in order, scalar loads do not, so with one in flight only lgkmcnt(0) tells anything.
Flat instructions count on both and are in order with neither.

A register that is read or written while an operation in flight will still write it is an error. So is an LDS operation
left open at s_barrier: another wave could pass the barrier before it is done.

A state is a value (what is in flight); the step from one state over one instruction is computed once and kept, so
a wave's scoreboard is an automaton that costs one look-up per instruction.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from attnproof.gcn.decode import Instruction, Operand
from attnproof.gcn.faults import Hazard

_WAIT = re.compile(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)")
_VM_LIMIT, _LGKM_LIMIT = 63, 15
_SCALAR = 1000


@dataclass(frozen=True)
class Flight:
    """One operation in flight: its instruction, what it will write, and its kind ("vmem", "lds", "smem", "flat")."""

    at: int
    registers: frozenset[int]
    kind: str


@dataclass(frozen=True)
class State:
    """Operations in flight in issue order, one list per counter."""

    vm: tuple[Flight, ...] = ()
    lgkm: tuple[Flight, ...] = ()

    @property
    def empty(self) -> bool:
        """Nothing is in flight."""
        return not self.vm and not self.lgkm


def registers_of(operand: Operand) -> frozenset[int]:
    """Numbers of the registers an operand names."""
    if operand.kind not in "vs":
        return frozenset()
    base = operand.index + (_SCALAR if operand.kind == "s" else 0)
    return frozenset(range(base, base + operand.count))


# by text: kernels repeat themselves and each other
_TOUCHED: dict[str, frozenset[int]] = {}


def touched_by(made: Instruction) -> frozenset[int]:
    """Numbers of all registers an instruction names."""
    found = _TOUCHED.get(made.text)
    if found is None:
        if len(_TOUCHED) >= 1 << 16:
            _TOUCHED.clear()
        registers = (number for operand in made.operands for number in registers_of(operand))
        found = _TOUCHED[made.text] = frozenset(registers)
    return found


def sources_of(made: Instruction) -> frozenset[int]:
    """Numbers of the registers that a memory instruction reads: all of them where it returns nothing."""
    flight = flight_of(made)
    read = made.operands[1:] if flight is not None and flight.registers else made.operands
    return frozenset(number for operand in read for number in registers_of(operand))


def name_of(number: int) -> str:
    """v12, s3."""
    return f"v{number}" if number < _SCALAR else f"s{number - _SCALAR}"


def flight_of(made: Instruction) -> Flight | None:
    """What an instruction puts in flight, or None."""
    name = made.name
    if name.startswith(("global_", "buffer_", "scratch_", "flat_")):
        kind = "flat" if name.startswith("flat_") else "vmem"
        returns = "_load_" in name or ("_atomic_" in name and "glc" in made.modifiers)
    elif name.startswith("ds_"):
        kind, returns = "lds", "_read" in name or "_rtn" in name or "permute" in name or "swizzle" in name
    elif name.startswith(("s_load", "s_buffer_load", "s_memtime")):
        kind, returns = "smem", True
    else:
        return None
    return Flight(made.address, registers_of(made.operands[0]) if returns else frozenset(), kind)


class Scoreboard:
    """The automaton over one kernel's instructions."""

    def __init__(self, instructions: tuple[Instruction, ...]) -> None:
        self.instructions = instructions
        self.flights = [flight_of(made) for made in instructions]
        self.touched = [touched_by(made) for made in instructions]
        # instructions that change the state, or end it
        self.tracks = [
            flight is not None or made.name in ("s_waitcnt", "s_barrier")
            for made, flight in zip(instructions, self.flights, strict=True)
        ]
        self.states: list[State] = [State()]
        self._numbers: dict[State, int] = {State(): 0}
        self._steps: dict[tuple[int, int], int] = {}
        self._by_address = {made.address: made for made in instructions}

    def step(self, state: int, at: int) -> int:
        """State number after instruction `at`; raises Hazard."""
        key = (state, at)
        found = self._steps.get(key)
        if found is None:
            after = self._advance(self.states[state], at)
            found = self._numbers.get(after)
            if found is None:
                found = self._numbers[after] = len(self.states)
                self.states.append(after)
            self._steps[key] = found
        return found

    def _advance(self, state: State, at: int) -> State:
        made, flight = self.instructions[at], self.flights[at]
        if made.name == "s_waitcnt":
            return self._wait(state, made.modifiers["raw"])
        for counter, flights in (("vmcnt", state.vm), ("lgkmcnt", state.lgkm)):
            for owner in flights:
                # results of one kind come back in order: a second load into the same register is the later one
                ordered = flight is not None and flight.kind == owner.kind and flight.kind in ("vmem", "lds")
                wrong = owner.registers & (sources_of(made) if ordered else self.touched[at])
                if wrong:
                    names = ", ".join(name_of(number) for number in sorted(wrong))
                    source = self._by_address[owner.at]
                    raise Hazard(
                        f"{names}: used before s_waitcnt {counter} covers {source.text!r} at {owner.at:#x}"
                    )
        if made.name == "s_barrier":
            for owner in state.lgkm:
                if owner.kind == "lds":
                    source = self._by_address[owner.at]
                    raise Hazard(
                        f"s_barrier with an LDS operation in flight: {source.text!r} at {owner.at:#x}"
                    )
        if flight is None:
            return state
        return self._issue(state, flight)

    @staticmethod
    def _issue(state: State, flight: Flight) -> State:
        vm, lgkm = state.vm, state.lgkm
        if flight.kind in ("vmem", "flat"):
            # a full counter stalls the issue until the oldest is done
            vm = (*vm, flight)[-_VM_LIMIT:]
        if flight.kind != "vmem":
            lgkm = (*lgkm, flight)
            if len(lgkm) > _LGKM_LIMIT and all(other.kind == "lds" for other in lgkm):
                lgkm = lgkm[-_LGKM_LIMIT:]
        return State(vm, lgkm)

    @staticmethod
    def _wait(state: State, raw: str) -> State:
        counts = {name: int(number) for name, number in _WAIT.findall(raw)}
        if not counts and raw.strip():
            # a bare number: all fields packed, as in an edited fixture
            packed = int(raw, 0)
            counts = {"vmcnt": packed & 15 | packed >> 10 & 48, "lgkmcnt": packed >> 8 & 15}
        vm, lgkm = state.vm, state.lgkm
        left = counts.get("vmcnt", _VM_LIMIT)
        if left == 0 or not any(flight.kind == "flat" for flight in vm):
            vm = vm[len(vm) - left :] if len(vm) > left else vm
        left = counts.get("lgkmcnt", _LGKM_LIMIT)
        if left == 0 or all(flight.kind == "lds" for flight in lgkm):
            lgkm = lgkm[len(lgkm) - left :] if len(lgkm) > left else lgkm
        return State(vm, lgkm)
