"""Scalar ALU instructions ("Vega" 7nm ISA, chapters "Scalar ALU Operations" and SOP1, SOP2, SOPC, SOPK).

Values are `[waves]` arrays; SCC is a boolean per wave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnproof.gcn.decode import EXEC, Instruction, Operand
from attnproof.gcn.faults import UnknownInstruction
from attnproof.gcn.integers import popcount
from attnproof.gcn.operands import Source, Step
from attnproof.gcn.wave import Group

_32, _64 = np.dtype(np.uint32), np.dtype(np.uint64)


def scalar_source(operand: Operand, wide: bool = False) -> Source:
    """A scalar operand as `[waves]` uint32, or uint64 for pairs."""
    if operand.kind == "imm":
        fixed: Any = np.array([operand.patterns[2 if wide else 1]], np.uint64 if wide else np.uint32)
        return lambda group: fixed
    if operand.kind != "s":
        if operand.text in ("scc", "src_scc"):
            return lambda group: group.scc.astype(np.uint64 if wide else np.uint32)
        if operand.text in ("execz", "src_execz", "vccz", "src_vccz"):
            index = EXEC >> 1 if "exec" in operand.text else 53
            return lambda group: (group.pair[index] == 0).astype(np.uint64 if wide else np.uint32)
        raise UnknownInstruction(f"operand {operand.text!r} has no semantics here")
    index = operand.index
    if not wide:
        return lambda group: group.s[index]
    if index & 1:
        raise UnknownInstruction(f"operand {operand.text!r}: an odd scalar pair")
    return lambda group: group.pair[index >> 1]


def scalar_write(operand: Operand, wide: bool = False) -> Callable[[Group, Any], None]:
    """Write a scalar destination; exec refreshes the lane mask."""
    index = operand.index
    if operand.kind != "s":
        raise UnknownInstruction(f"operand {operand.text!r}: expected a scalar register")

    def put(group: Group, words: Any) -> None:
        (group.pair[index >> 1] if wide else group.s[index])[...] = words
        if index in (EXEC, EXEC + 1):
            group.read_exec()

    return put


def _signed(words: Any) -> Any:
    return words.view(np.int64 if words.dtype == _64 else np.int32)


def _amount(words: Any, to: Any) -> Any:
    """Shift amount modulo the width."""
    return (words & np.uint32(63 if to.dtype.itemsize == 8 else 31)).astype(to.dtype)


_LOGIC: dict[str, Any] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}


def _shift_left(a: Any, b: Any) -> Any:
    return a << _amount(b, a)


def _shift_right(a: Any, b: Any) -> Any:
    return a >> _amount(b, a)


def _shift_arithmetic(a: Any, b: Any) -> Any:
    signed = _signed(a)
    return (signed >> _amount(b, signed)).view(a.dtype)


def _field(a: Any, b: Any, signed: bool) -> Any:
    """S_BFE: offset in bits 0 to 4 (5) of S1, width in bits 16 to 22."""
    bits = 8 * a.dtype.itemsize
    offset = (b & np.uint32(bits - 1)).astype(a.dtype)
    width = np.minimum((b >> np.uint32(16) & np.uint32(127)).astype(a.dtype), a.dtype.type(bits))
    ones = np.where(width >= bits, ~a.dtype.type(0), (a.dtype.type(1) << width) - a.dtype.type(1))
    words = a >> offset & ones
    if not signed:
        return words
    sign = np.where(
        width == 0, a.dtype.type(0), a.dtype.type(1) << (width - a.dtype.type(1) & a.dtype.type(bits - 1))
    )
    # a field that reaches past the top is filled with the sign bit of S0
    past = offset + width > bits
    return np.where(past, _shift_arithmetic(a, offset.astype(np.uint32)), (words ^ sign) - sign)


def _mask_of(a: Any, b: Any) -> Any:
    return ((np.uint32(1) << (a & np.uint32(31))) - np.uint32(1)) << (b & np.uint32(31))


def _mask_of64(a: Any, b: Any) -> Any:
    a, b = a.astype(np.uint64), b.astype(np.uint64)
    return ((np.uint64(1) << (a & np.uint64(63))) - np.uint64(1)) << (b & np.uint64(63))


def _high(signed: bool) -> Any:
    def multiply(a: Any, b: Any) -> Any:
        if signed:
            return ((_signed(a).astype(np.int64) * _signed(b)) >> np.int64(32)).astype(np.uint32)
        return ((a.astype(np.uint64) * b) >> np.uint64(32)).astype(np.uint32)

    return multiply


# name -> (widths of S0, S1 and D as 3 or 6, function, whether SCC = D != 0)
_TWO: dict[str, tuple[str, Any, bool]] = {}
for _name, _function in _LOGIC.items():
    _TWO[f"s_{_name}_b32"] = ("333", _function, True)
    _TWO[f"s_{_name}_b64"] = ("666", _function, True)
_TWO.update(
    {
        "s_lshl_b32": ("333", _shift_left, True),
        "s_lshl_b64": ("636", _shift_left, True),
        "s_lshr_b32": ("333", _shift_right, True),
        "s_lshr_b64": ("636", _shift_right, True),
        "s_ashr_i32": ("333", _shift_arithmetic, True),
        "s_ashr_i64": ("636", _shift_arithmetic, True),
        "s_bfe_u32": ("333", lambda a, b: _field(a, b, False), True),
        "s_bfe_i32": ("333", lambda a, b: _field(a, b, True), True),
        "s_bfe_u64": ("636", lambda a, b: _field(a, b, False), True),
        "s_bfe_i64": ("636", lambda a, b: _field(a, b, True), True),
        "s_bfm_b32": ("333", _mask_of, False),
        "s_bfm_b64": ("336", _mask_of64, False),
        "s_mul_i32": ("333", lambda a, b: a * b, False),
        "s_mul_hi_u32": ("333", _high(False), False),
        "s_mul_hi_i32": ("333", _high(True), False),
        "s_pack_ll_b32_b16": ("333", lambda a, b: a & np.uint32(0xFFFF) | b << np.uint32(16), False),
        "s_pack_lh_b32_b16": ("333", lambda a, b: a & np.uint32(0xFFFF) | b & np.uint32(0xFFFF0000), False),
        "s_pack_hh_b32_b16": ("333", lambda a, b: a >> np.uint32(16) | b & np.uint32(0xFFFF0000), False),
    }
)


def _count64(words: Any) -> Any:
    return popcount((words & np.uint64(0xFFFFFFFF)).astype(np.uint32)) + popcount(
        (words >> np.uint64(32)).astype(np.uint32)
    )


def _lowest(words: Any) -> Any:
    """S_FF1: position of the lowest set bit, -1 when none."""
    one = words.dtype.type(1)
    below = (words & (~words + one)) - one
    count = popcount(below) if words.dtype == _32 else _count64(below)
    return np.where(words == 0, np.uint32(0xFFFFFFFF), count.astype(np.uint32))


def _highest(words: Any) -> Any:
    """S_FLBIT: leading zeros, -1 when none is set."""
    bits = 8 * words.dtype.itemsize
    spread = words
    for step in (1, 2, 4, 8, 16, 32):
        if step < bits:
            spread = spread | spread >> words.dtype.type(step)
    count = popcount(spread) if bits == 32 else _count64(spread)
    return np.where(words == 0, np.uint32(0xFFFFFFFF), np.uint32(bits) - count.astype(np.uint32))


def _reverse(words: Any) -> Any:
    raw = np.unpackbits(
        np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1), axis=1, bitorder="little"
    )
    return np.packbits(raw[:, ::-1], axis=1, bitorder="little").view(words.dtype)[:, 0]


def _sext(bits: int) -> Any:
    shift = np.uint32(32 - bits)
    return lambda a: (_signed(a << shift) >> np.int32(32 - bits)).view(np.uint32)


def _abs(a: Any) -> Any:
    return np.abs(_signed(a)).view(np.uint32)


def _whole_quad(a: Any) -> Any:
    any_of_four = (a | a >> np.uint64(1) | a >> np.uint64(2) | a >> np.uint64(3)) & np.uint64(
        0x1111111111111111
    )
    return any_of_four * np.uint64(15)


_ONE: dict[str, tuple[str, Any, bool]] = {
    "s_mov_b32": ("33", lambda a: a, False),
    "s_mov_b64": ("66", lambda a: a, False),
    "s_not_b32": ("33", lambda a: ~a, True),
    "s_not_b64": ("66", lambda a: ~a, True),
    "s_abs_i32": ("33", _abs, True),
    "s_brev_b32": ("33", _reverse, False),
    "s_brev_b64": ("66", _reverse, False),
    "s_bcnt1_i32_b32": ("33", popcount, True),
    "s_bcnt1_i32_b64": ("63", _count64, True),
    "s_bcnt0_i32_b32": ("33", lambda a: popcount(~a), True),
    "s_bcnt0_i32_b64": ("63", lambda a: _count64(~a), True),
    "s_ff1_i32_b32": ("33", _lowest, False),
    "s_ff1_i32_b64": ("63", _lowest, False),
    "s_flbit_i32_b32": ("33", _highest, False),
    "s_flbit_i32_b64": ("63", _highest, False),
    "s_sext_i32_i8": ("33", _sext(8), False),
    "s_sext_i32_i16": ("33", _sext(16), False),
    "s_wqm_b64": ("66", _whole_quad, True),
}


def _table(made: Instruction, widths: str, function: Any, sets_scc: bool) -> Step:
    sources = [
        scalar_source(made.operands[index + 1], width == "6") for index, width in enumerate(widths[:-1])
    ]
    write = scalar_write(made.operands[0], widths[-1] == "6")

    def step(group: Group) -> None:
        result = function(*(read(group) for read in sources))
        write(group, result)
        if sets_scc:
            group.scc[...] = result != 0

    return step


def _add(made: Instruction) -> Step:
    """S_ADD_U32, S_ADDC_U32, S_SUB_U32, S_SUBB_U32: SCC is the carry; the signed ones: the overflow."""
    left, right = scalar_source(made.operands[1]), scalar_source(made.operands[2])
    write, kind = scalar_write(made.operands[0]), made.name
    signed, sub, carried = kind.endswith("i32"), "sub" in kind, kind.startswith(("s_addc", "s_subb"))

    def step(group: Group) -> None:
        a, b = left(group), right(group)
        if signed:
            a, b = _signed(a), _signed(b)
        wide = a.astype(np.int64) - b if sub else a.astype(np.int64) + b
        if carried:
            wide = wide - group.scc if sub else wide + group.scc
        write(group, wide.astype(np.uint32))
        group.scc[...] = (wide != wide.astype(np.int32)) if signed else (wide >> np.int64(32)) != 0

    return step


def _shifted_add(made: Instruction) -> Step:
    """S_LSHL{1,2,3,4}_ADD_U32: SCC is the carry out of 32 bits."""
    left, right, write = (
        scalar_source(made.operands[1]),
        scalar_source(made.operands[2]),
        scalar_write(made.operands[0]),
    )
    shift = np.uint64(int(made.name[6]))

    def step(group: Group) -> None:
        wide = (left(group).astype(np.uint64) << shift) + right(group)
        write(group, wide.astype(np.uint32))
        group.scc[...] = (wide >> np.uint64(32)) != 0

    return step


def _extreme(made: Instruction) -> Step:
    """S_MIN, S_MAX: SCC tells whether S0 was chosen."""
    left, right, write = (
        scalar_source(made.operands[1]),
        scalar_source(made.operands[2]),
        scalar_write(made.operands[0]),
    )
    signed, least = made.name.endswith("i32"), "min" in made.name

    def step(group: Group) -> None:
        a, b = left(group), right(group)
        first, second = (_signed(a), _signed(b)) if signed else (a, b)
        chosen = first < second if least else first > second
        write(group, np.where(chosen, a, b))
        group.scc[...] = chosen

    return step


def _select(made: Instruction) -> Step:
    """S_CSELECT, S_CMOV."""
    wide = made.name.endswith("b64")
    write = scalar_write(made.operands[0], wide)
    left = scalar_source(made.operands[1], wide)
    # S_CMOV has no third operand: it keeps the old value
    right = scalar_source((*made.operands, made.operands[0])[2], wide)
    return lambda group: write(group, np.where(group.scc, left(group), right(group)))


def _save_exec(made: Instruction) -> Step:
    """S_{AND,OR,XOR,ANDN2,ORN2,NAND,NOR,XNOR,ANDN1,ORN1}_SAVEEXEC_B64: D = exec, exec = S0 op exec."""
    kind = made.name.removeprefix("s_").removesuffix("_saveexec_b64")
    functions: dict[str, Any] = {**_LOGIC, "andn1": lambda a, b: ~a & b, "orn1": lambda a, b: ~a | b}
    function, read, write = (
        functions[kind],
        scalar_source(made.operands[1], True),
        scalar_write(made.operands[0], True),
    )

    def step(group: Group) -> None:
        before = group.pair[EXEC >> 1].copy()
        after = function(read(group), before)
        write(group, before)
        group.write_exec(after)
        group.scc[...] = after != 0

    return step


_RELATION: dict[str, Any] = {
    "eq": np.equal,
    "lg": np.not_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
}


def _compare(made: Instruction) -> Step:
    """S_CMP, S_CMPK: SCC = relation."""
    *_, relation, kind = made.name.split("_")
    function, wide = _RELATION[relation], kind == "u64"
    left, right = scalar_source(made.operands[0], wide), scalar_source(made.operands[1], wide)
    signed = kind == "i32"
    if made.name.startswith("s_cmpk"):
        constant = made.operands[1].patterns[0]
        value = (constant - (constant >> 15 << 16)) & 0xFFFFFFFF if signed else constant
        fixed: Any = np.array([value], np.uint32)
        right = lambda group: fixed  # noqa: E731

    def step(group: Group) -> None:
        a, b = left(group), right(group)
        group.scc[...] = function(_signed(a), _signed(b)) if signed else function(a, b)

    return step


def _test_bit(made: Instruction) -> Step:
    """S_BITCMP0, S_BITCMP1."""
    wide, wanted = made.name.endswith("b64"), int(made.name[8])
    words, which = scalar_source(made.operands[0], wide), scalar_source(made.operands[1])

    def step(group: Group) -> None:
        value = words(group)
        group.scc[...] = (value >> _amount(which(group), value) & value.dtype.type(1)) == wanted

    return step


def _set_bit(made: Instruction) -> Step:
    """S_BITSET0, S_BITSET1: one bit of D."""
    wide, value = made.name.endswith("b64"), int(made.name[8])
    which, old = scalar_source(made.operands[1]), scalar_source(made.operands[0], wide)
    write = scalar_write(made.operands[0], wide)

    def step(group: Group) -> None:
        words = old(group)
        bit = words.dtype.type(1) << _amount(which(group), words)
        write(group, words | bit if value else words & ~bit)

    return step


def _constant16(made: Instruction) -> Step:
    """S_MOVK, S_CMOVK, S_ADDK, S_MULK: a sign-extended 16-bit constant."""
    number = made.operands[1].patterns[0]
    number -= number >> 15 << 16
    fixed: Any = np.array([number & 0xFFFFFFFF], np.uint32)
    old, write, name = scalar_source(made.operands[0]), scalar_write(made.operands[0]), made.name

    def step(group: Group) -> None:
        if name == "s_movk_i32":
            write(group, fixed)
        elif name == "s_cmovk_i32":
            write(group, np.where(group.scc, fixed, old(group)))
        elif name == "s_mulk_i32":
            write(group, old(group) * fixed)
        else:
            wide = _signed(old(group)).astype(np.int64) + number
            write(group, wide.astype(np.uint32))
            group.scc[...] = wide != wide.astype(np.int32)

    return step


BUILDERS: dict[str, Callable[[Instruction], Step]] = {
    **dict.fromkeys(("s_add_u32", "s_addc_u32", "s_sub_u32", "s_subb_u32", "s_add_i32", "s_sub_i32"), _add),
    **dict.fromkeys((f"s_lshl{shift}_add_u32" for shift in (1, 2, 3, 4)), _shifted_add),
    **dict.fromkeys(("s_min_i32", "s_min_u32", "s_max_i32", "s_max_u32"), _extreme),
    **dict.fromkeys(("s_cselect_b32", "s_cselect_b64", "s_cmov_b32", "s_cmov_b64"), _select),
    **dict.fromkeys((f"s_{name}_saveexec_b64" for name in (*_LOGIC, "andn1", "orn1")), _save_exec),
    **dict.fromkeys((f"s_cmp_{name}_{kind}" for name in _RELATION for kind in ("i32", "u32")), _compare),
    **dict.fromkeys((f"s_cmpk_{name}_{kind}" for name in _RELATION for kind in ("i32", "u32")), _compare),
    **dict.fromkeys(("s_cmp_eq_u64", "s_cmp_lg_u64"), _compare),
    **dict.fromkeys((f"s_bitcmp{bit}_{kind}" for bit in (0, 1) for kind in ("b32", "b64")), _test_bit),
    **dict.fromkeys((f"s_bitset{bit}_{kind}" for bit in (0, 1) for kind in ("b32", "b64")), _set_bit),
    **dict.fromkeys(("s_movk_i32", "s_cmovk_i32", "s_addk_i32", "s_mulk_i32"), _constant16),
}
NAMES = frozenset((*_ONE, *_TWO, *BUILDERS))


def build(made: Instruction) -> Step | None:
    """The step of a scalar ALU instruction, or None."""
    if made.name in BUILDERS:
        return BUILDERS[made.name](made)
    row = _ONE.get(made.name) or _TWO.get(made.name)
    return _table(made, *row) if row else None
