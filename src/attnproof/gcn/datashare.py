"""LDS instructions: DS_READ, DS_WRITE and their two-address forms, DS_{B,}PERMUTE, DS_SWIZZLE, atomics.

"Vega" 7nm ISA, chapter "Data Share Operations" and "LDS & GDS instructions". The address is S0 + offset in bytes; the
two-address forms count their offsets in elements, or in 64 elements (ST64).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from attnproof.gcn.decode import Instruction
from attnproof.gcn.faults import UnknownInstruction
from attnproof.gcn.lds import Lds
from attnproof.gcn.operands import Step, raw32
from attnproof.gcn.wave import LANES, Group

U16 = np.uint32(0xFFFF)
_LANE = np.arange(LANES)
_LOAD = re.compile(r"^ds_read_(?:(b32|b64|b96|b128)|(u8|i8|u16|i16)(_d16|_d16_hi)?)$")
_STORE = re.compile(r"^ds_write_(?:(b32|b64|b96|b128)|(b8|b16)(_d16_hi)?)$")
_TWICE = re.compile(r"^ds_(read2|write2)(st64)?_b(32|64)$")
_ATOMIC = re.compile(r"^ds_(add|sub|rsub|min|max|and|or|xor|wrxchg)(_rtn)?_(u32|i32|b32|f32)$")


def _alignment(size: int) -> int:
    return 16 if size > 8 else size


def _flat(group: Group, matrix: Any) -> Any:
    """Active lanes of a [waves, 64] array, as a list."""
    return matrix.reshape(-1) if group.full else matrix[group.mask]


def _spread(group: Group, register: int, words: Any) -> None:
    """A list of active lanes back into a register."""
    if group.full:
        group.put(register, words.reshape(group.size, LANES))
    else:
        group.v[register][group.mask] = words
        group.halves.pop(register, None)


def _spread_narrow(
    group: Group, register: int, words: Any, size: int, signed: bool, form: str | None
) -> None:
    """Loaded bytes or halves into a register: extended to 32 bits, or (D16) into one half of it, keeping the other."""
    if signed:
        sign = np.uint32(1 << (8 * size - 1))
        words = (words ^ sign) - sign
    if form is not None:
        old = _flat(group, group.v[register])
        words = old & ~U16 | words & U16 if form == "_d16" else old & U16 | words << np.uint32(16)
    _spread(group, register, words)


def _places(group: Group, register: int, offset: int, size: int, load: bool, alignment: int) -> Any | None:
    """Checked byte places of the active lanes in the whole LDS, or None when there are none."""
    addresses = group.v[register].astype(np.int64) + np.int64(offset)
    active = _flat(group, addresses)
    if not active.size:
        return None
    group.lds.check(active, size, alignment)
    if group.tally is not None:
        group.tally.lds(addresses, group.mask, size, load)
    return _flat(group, addresses + group.lds_base)


def _words(group: Group, registers: list[int]) -> Any:
    """Registers of the active lanes as columns [lanes, registers]."""
    return np.stack([_flat(group, group.v[register]) for register in registers], axis=1)


def _load_wide(group: Group, places: Any, register: int, size: int, alignment: int) -> None:
    unit = Lds.unit_of(size, alignment)
    found = group.lds.load(places, _flat(group, group.lds_mine[unit]), unit, size // unit)
    columns = found.view(np.uint32)
    for k in range(size // 4):
        _spread(group, register + k, columns[:, k])


def _store_wide(group: Group, places: Any, register: int, size: int, alignment: int) -> None:
    unit = Lds.unit_of(size, alignment)
    words = _words(group, list(range(register, register + size // 4)))
    group.lds.store(
        places, _flat(group, group.lds_mine[unit]), words.view(np.uint64) if unit == 8 else words, unit
    )


def _load_narrow(made: Instruction, kind: str, form: str | None) -> Step:
    """DS_READ_{U8,I8,U16}: zero- or sign-extended; the D16 forms fill one half and keep the other."""
    size, signed = int(kind[1:]) // 8, kind[0] == "i"
    register, address, offset = made.operands[0].index, made.operands[1].index, made.number("offset")

    def step(group: Group) -> None:
        places = _places(group, address, offset, size, True, size)
        if places is not None:
            words = group.lds.load(places, _flat(group, group.lds_mine[size]), size, 1)[:, 0].astype(
                np.uint32
            )
            _spread_narrow(group, register, words, size, signed, form)

    return step


def _load(made: Instruction) -> Step | None:
    match = _LOAD.match(made.name)
    if match is None:
        return None
    if match[2]:
        return _load_narrow(made, match[2], match[3])
    size = int(match[1][1:]) // 8
    register, address, offset = made.operands[0].index, made.operands[1].index, made.number("offset")
    alignment = _alignment(size)

    def step(group: Group) -> None:
        places = _places(group, address, offset, size, True, alignment)
        if places is not None:
            _load_wide(group, places, register, size, alignment)

    return step


def _store(made: Instruction) -> Step | None:
    match = _STORE.match(made.name)
    if match is None:
        return None
    address, register, offset = made.operands[0].index, made.operands[1].index, made.number("offset")
    size = int((match[1] or match[2])[1:]) // 8
    alignment, shift = _alignment(size), np.uint32(16 if match[3] else 0)
    narrow: Any = {1: np.uint8, 2: np.uint16}.get(size)

    def step(group: Group) -> None:
        places = _places(group, address, offset, size, False, alignment)
        if places is None:
            return
        if narrow is None:
            _store_wide(group, places, register, size, alignment)
        else:
            units = (_flat(group, group.v[register]) >> shift).astype(narrow)[:, None]
            group.lds.store(places, _flat(group, group.lds_mine[size]), units, size)

    return step


def _twice(made: Instruction) -> Step | None:
    """DS_READ2, DS_WRITE2 (ST64): two elements at two offsets."""
    match = _TWICE.match(made.name)
    if match is None:
        return None
    size = int(match[3]) // 8
    pitch = size * (64 if match[2] else 1)
    offsets = [pitch * made.number("offset0"), pitch * made.number("offset1")]
    if match[1] == "read2":
        address, first = made.operands[1].index, made.operands[0].index
        registers = [first, first + size // 4]
    else:
        address, registers = made.operands[0].index, [made.operands[1].index, made.operands[2].index]
    load = match[1] == "read2"

    def step(group: Group) -> None:
        # both places are taken before the first register is written: the address may be one of them
        places = [_places(group, address, offset, size, load, size) for offset in offsets]
        for place, register in zip(places, registers, strict=True):
            if place is not None:
                (_load_wide if load else _store_wide)(group, place, register, size, size)

    return step


def _atomic_result(kind: str, number: str, value: Any, old: Any) -> Any:
    if number == "f32":
        a, b = old.view(np.float32), value.view(np.float32)
        return {"add": a + b, "min": np.fmin(a, b), "max": np.fmax(a, b)}[kind].view(np.uint32)
    if number == "i32":
        a, b = old.view(np.int32), value.view(np.int32)
        return (np.minimum if kind == "min" else np.maximum)(a, b).view(np.uint32)
    functions: dict[str, Any] = {
        "add": lambda: old + value,
        "sub": lambda: old - value,
        "rsub": lambda: value - old,
        "min": lambda: np.minimum(old, value),
        "max": lambda: np.maximum(old, value),
        "and": lambda: old & value,
        "or": lambda: old | value,
        "xor": lambda: old ^ value,
        "wrxchg": lambda: value,
    }
    return functions[kind]()


def _atomic(made: Instruction) -> Step | None:
    """DS_ADD and the like, lane after lane; atomics of different waves do not race with each other."""
    match = _ATOMIC.match(made.name)
    if match is None:
        return None
    kind, returns, number = match[1], bool(match[2]), match[3]
    skip = 1 if returns else 0
    address, register, offset = (
        made.operands[skip].index,
        made.operands[skip + 1].index,
        made.number("offset"),
    )

    def step(group: Group) -> None:
        places = _places(group, address, offset, 4, False, 4)
        if places is None:
            return
        values, olds = _flat(group, group.v[register]).copy(), np.empty(len(places), np.uint32)
        waves = _flat(group, group.lds_mine[1])
        for lane in range(len(places)):
            value = values[lane : lane + 1]
            result = partial(_atomic_result, kind, number, value)
            olds[lane] = group.lds.exchange(int(places[lane]), int(waves[lane]), result)
        if returns:
            _spread(group, made.operands[0].index, olds)

    return step


def _permute(made: Instruction) -> Step:
    """DS_BPERMUTE_B32 pulls from lane (address + offset) / 4 modulo 64, DS_PERMUTE_B32 pushes to it; inactive sources give 0."""
    register, pull = made.operands[0].index, made.name == "ds_bpermute_b32"
    address, data, offset = raw32(made.operands[1]), raw32(made.operands[2]), np.uint32(made.number("offset"))

    def step(group: Group) -> None:
        lanes = (
            np.broadcast_to(address(group), group.mask.shape) + offset >> np.uint32(2) & np.uint32(63)
        ).astype(np.int64)
        words = np.where(group.mask, data(group), np.uint32(0))
        if pull:
            group.put(register, np.take_along_axis(words, lanes, axis=1))
            return
        pushed: Any = np.zeros_like(words)
        # where several lanes push to one place the highest lane wins
        for lane in range(LANES):
            rows = np.nonzero(group.mask[:, lane])[0]
            pushed[rows, lanes[rows, lane]] = words[rows, lane]
        group.put(register, pushed)

    return step


def _swizzle_lanes(text: str) -> Any:
    """Source lanes of DS_SWIZZLE_B32: quad permutation, or and/or/xor masks inside 32 lanes."""
    match = re.match(r"^swizzle\((\w+),\s*(.*)\)$", text)
    if match is None:
        number = int(text, 0)
        if number & 0x8000:
            order = np.array([number >> 2 * k & 3 for k in range(4)])
            return (_LANE & ~3) + order[_LANE & 3]
        low = _LANE & 31
        return (_LANE & 32) + (((low & number & 31) | number >> 5 & 31) ^ number >> 10 & 31)
    kind, rest = match[1], match[2]
    low, half = _LANE & 31, _LANE & 32
    if kind == "QUAD_PERM":
        order = np.array([int(part) for part in rest.split(",")])
        return (_LANE & ~3) + order[_LANE & 3]
    if kind == "SWAP":
        return half + (low ^ int(rest))
    if kind == "REVERSE":
        return half + (low ^ int(rest) - 1)
    if kind == "BROADCAST":
        size, lane = (int(part) for part in rest.split(","))
        return half + (low & ~(size - 1)) + lane
    if kind == "BITMASK_PERM":
        mask = rest.strip('"')
        keep = int("".join("1" if letter in "pi" else "0" for letter in mask), 2)
        ones = int("".join("1" if letter == "1" else "0" for letter in mask), 2)
        flip = int("".join("1" if letter == "i" else "0" for letter in mask), 2)
        return half + ((low & keep | ones) ^ flip)
    raise UnknownInstruction(f"ds_swizzle_b32 {text!r} has no semantics here")


def _swizzle(made: Instruction) -> Step:
    """DS_SWIZZLE_B32: no memory is touched; an inactive source lane gives 0."""
    lanes, read, register = (
        _swizzle_lanes(made.modifiers.get("offset", "0")),
        raw32(made.operands[1]),
        made.operands[0].index,
    )

    def step(group: Group) -> None:
        words = np.where(group.mask, read(group), np.uint32(0))
        group.put(register, words[:, lanes])

    return step


_NAMED: dict[str, Callable[[Instruction], Step]] = {
    "ds_bpermute_b32": _permute,
    "ds_permute_b32": _permute,
    "ds_swizzle_b32": _swizzle,
    "ds_nop": lambda made: lambda group: None,
}


def build(made: Instruction) -> Step | None:
    """The step of an LDS instruction, or None."""
    if made.name in _NAMED:
        return _NAMED[made.name](made)
    return _load(made) or _store(made) or _twice(made) or _atomic(made)
