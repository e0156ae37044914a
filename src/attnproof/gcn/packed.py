"""Packed and mixed-precision instructions ("Vega" 7nm ISA, VOP3P), among them V_DOT2_F32_F16.

op_sel picks the half of each source for the low result, op_sel_hi for the high result; neg_lo and neg_hi negate them.
V_DOT2_F32_F16 follows the ISA's pseudo code: products of fp16 are exact in fp32, then D = (S2 + lo * lo) + hi * hi with
two fp32 additions. V_FMA_MIX: fused in fp32, MIXLO and MIXHI then rounded to fp16. How the chip rounds inside both is
not documented further.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnproof.gcn import floats
from attnproof.gcn.decode import Instruction, Operand
from attnproof.gcn.operands import Source, Step, constant, finish_float, raw32
from attnproof.gcn.wave import Group, narrow, widen_bits

U16, SIXTEEN = np.uint32(0xFFFF), np.uint32(16)


def _words(operand: Operand) -> Source:
    """A packed source; a float constant is fp16 in the low half, an integer constant fills 32 bits."""
    if operand.kind == "imm":
        return constant(operand.patterns[0] if "." in operand.text else operand.patterns[1])
    return raw32(operand)


def _half_words(read: Source, high: int) -> Source:
    if high:
        return lambda group: read(group) >> SIXTEEN
    return lambda group: read(group) & U16


def _half_float(operand: Operand, high: int, neg: int) -> Source:
    """One half of a packed source as fp32."""
    if operand.kind == "v":
        index = operand.index
        if neg:
            return lambda group: -group.half(index)[high]
        return lambda group: group.half(index)[high]
    part = _half_words(_words(operand), high)
    if neg:
        return lambda group: -widen_bits(part(group))
    return lambda group: widen_bits(part(group))


def _halves(made: Instruction, count: int, floating: bool) -> list[tuple[Source, Source]]:
    """(low, high) component sources of every operand."""
    low, high = made.bits("op_sel", 3, 0), made.bits("op_sel_hi", 3, 1)
    neg_low, neg_high = made.bits("neg_lo", 3, 0), made.bits("neg_hi", 3, 0)
    found: list[tuple[Source, Source]] = []
    for k in range(count):
        operand = made.operands[k + 1]
        if floating:
            found.append(
                (_half_float(operand, low[k], neg_low[k]), _half_float(operand, high[k], neg_high[k]))
            )
        else:
            read = _words(operand)
            found.append((_half_words(read, low[k]), _half_words(read, high[k])))
    return found


def _packed_float(made: Instruction, function: Any, count: int) -> Step:
    sources = _halves(made, count, True)
    finish = finish_float(made) or (lambda values: values)
    register = made.operands[0].index

    def step(group: Group) -> None:
        low, high = (narrow(finish(function(*(pair[part](group) for pair in sources)))) for part in (0, 1))
        group.put(register, low | high << SIXTEEN)

    return step


def _signed16(words: Any) -> Any:
    return (words << SIXTEEN).view(np.int32) >> np.int32(16)


def _packed_integer(made: Instruction, function: Any, count: int) -> Step:
    sources = _halves(made, count, False)
    register, clamp = made.operands[0].index, "clamp" in made.modifiers
    signed = made.name.endswith("i16")

    def component(group: Group, part: int) -> Any:
        values = [pair[part](group) for pair in sources]
        if signed:
            values = [_signed16(value) for value in values]
        result = function(*values)
        if clamp:
            wide = result.view(np.int32)
            result = np.clip(wide, -32768, 32767) if signed else np.clip(wide, 0, 65535)
        return (result.view(np.uint32) if result.dtype != np.uint32 else result) & U16

    def step(group: Group) -> None:
        group.put(register, component(group, 0) | component(group, 1) << SIXTEEN)

    return step


_PACKED_FLOAT: dict[str, tuple[int, Any]] = {
    "v_pk_add_f16": (2, lambda a, b: a + b),
    "v_pk_mul_f16": (2, lambda a, b: a * b),
    "v_pk_max_f16": (2, floats.maximum),
    "v_pk_min_f16": (2, floats.minimum),
    "v_pk_fma_f16": (3, floats.fma16),
}
_LOW4 = np.uint32(15)
_PACKED_INTEGER: dict[str, tuple[int, Any]] = {
    "v_pk_add_u16": (2, lambda a, b: a + b),
    "v_pk_sub_u16": (2, lambda a, b: a - b),
    "v_pk_add_i16": (2, lambda a, b: a + b),
    "v_pk_sub_i16": (2, lambda a, b: a - b),
    "v_pk_mul_lo_u16": (2, lambda a, b: a * b),
    "v_pk_mad_u16": (3, lambda a, b, c: a * b + c),
    "v_pk_mad_i16": (3, lambda a, b, c: a * b + c),
    "v_pk_min_u16": (2, np.minimum),
    "v_pk_max_u16": (2, np.maximum),
    "v_pk_min_i16": (2, np.minimum),
    "v_pk_max_i16": (2, np.maximum),
    "v_pk_lshlrev_b16": (2, lambda a, b: b << (a & _LOW4)),
    "v_pk_lshrrev_b16": (2, lambda a, b: b >> (a & _LOW4)),
    "v_pk_ashrrev_i16": (2, lambda a, b: b >> (a & np.int32(15))),
}


def _dot2(made: Instruction) -> Step:
    """V_DOT2_F32_F16."""
    if not made.modifiers and all(operand.kind == "v" for operand in made.operands):
        return _dot2_plain(*(operand.index for operand in made.operands))
    (a_low, a_high), (b_low, b_high) = _halves(made, 2, True)
    addend, negative = raw32(made.operands[3]), made.bits("neg_lo", 3, 0)[2]
    finish, register = finish_float(made), made.operands[0].index

    def step(group: Group) -> None:
        total = addend(group).view(np.float32)
        total = (-total if negative else total) + a_low(group) * b_low(group)
        total = total + a_high(group) * b_high(group)
        group.put(register, (finish(total) if finish else total).view(np.uint32))

    return step


def _dot2_plain(register: int, left: int, right: int, addend: int) -> Step:
    """The same, of whole registers: half of all instructions of an attention kernel."""

    def step(group: Group) -> None:
        a_low, a_high = group.half(left)
        b_low, b_high = group.half(right)
        total = a_low * b_low
        total += group.v[addend].view(np.float32)
        total += a_high * b_high
        group.put(register, total.view(np.uint32))

    return step


def _mixed(operand: Operand, half: int, is_half: int) -> Source:
    if not is_half:
        read = raw32(operand)
        value: Source = lambda group: read(group).view(np.float32)  # noqa: E731
    else:
        value = _half_float(operand, half, 0)
    if operand.abs:
        inner = value
        value = lambda group: np.abs(inner(group))  # noqa: E731
    if operand.neg:
        outer = value
        value = lambda group: -outer(group)  # noqa: E731
    return value


def _fma_mix(made: Instruction) -> Step:
    """V_FMA_MIX_F32, V_FMA_MIXLO_F16, V_FMA_MIXHI_F16: each source is fp32, or one half of a register (op_sel_hi set)."""
    half, is_half = made.bits("op_sel", 3, 0), made.bits("op_sel_hi", 3, 0)
    parts = [_mixed(made.operands[k + 1], half[k], is_half[k]) for k in range(3)]
    finish, register = finish_float(made) or (lambda values: values), made.operands[0].index
    kind = made.name.removeprefix("v_fma_mix")

    def step(group: Group) -> None:
        total = finish(floats.fma32(parts[0](group), parts[1](group), parts[2](group)))
        if kind == "_f32":
            group.put(register, total.view(np.uint32))
        elif kind == "lo_f16":
            group.put(register, group.v[register] & ~U16 | narrow(total))
        else:
            group.put(register, group.v[register] & U16 | narrow(total) << SIXTEEN)

    return step


def build(made: Instruction) -> Step | None:
    """The step of a packed instruction, or None."""
    name = made.name
    if name in _PACKED_FLOAT:
        count, function = _PACKED_FLOAT[name]
        return _packed_float(made, function, count)
    if name in _PACKED_INTEGER:
        count, function = _PACKED_INTEGER[name]
        return _packed_integer(made, function, count)
    return NAMED[name](made) if name in NAMED else None


NAMED: dict[str, Callable[[Instruction], Step]] = {
    "v_dot2_f32_f16": _dot2,
    "v_fma_mix_f32": _fma_mix,
    "v_fma_mixlo_f16": _fma_mix,
    "v_fma_mixhi_f16": _fma_mix,
}
NAMES = frozenset((*_PACKED_FLOAT, *_PACKED_INTEGER, *NAMED))
