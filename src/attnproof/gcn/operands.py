"""Where an instruction's values come from and go to: typed sources with modifiers, DPP and SDWA, and destinations.

"Vega" 7nm ISA, sections "Vector ALU operations: instruction inputs", "SDWA" and "Data-parallel primitives (DPP)".
A source is a function of the `Group` that returns an array which broadcasts to `[waves, 64]`.

Types: u uint32, i int32, f fp32, h fp16 (as fp32), w uint16 (as uint32), x int16 (as int32),
q uint64 pair, l int64 pair, d fp64 pair.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from attnproof.gcn.decode import EXEC, Instruction, Operand
from attnproof.gcn.faults import UnknownInstruction
from attnproof.gcn.wave import LANES, Bools, Group, narrow, widen_bits

Source = Callable[[Group], Any]
Step = Callable[[Group], None]
U16, U32, SIGN = np.uint32(0xFFFF), np.uint32(0xFFFFFFFF), np.uint32(0x80000000)
_LANE = np.arange(LANES)
_SIGN_BIT = {"h": 0x8000, "w": 0x8000, "x": 0x8000}
# selection of SDWA -> (shift, mask, sign bit)
_SELECT = {
    **{f"BYTE_{k}": (8 * k, 0xFF, 0x80) for k in range(4)},
    "WORD_0": (0, 0xFFFF, 0x8000),
    "WORD_1": (16, 0xFFFF, 0x8000),
}


def constant(value: int, dtype: Any = np.uint32) -> Source:
    """The same value in every lane."""
    fixed: Any = np.full((1, 1), value, dtype)
    fixed.flags.writeable = False
    return lambda group: fixed


def _scalar_column(index: int) -> Source:
    return lambda group: group.column[index]


def _vector(index: int) -> Source:
    return lambda group: group.v[index]


def raw32(operand: Operand, kind: str = "u") -> Source:
    """The 32 bits of a source, before modifiers."""
    if operand.kind == "v":
        return _vector(operand.index)
    if operand.kind == "s":
        return _scalar_column(operand.index)
    if operand.kind == "imm":
        return constant(operand.patterns[0 if kind in "hwx" else 1])
    if operand.text in ("scc", "src_scc"):
        return lambda group: group.scc[:, None].astype(np.uint32)
    raise UnknownInstruction(f"operand {operand.text!r} has no semantics here")


def raw64(operand: Operand) -> Source:
    """The 64 bits of a source pair."""
    if operand.kind == "v":
        low, high = operand.index, operand.index + 1
        return lambda group: group.v[low].astype(np.uint64) | group.v[high].astype(np.uint64) << np.uint64(32)
    if operand.kind == "s":
        if operand.index & 1:
            raise UnknownInstruction(f"operand {operand.text!r}: an odd scalar pair")
        pair = operand.index >> 1
        return lambda group: group.pair[pair][:, None]
    return constant(operand.patterns[2], np.uint64)


def _modified(read: Source, operand: Operand, kind: str) -> Source:
    sign = np.uint32(_SIGN_BIT.get(kind, 0x80000000))
    if operand.abs:
        before = read
        read = lambda group: before(group) & ~sign  # noqa: E731
    if operand.neg:
        inner = read
        read = lambda group: inner(group) ^ sign  # noqa: E731
    return read


def _selected(read: Source, chosen: str, signed: bool) -> Source:
    if chosen == "DWORD":
        return read
    shift, mask, sign = (np.uint32(part) for part in _SELECT[chosen])
    if not signed:
        return lambda group: read(group) >> shift & mask
    return lambda group: ((read(group) >> shift & mask) ^ sign) - sign


def flush(values: Any) -> Any:
    """Denormal fp32 to zero of the same sign."""
    return np.where(np.abs(values) < np.float32(2.0**-126), np.copysign(np.float32(0), values), values)


def _typed(read: Source, kind: str, flushing: bool) -> Source:
    if kind == "u":
        return read
    if kind == "w":
        return lambda group: read(group) & U16
    if kind == "x":
        return lambda group: (read(group) << np.uint32(16)).view(np.int32) >> np.int32(16)
    if kind == "i":
        return lambda group: read(group).view(np.int32)
    if kind == "h":
        return lambda group: widen_bits(read(group) & U16)
    if flushing:
        return lambda group: flush(read(group).view(np.float32))
    return lambda group: read(group).view(np.float32)


def source(made: Instruction, index: int, kind: str, flushing: bool = False) -> Source:
    """Source number `index` (operands[index]) as a type, with its modifiers, SDWA selection and op_sel."""
    operand = made.operands[index]
    if kind in "qld":
        wide = raw64(operand)
        if kind == "d":
            return _double(operand, wide)
        return wide if kind == "q" else lambda group: wide(group).view(np.int64)
    read = raw32(operand, kind)
    # carry instructions write a lane mask too, as their second operand
    number = index - (2 if "_co_" in made.name else 1)
    if made.encoding == "dpp" and number == 0:
        read = dpp_source(made, read)
    if made.encoding == "sdwa":
        read = _selected(read, made.modifiers.get(f"src{number}_sel", "DWORD"), operand.sext)
    elif kind in "hwx" and "op_sel" in made.modifiers and made.bits("op_sel", 4, 0)[index - 1]:
        low = read
        read = lambda group: low(group) >> np.uint32(16)  # noqa: E731
    return _typed(_modified(read, operand, kind), kind, flushing)


def _double(operand: Operand, wide: Source) -> Source:
    sign = np.uint64(1 << 63)
    clear, flip = (~sign if operand.abs else ~np.uint64(0)), (sign if operand.neg else np.uint64(0))
    if not (operand.abs or operand.neg):
        return lambda group: wide(group).view(np.float64)
    return lambda group: ((wide(group) & clear) ^ flip).view(np.float64)


def _dpp_lanes(made: Instruction) -> tuple[Any, Bools]:
    """Source lane of every lane, and whether it lies inside its row ("Vega" 7nm ISA, table "DPP operations")."""
    row, at = _LANE & ~15, _LANE & 15
    for name, value in made.modifiers.items():
        if name == "quad_perm":
            order = np.array([int(part) for part in value.strip("[]").split(",")])
            return (_LANE & ~3) + order[_LANE & 3], np.ones(LANES, np.bool_)
        if name == "row_mirror":
            return row + 15 - at, np.ones(LANES, np.bool_)
        if name == "row_half_mirror":
            return (_LANE & ~7) + 7 - (_LANE & 7), np.ones(LANES, np.bool_)
        if name in ("row_shl", "row_shr"):
            wanted = at + int(value) * (1 if name == "row_shl" else -1)
            return row + (wanted & 15), (wanted >= 0) & (wanted < 16)
        if name == "row_ror":
            return row + (at - int(value) & 15), np.ones(LANES, np.bool_)
        if name in ("wave_shl", "wave_shr"):
            wanted = _LANE + (1 if name == "wave_shl" else -1)
            return wanted & 63, (wanted >= 0) & (wanted < LANES)
        if name in ("wave_rol", "wave_ror"):
            return _LANE + (1 if name == "wave_rol" else -1) & 63, np.ones(LANES, np.bool_)
        if name == "row_bcast":
            # 15: lane 15 of each row to the next row; 31: lane 31 to rows 2 and 3
            if value == "15":
                return (row - 1) & 63, _LANE >= 16
            return np.full(LANES, 31), _LANE >= 32
    raise UnknownInstruction(f"DPP control of {made.text!r} has no semantics here")


def dpp_source(made: Instruction, read: Source) -> Source:
    """Source 0 moved across lanes; a lane without a source reads 0 (what then is written says `dpp_writes`)."""
    lanes, inside = _dpp_lanes(made)
    zero = np.uint32(0)

    def moved(group: Group) -> Any:
        words = np.broadcast_to(read(group), (group.size, LANES)).take(lanes, axis=1)
        if group.full and inside.all():
            return words
        return np.where(group.mask[:, lanes] & inside, words, zero)

    return moved


def dpp_writes(made: Instruction) -> Callable[[Group], Bools] | None:
    """Lanes that a DPP instruction writes: bank and row masks, and without bound_ctrl only lanes that have a source."""
    lanes, inside = _dpp_lanes(made)
    rows, banks = made.number("row_mask", 15), made.number("bank_mask", 15)
    enabled = ((rows >> (_LANE >> 4)) & (banks >> (_LANE >> 2 & 3)) & 1).astype(np.bool_)
    if "bound_ctrl" in made.modifiers:
        return None if enabled.all() else lambda group: group.mask & enabled
    reach = enabled & inside
    return lambda group: group.mask & group.mask[:, lanes] & reach


def _sdwa_put(made: Instruction) -> Callable[[Group, Any], None]:
    """dst_sel and dst_unused: the result goes to a byte or word, the rest is zero, sign or kept."""
    chosen, unused = made.modifiers.get("dst_sel", "DWORD"), made.modifiers.get("dst_unused", "UNUSED_PAD")
    register = made.operands[0].index
    if chosen == "DWORD":
        return lambda group, words: group.put(register, words)
    shift, mask, sign = (np.uint32(part) for part in _SELECT[chosen])
    keep = ~(mask << shift)

    def put(group: Group, words: Any) -> None:
        if unused == "UNUSED_PRESERVE":
            group.put(register, group.v[register] & keep | (words & mask) << shift)
        elif unused == "UNUSED_SEXT":
            group.put(register, (((words & mask) ^ sign) - sign) << shift)
        else:
            group.put(register, (words & mask) << shift)

    return put


def destination(made: Instruction, keeps_high: bool = False) -> Callable[[Group, Any], None]:
    """Write 32-bit words to operands[0]; with `keeps_high` (gfx9 VOP3 fp16 and 16-bit mad) only one half."""
    register = made.operands[0].index
    if made.encoding == "sdwa":
        return _sdwa_put(made)
    if made.encoding == "dpp":
        lanes = dpp_writes(made)
        if lanes is not None:
            return lambda group, words: group.put_where(register, words, lanes(group))
    high = "op_sel" in made.modifiers and made.bits("op_sel", 4, 0)[len(made.operands) - 1] == 1
    if high:
        return lambda group, words: group.put(register, group.v[register] & U16 | words << np.uint32(16))
    if keeps_high:
        return lambda group, words: group.put(register, group.v[register] & ~U16 | words & U16)
    return lambda group, words: group.put(register, words)


def scalar_mask(operand: Operand) -> int:
    """Pair number of a lane-mask operand."""
    if operand.kind != "s" or operand.index & 1 or operand.index == EXEC:
        raise UnknownInstruction(f"operand {operand.text!r}: expected a scalar pair other than exec")
    return operand.index >> 1


_OMOD = re.compile(r"^(mul|div)$")


def finish_float(made: Instruction) -> Callable[[Any], Any] | None:
    """omod (mul:2, mul:4, div:2) and clamp to [0, 1], or None."""
    factor = 1.0
    for name, value in made.modifiers.items():
        if _OMOD.match(name):
            factor = float(value) if name == "mul" else 1 / float(value)
    clamp = "clamp" in made.modifiers
    if factor == 1.0 and not clamp:
        return None

    def finish(values: Any) -> Any:
        scaled = values * values.dtype.type(factor)
        # a NaN clamps to 0 when DX10_CLAMP is set, which HSA kernels have
        return np.fmin(np.fmax(scaled, scaled.dtype.type(0)), scaled.dtype.type(1)) if clamp else scaled

    return finish


def store(made: Instruction, kind: str, keeps_high: bool = False) -> Callable[[Group, Any], None]:
    """Write a typed result to operands[0]."""
    register = made.operands[0].index
    if kind in "qld":
        if kind == "d":
            finish64 = finish_float(made)
            return lambda group, values: group.put_pair(
                register, (finish64(values) if finish64 else values).view(np.uint64)
            )
        return lambda group, values: group.put_pair(register, values.view(np.uint64))
    put = destination(made, keeps_high)
    if kind == "u":
        return put
    if kind == "i":
        return lambda group, values: put(group, values.view(np.uint32))
    if kind in "wx":
        return lambda group, values: put(group, values.astype(np.uint32) & U16)
    finish = finish_float(made)
    if kind == "h":
        return lambda group, values: put(group, narrow(finish(values) if finish else values))
    if finish is None:
        return lambda group, values: put(group, values.view(np.uint32))
    return lambda group, values: put(group, finish(values).view(np.uint32))
