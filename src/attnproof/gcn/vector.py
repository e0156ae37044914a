"""Build the step of a vector instruction: from the tables, or by a builder of its own.

"Vega" 7nm ISA, chapter "Vector ALU Operations". A step takes a `Group`, reads typed sources, writes the active lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnproof.gcn import floats, integers
from attnproof.gcn.decode import VCC, Instruction
from attnproof.gcn.faults import UnknownInstruction
from attnproof.gcn.integers import Row
from attnproof.gcn.operands import Step, flush, raw64, scalar_mask, source, store
from attnproof.gcn.wave import Group, pack_mask, unpack_mask

Builder = Callable[[Instruction, bool], Step]


def _flushing(row: Row) -> Row:
    """The row with denormal fp32 results flushed."""
    kinds, kind, function = row
    return (kinds, kind, lambda *values: flush(function(*values))) if kind == "f" else row


def table_step(made: Instruction, row: Row, flushing: bool, keeps_high: bool = False) -> Step:
    """A step for D = function(S0, S1, S2)."""
    _check_modifiers(made, row)
    kinds, kind, function = _flushing(row) if flushing else row
    sources = [source(made, index + 1, part, flushing) for index, part in enumerate(kinds)]
    write = store(made, kind, keeps_high)
    if len(sources) == 1:
        (one,) = sources
        return lambda group: write(group, function(one(group)))
    if len(sources) == 2:
        left, right = sources
        return lambda group: write(group, function(left(group), right(group)))
    first, second, third = sources
    return lambda group: write(group, function(first(group), second(group), third(group)))


def _accumulate(made: Instruction, row: Row, flushing: bool) -> Step:
    """A step for D = S0 * S1 + D."""
    kinds, kind, function = _flushing(row) if flushing else row
    left, right = (source(made, index + 1, part, flushing) for index, part in enumerate(kinds))
    addend = source(
        Instruction(made.address, "", "", "", made.operands[:1], {}, made.text), 0, kind, flushing
    )
    write = store(made, kind)
    return lambda group: write(group, function(left(group), right(group), addend(group)))


def _lane_mask(made: Instruction, index: int) -> Callable[[Group], Any]:
    """A scalar pair (vcc when the operand is left out) as booleans [waves, 64]."""
    pair = scalar_mask(made.operands[index]) if len(made.operands) > index else VCC >> 1
    return lambda group: unpack_mask(group.pair[pair])


def _cndmask(made: Instruction, flushing: bool) -> Step:
    """V_CNDMASK_B32: D = VCC[lane] ? S1 : S0."""
    zero, one = source(made, 1, "u"), source(made, 2, "u")
    choose, write = _lane_mask(made, 3), store(made, "u")
    return lambda group: write(group, np.where(choose(group), one(group), zero(group)))


def _carry(made: Instruction, flushing: bool) -> Step:
    """V_ADD_CO, V_ADDC_CO, V_SUB_CO, V_SUBB_CO and the reversed ones: a 33-bit sum, the carry of active lanes to a mask."""
    left, right = source(made, 2, "u"), source(made, 3, "u")
    if "rev" in made.name:
        left, right = right, left
    carry_in = _lane_mask(made, 4) if made.name.split("_")[1] in ("addc", "subb", "subbrev") else None
    pair = scalar_mask(made.operands[1])
    write, sub = store(made, "u"), "sub" in made.name

    def step(group: Group) -> None:
        wide = left(group).astype(np.int64)
        wide = wide - right(group) if sub else wide + right(group)
        if carry_in is not None:
            wide = wide - carry_in(group) if sub else wide + carry_in(group)
        over = (wide >> np.int64(32)) != 0
        carries = pack_mask(over & group.mask)
        write(group, wide.astype(np.uint32))
        group.pair[pair][...] = carries

    return step


def _mad64(made: Instruction, flushing: bool) -> Step:
    """V_MAD_U64_U32, V_MAD_I64_I32: {vcc, D} = S0 * S1 + S2 in 65 bits."""
    signed = "i64" in made.name
    left, right, addend = (
        source(made, 2, "i" if signed else "u"),
        source(made, 3, "i" if signed else "u"),
        raw64(made.operands[4]),
    )
    pair = scalar_mask(made.operands[1])
    wide: Any = np.int64 if signed else np.uint64
    register = made.operands[0].index

    def step(group: Group) -> None:
        product = (left(group).astype(wide) * right(group).astype(wide)).view(np.uint64)
        third = addend(group)
        total = product + third
        over = total < product
        if signed:
            # the 65th bit of the sum of two sign-extended numbers
            over = ((product >> np.uint64(63)) + (third >> np.uint64(63)) + over) & np.uint64(1) == 1
        carries = pack_mask(over & group.mask)
        group.put_pair(register, np.broadcast_to(total, group.mask.shape))
        group.pair[pair][...] = carries

    return step


def _divide_scale(made: Instruction, flushing: bool) -> Step:
    """V_DIV_SCALE_F32: pre-scale numerator or denominator by 2**64 when the quotient would leave the normal range."""
    chosen, denominator, numerator = (source(made, index, "f") for index in (2, 3, 4))
    pair = scalar_mask(made.operands[1])
    register = made.operands[0].index

    def step(group: Group) -> None:
        s0, s1, s2 = np.broadcast_arrays(chosen(group), denominator(group), numerator(group))
        e1, e2 = (part.copy().view(np.uint32) >> np.uint32(23) & np.uint32(255) for part in (s1, s2))
        gap = e2.astype(np.int64) - e1.astype(np.int64)
        up, is_denominator, is_numerator = s0 * np.float32(2.0**64), s0 == s1, s0 == s2
        tiny = np.abs(s1) < np.float32(2.0**-126)
        inverse_tiny = np.abs(1 / s1.astype(np.float64)) < 2.0**-126
        quotient_tiny = np.abs(s2.astype(np.float64) / s1) < 2.0**-126
        flag: Any = np.zeros(group.mask.shape, np.bool_)
        invalid = (s2 == 0) | (s1 == 0)
        rules = (
            (invalid, np.float32(np.nan) * s0, False),
            (gap >= 96, np.where(is_denominator, up, s0), True),
            (tiny, up, False),
            (inverse_tiny & quotient_tiny, np.where(is_denominator, up, s0), True),
            (inverse_tiny, s0 * np.float32(2.0**-64), False),
            (quotient_tiny, np.where(is_numerator, up, s0), True),
            (e2 <= 23, up, False),
        )
        result = np.select([when for when, _, _ in rules], [value for _, value, _ in rules], s0)
        flag = np.select(
            [when for when, _, _ in rules], [np.full(s0.shape, scaled) for _, _, scaled in rules], False
        )
        group.put(register, result.astype(np.float32).view(np.uint32))
        group.pair[pair][...] = pack_mask(flag & group.mask)

    return step


def _divide_fmas(made: Instruction, flushing: bool) -> Step:
    """V_DIV_FMAS_F32: fused multiply-add; in lanes whose vcc bit is set it undoes the 2**64 of V_DIV_SCALE, in one rounding.

    The ISA text prints a factor of 2**32, with which no quotient would come out right; later ISA texts have 2**64
    above and 2**-64 below an exponent of 127 of S2, as here.
    """
    parts = [source(made, index, "f", flushing) for index in (1, 2, 3)]
    write = store(made, "f")

    def step(group: Group) -> None:
        a, b, c = (part(group) for part in parts)
        up = (c.view(np.uint32) >> np.uint32(23) & np.uint32(255)) > 127
        power = np.where(unpack_mask(group.pair[VCC >> 1]), np.where(up, 64, -64), 0)
        write(group, floats.fma32(a, b, c, power))

    return step


def _literal_mad(made: Instruction, flushing: bool) -> Step:
    """V_MADMK, V_MADAK: D = S0 * K + S1 and D = S0 * S1 + K, both printed in the order of the products."""
    return table_step(made, floats.TABLE["v_mad_f32"], flushing)


def _compare_class(made: Instruction, flushing: bool) -> Step:
    """V_CMP_CLASS_F32: is S0 in one of the classes of the mask S1."""
    value, wanted = source(made, 1, "f"), source(made, 2, "u")
    pair, to_exec = scalar_mask(made.operands[0]), made.name.startswith("v_cmpx")

    def step(group: Group) -> None:
        found, bits = classes(value(group)), wanted(group)
        masks = pack_mask(((found & bits) != 0) & group.mask)
        group.pair[pair][...] = masks
        if to_exec:
            group.write_exec(masks)

    return step


def classes(values: Any) -> Any:
    """The class bit of fp32 numbers: 0, 1 NaN; 2 -inf, 3 -normal, 4 -denormal, 5 -0, 6 +0, 7 +denormal, 8 +normal, 9 +inf."""
    size = np.abs(values)
    rank = np.select([size == 0, size < np.float32(2.0**-126), np.isinf(values)], [0, 1, 3], 2)
    number = np.where(np.signbit(values), 5 - rank, 6 + rank)
    bits = values.view(np.uint32)
    nan = np.where(bits & np.uint32(0x400000), 1, 0)
    return np.uint32(1) << np.where(np.isnan(values), nan, number).astype(np.uint32)


_ORDERED: dict[str, Any] = {
    "f": lambda a, b: np.zeros(np.broadcast_shapes(a.shape, b.shape), np.bool_),
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "lg": lambda a, b: (a < b) | (a > b),
    "ge": np.greater_equal,
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b),
    "tru": lambda a, b: np.ones(np.broadcast_shapes(a.shape, b.shape), np.bool_),
    "ne": np.not_equal,
    "t": lambda a, b: np.ones(np.broadcast_shapes(a.shape, b.shape), np.bool_),
}
_COMPARED = {
    "f32": "f",
    "f16": "h",
    "f64": "d",
    "i32": "i",
    "u32": "u",
    "i64": "l",
    "u64": "q",
    "i16": "x",
    "u16": "w",
}


def _compare(made: Instruction, flushing: bool) -> Step:
    """V_CMP, V_CMPX: the lane mask of a relation, 0 in inactive lanes; V_CMPX writes exec too."""
    *_, relation, kind = made.name.split("_")
    function = _ORDERED[relation]
    left, right = (source(made, index, _COMPARED[kind], flushing) for index in (1, 2))
    pair = scalar_mask(made.operands[0])
    to_exec = made.name.startswith("v_cmpx")

    def step(group: Group) -> None:
        masks = pack_mask(function(left(group), right(group)) & group.mask)
        group.pair[pair][...] = masks
        if to_exec:
            group.write_exec(masks)

    return step


BUILDERS: dict[str, Builder] = {
    "v_cndmask_b32": _cndmask,
    "v_mad_u64_u32": _mad64,
    "v_mad_i64_i32": _mad64,
    "v_div_scale_f32": _divide_scale,
    "v_div_fmas_f32": _divide_fmas,
    "v_madmk_f32": _literal_mad,
    "v_madak_f32": _literal_mad,
    "v_cmp_class_f32": _compare_class,
    "v_cmpx_class_f32": _compare_class,
    **{f"v_{name}_co_u32": _carry for name in ("add", "addc", "sub", "subb", "subrev", "subbrev")},
}
for _kind in _COMPARED:
    for _relation in (
        ("f", "lt", "eq", "le", "gt", "lg", "ge", "o", "u", "nge", "nlg", "ngt", "nle", "neq", "nlt", "tru")
        if _kind[0] == "f"
        else ("f", "lt", "eq", "le", "gt", "ne", "ge", "t")
    ):
        for _form in ("cmp", "cmpx"):
            BUILDERS[f"v_{_form}_{_relation}_{_kind}"] = _compare


# name -> (bits, signed, reversed operands, subtract): with clamp the result saturates
_SATURATING: dict[str, tuple[int, bool, bool, bool]] = {
    "v_add_u32": (32, False, False, False),
    "v_sub_u32": (32, False, False, True),
    "v_subrev_u32": (32, False, True, True),
    "v_add_i32": (32, True, False, False),
    "v_sub_i32": (32, True, False, True),
    "v_add_u16": (16, False, False, False),
    "v_sub_u16": (16, False, False, True),
    "v_subrev_u16": (16, False, True, True),
}


def _saturate(made: Instruction) -> Step:
    """Integer add or subtract with clamp."""
    bits, signed, rev, sub = _SATURATING[made.name]
    kind = ("i" if signed else "u") if bits == 32 else "w"
    left, right = source(made, 1, kind), source(made, 2, kind)
    if rev:
        left, right = right, left
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    write = store(made, "u")

    def step(group: Group) -> None:
        a, b = left(group).astype(np.int64), right(group).astype(np.int64)
        write(group, np.clip(a - b if sub else a + b, low, high).astype(np.uint32))

    return step


def _check_modifiers(made: Instruction, row: Row) -> None:
    """What a table row does not look at must not be there."""
    kinds, kind, _ = row
    if "clamp" in made.modifiers and kind not in "fhd":
        raise UnknownInstruction(f"clamp of {made.text!r} has no semantics here")
    if "op_sel" in made.modifiers and not set(kinds) & set("hwx") and kind not in "hwx":
        raise UnknownInstruction(f"op_sel of {made.text!r} has no semantics here")


def build(made: Instruction, flushing: bool) -> Step | None:
    """The step of a vector ALU instruction, or None when this module has none."""
    name = made.name
    if "clamp" in made.modifiers and name in _SATURATING:
        return _saturate(made)
    if name in BUILDERS:
        if "clamp" in made.modifiers:
            raise UnknownInstruction(f"clamp of {made.text!r} has no semantics here")
        return BUILDERS[name](made, flushing)
    for table in (integers.TABLE, floats.TABLE):
        if name in table:
            return table_step(made, table[name], flushing)
    for table in (integers.KEEPS_HIGH, floats.KEEPS_HIGH):
        if name in table:
            return table_step(made, table[name], flushing, keeps_high=True)
    if name in floats.ACCUMULATE:
        return _accumulate(made, floats.ACCUMULATE[name], flushing)
    return None
