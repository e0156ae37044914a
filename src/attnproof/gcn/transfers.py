"""Global and scalar memory instructions ("Vega" 7nm ISA, chapters "Scalar Memory", "Vector Memory", "Flat Memory").

Address of a global access: VGPR pair + offset, or scalar pair + 32-bit VGPR + offset. Scalar addresses are rounded
down to a dword.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from attnproof.gcn.datashare import _flat, _spread, _spread_narrow
from attnproof.gcn.decode import Instruction, Operand
from attnproof.gcn.faults import UnknownInstruction
from attnproof.gcn.operands import Step, raw64
from attnproof.gcn.scalar import scalar_source
from attnproof.gcn.wave import Group

_WIDE = re.compile(r"^(?:global|flat)_(load|store)_dword(?:x([234]))?$")
_NARROW_LOAD = re.compile(r"^(?:global|flat)_load_(ubyte|sbyte|ushort|sshort|short)(_d16|_d16_hi)?$")
_NARROW_STORE = re.compile(r"^(?:global|flat)_store_(byte|short)(_d16_hi)?$")
_ATOMIC = re.compile(r"^(?:global|flat)_atomic_(swap|cmpswap|add|sub|smin|umin|smax|umax|and|or|xor)$")


def _addresses(made: Instruction, vector: Operand, scalar: Operand | None) -> Callable[[Group], Any]:
    """Byte addresses [waves, 64] int64."""
    offset = np.int64(made.number("offset"))
    if scalar is None or scalar.kind == "word":
        wide = raw64(vector)
        return lambda group: wide(group).view(np.int64) + offset
    base, index = raw64(scalar), vector.index
    return lambda group: base(group).view(np.int64) + (group.v[index].astype(np.int64) + offset)


def _alignment(group: Group, size: int) -> int:
    """ISA rule: a dword or more at dword addresses; `natural`: at multiples of the whole width."""
    if not group.natural:
        return min(size, 4)
    return 16 if size > 8 else size


def _reach(group: Group, read: Callable[[Group], Any], size: int, load: bool) -> Any | None:
    """Addresses of the active lanes, counted; None when no lane is active."""
    addresses = read(group)
    active = _flat(group, addresses)
    if not active.size:
        return None
    if group.tally is not None:
        group.tally.vmem(addresses, group.mask, size, load)
    return active


def _parties(group: Group) -> Any:
    """Workgroup numbers of the active lanes."""
    return _flat(group, group.party)


def _split(made: Instruction, load: bool) -> tuple[Operand, Operand, Operand | None]:
    """(data, address, scalar base) operands."""
    first, second = made.operands[0], made.operands[1]
    data, vector = (first, second) if load else (second, first)
    return data, vector, made.operands[2] if len(made.operands) > 2 else None


def _wide(made: Instruction) -> Step | None:
    match = _WIDE.match(made.name)
    if match is None:
        return None
    load, count = match[1] == "load", int(match[2] or 1)
    data, vector, scalar = _split(made, load)
    read, register = _addresses(made, vector, scalar), data.index

    def load_step(group: Group) -> None:
        active = _reach(group, read, 4 * count, True)
        if active is not None:
            columns = group.memory.load(active, 4, count, _alignment(group, 4 * count), _parties(group))
            for k, column in enumerate(columns):
                _spread(group, register + k, column)

    def store_step(group: Group) -> None:
        active = _reach(group, read, 4 * count, False)
        if active is not None:
            columns = [_flat(group, group.v[register + k]) for k in range(count)]
            group.memory.store(active, 4, columns, _alignment(group, 4 * count), _parties(group))

    return load_step if load else store_step


def _narrow_load(made: Instruction) -> Step | None:
    """Bytes and shorts, zero- or sign-extended to 32 bits, or to one half of the register (D16)."""
    match = _NARROW_LOAD.match(made.name)
    if match is None:
        return None
    size, signed, form = (
        (1 if "byte" in match[1] else 2),
        match[1][0] == "s" and match[1] != "short",
        match[2],
    )
    data, vector, scalar = _split(made, True)
    read, register = _addresses(made, vector, scalar), data.index

    def step(group: Group) -> None:
        active = _reach(group, read, size, True)
        if active is not None:
            words = group.memory.load(active, size, 1, size, _parties(group))[0]
            _spread_narrow(group, register, words, size, signed, form)

    return step


def _narrow_store(made: Instruction) -> Step | None:
    match = _NARROW_STORE.match(made.name)
    if match is None:
        return None
    size, shift = (1 if match[1] == "byte" else 2), np.uint32(16 if match[2] else 0)
    data, vector, scalar = _split(made, False)
    read, register, bits = _addresses(made, vector, scalar), data.index, np.uint32((1 << 8 * size) - 1)

    def step(group: Group) -> None:
        active = _reach(group, read, size, False)
        if active is not None:
            words = _flat(group, group.v[register]) >> shift & bits
            group.memory.store(active, size, [words], size, _parties(group))

    return step


def _atomic_value(kind: str, old: int, value: int, compare: int) -> int:
    def signed(word: int) -> int:
        return word - (word >> 31 << 32)

    functions: dict[str, Callable[[], int]] = {
        "swap": lambda: value,
        "cmpswap": lambda: value if old == compare else old,
        "add": lambda: old + value,
        "sub": lambda: old - value,
        "umin": lambda: min(old, value),
        "umax": lambda: max(old, value),
        "smin": lambda: min(old, value, key=signed),
        "smax": lambda: max(old, value, key=signed),
        "and": lambda: old & value,
        "or": lambda: old | value,
        "xor": lambda: old ^ value,
    }
    return functions[kind]() & 0xFFFFFFFF


def _atomic(made: Instruction) -> Step | None:
    """GLOBAL_ATOMIC on dwords, lane after lane; with glc the old value comes back."""
    match = _ATOMIC.match(made.name)
    if match is None:
        return None
    kind, returns = match[1], "glc" in made.modifiers
    skip = 1 if returns else 0
    vector, data = made.operands[skip], made.operands[skip + 1]
    scalar = made.operands[skip + 2] if len(made.operands) > skip + 2 else None
    read = _addresses(made, vector, scalar)

    def step(group: Group) -> None:
        active = _reach(group, read, 4, False)
        if active is None:
            return
        values = _flat(group, group.v[data.index]).copy()
        compare = _flat(group, group.v[data.index + 1]).copy() if kind == "cmpswap" else values
        olds, parties = np.empty(len(active), np.uint32), _parties(group)
        for lane in range(len(active)):
            group.memory.atomic(int(active[lane]), int(parties[lane]))
            place = active[lane : lane + 1]
            olds[lane] = group.memory.load(place, 4, 1, 4)[0][0]
            after = _atomic_value(kind, int(olds[lane]), int(values[lane]), int(compare[lane]))
            group.memory.store(place, 4, [np.array([after], np.uint32)], 4)
        if returns:
            _spread(group, made.operands[0].index, olds)

    return step


def _scalar_load(made: Instruction) -> Step | None:
    """S_LOAD_DWORD{X2,X4,X8,X16}: base pair + offset (immediate or SGPR)."""
    match = re.match(r"^s_load_dword(?:x(2|4|8|16))?$", made.name)
    if match is None:
        return None
    count, first = int(match[1] or 1), made.operands[0].index
    base = scalar_source(made.operands[1], wide=True)
    given = made.operands[2:]
    offset = scalar_source(given[0]) if given else None
    signed = bool(given) and given[0].kind == "imm"
    extra = np.int64(made.number("offset"))

    def step(group: Group) -> None:
        addresses = base(group).view(np.int64) + extra
        if offset is not None:
            found = offset(group)
            addresses = addresses + (found.view(np.int32) if signed else found).astype(np.int64)
        addresses = np.broadcast_to(addresses, (group.size,)) & ~np.int64(3)
        for k, column in enumerate(group.memory.load(addresses, 4, count, 4, group.party[:, 0])):
            group.s[first + k][...] = column

    return step


def _scalar_buffer_load(made: Instruction) -> Step | None:
    """S_BUFFER_LOAD_DWORD*: through a resource of base (48 bits), stride and records; a dword past the end reads 0."""
    match = re.match(r"^s_buffer_load_dword(?:x(2|4|8|16))?$", made.name)
    if match is None:
        return None
    count, first, resource = int(match[1] or 1), made.operands[0].index, made.operands[1].index
    offset = scalar_source(made.operands[2])

    def step(group: Group) -> None:
        stride = (group.s[resource + 1] >> np.uint32(16) & np.uint32(0x3FFF)).astype(np.int64)
        base = (group.pair[resource >> 1] & np.uint64((1 << 48) - 1)).view(np.int64)
        bytes_held = group.s[resource + 2].astype(np.int64) * np.maximum(stride, 1)
        at = np.broadcast_to(offset(group), (group.size,)).astype(np.int64) & ~np.int64(3)
        for k in range(count):
            inside = at + 4 * k + 4 <= bytes_held
            words: Any = np.zeros(group.size, np.uint32)
            if inside.any():
                words[inside] = group.memory.load((base + at + 4 * k)[inside], 4, 1, 4)[0]
            group.s[first + k][...] = words

    return step


def build(made: Instruction) -> Step | None:
    """The step of a global or scalar memory instruction, or None."""
    if "lds" in made.modifiers:
        raise UnknownInstruction(f"{made.text!r}: loads into LDS have no semantics here")
    for builder in (_wide, _narrow_load, _narrow_store, _atomic, _scalar_load, _scalar_buffer_load):
        step = builder(made)
        if step is not None:
            return step
    return None
