"""Scalar ALU instructions, each with its result and its SCC rule, in plain Python integers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
EDGES32 = [0, 1, 31, 32, 0x7FFFFFFF, 0x80000000, M32, 0x00050003, 0x0020001F]
EDGES64 = [0, 1, 63, 1 << 31, 1 << 32, 1 << 63, M64, M64 >> 1]


def signed(word: int, bits: int = 32) -> int:
    return (word & (1 << bits) - 1) - ((word >> bits - 1 & 1) << bits)


def pairs(wide_a: bool, wide_b: bool) -> list[tuple[int, int]]:
    rng = random.Random(1)

    def one(wide: bool) -> int:
        return rng.choice([*(EDGES64 if wide else EDGES32), rng.getrandbits(64 if wide else 32)])

    return [(one(wide_a), one(wide_b)) for _ in range(60)]


def nonzero(a: int, b: int, result: int) -> bool:
    return result != 0


def fits(value: int) -> bool:
    return -(1 << 31) <= value < 1 << 31


def field(a: int, b: int, bits: int, is_signed: bool) -> int:
    offset, width = b & bits - 1, min(b >> 16 & 127, bits)
    if width == 0:
        return 0
    if is_signed:
        return signed(a >> offset, width) if offset + width <= bits else signed(a, bits) >> offset
    return a >> offset & (1 << width) - 1


LOGIC: dict[str, Callable[[int, int], int]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}
# name -> (D, SCC or None when it stays)
TWO: dict[str, tuple[Callable[[int, int], int], Callable[[int, int, int], bool] | None]] = {
    **{f"s_{name}_b32": (function, nonzero) for name, function in LOGIC.items()},
    **{f"s_{name}_b64": (function, nonzero) for name, function in LOGIC.items()},
    "s_lshl_b32": (lambda a, b: a << b % 32, nonzero),
    "s_lshl_b64": (lambda a, b: a << b % 64, nonzero),
    "s_lshr_b32": (lambda a, b: a >> b % 32, nonzero),
    "s_lshr_b64": (lambda a, b: a >> b % 64, nonzero),
    "s_ashr_i32": (lambda a, b: signed(a) >> b % 32, nonzero),
    "s_ashr_i64": (lambda a, b: signed(a, 64) >> b % 64, nonzero),
    "s_bfe_u32": (lambda a, b: field(a, b, 32, False), nonzero),
    "s_bfe_i32": (lambda a, b: field(a, b, 32, True), nonzero),
    "s_bfe_u64": (lambda a, b: field(a, b, 64, False), nonzero),
    "s_bfe_i64": (lambda a, b: field(a, b, 64, True), nonzero),
    "s_bfm_b32": (lambda a, b: ((1 << a % 32) - 1) << b % 32, None),
    "s_mul_i32": (lambda a, b: a * b, None),
    "s_mul_hi_u32": (lambda a, b: a * b >> 32, None),
    "s_mul_hi_i32": (lambda a, b: signed(a) * signed(b) >> 32, None),
    "s_pack_ll_b32_b16": (lambda a, b: a & 0xFFFF | (b & 0xFFFF) << 16, None),
    "s_pack_lh_b32_b16": (lambda a, b: a & 0xFFFF | b & 0xFFFF0000, None),
    "s_pack_hh_b32_b16": (lambda a, b: a >> 16 | b & 0xFFFF0000, None),
    "s_add_u32": (lambda a, b: a + b, lambda a, b, r: a + b > M32),
    "s_sub_u32": (lambda a, b: a - b, lambda a, b, r: a < b),
    "s_add_i32": (lambda a, b: a + b, lambda a, b, r: not fits(signed(a) + signed(b))),
    "s_sub_i32": (lambda a, b: a - b, lambda a, b, r: not fits(signed(a) - signed(b))),
    **{
        f"s_lshl{k}_add_u32": (lambda a, b, k=k: (a << k) + b, lambda a, b, r, k=k: (a << k) + b > M32)
        for k in (1, 2, 3, 4)
    },
    "s_min_u32": (min, lambda a, b, r: a < b),
    "s_max_u32": (max, lambda a, b, r: a > b),
    "s_min_i32": (lambda a, b: min(signed(a), signed(b)), lambda a, b, r: signed(a) < signed(b)),
    "s_max_i32": (lambda a, b: max(signed(a), signed(b)), lambda a, b, r: signed(a) > signed(b)),
}


@pytest.mark.parametrize("name", TWO)
def test_a_two_operand_instruction_is_its_definition(execute: Any, name: str) -> None:
    function, rule = TWO[name]
    wide = name.endswith("64")
    shift = name.split("_")[1] in ("lshl", "lshr", "ashr", "bfe")
    bits = 64 if wide else 32
    for a, b in pairs(wide, wide and not shift):
        for before in (0, 1):
            right = "s[6:7]" if wide and not shift else "s6"
            text = f"{name} s[2:3], s[4:5], {right}" if wide else f"{name} s2, s4, s6"
            state = execute(text, {}, {4: a, 5: a >> 32, 6: b, 7: b >> 32}, scc=before)
            expected = function(a, b) & (1 << bits) - 1
            assert expected == (state.scalar64(2) if wide else state.scalar(2)), (hex(a), hex(b))
            assert (int(rule(a, b, expected)) if rule else before) == state.scc, (hex(a), hex(b))


@pytest.mark.parametrize("carry", [0, 1])
def test_addc_and_subb_take_and_give_the_carry(execute: Any, carry: int) -> None:
    for a, b in pairs(False, False):
        state = execute("s_addc_u32 s2, s4, s6", {}, {4: a, 6: b}, scc=carry)
        assert (a + b + carry & M32, int(a + b + carry > M32)) == (state.scalar(2), state.scc)
        state = execute("s_subb_u32 s2, s4, s6", {}, {4: a, 6: b}, scc=carry)
        assert (a - b - carry & M32, int(a - b - carry < 0)) == (state.scalar(2), state.scc)


def whole_quads(a: int) -> int:
    return sum(15 << k for k in range(0, 64, 4) if a >> k & 15)


ONE: dict[str, tuple[str, Callable[[int], int], bool]] = {
    "s_mov_b32": ("33", lambda a: a, False),
    "s_mov_b64": ("66", lambda a: a, False),
    "s_not_b32": ("33", lambda a: ~a, True),
    "s_not_b64": ("66", lambda a: ~a, True),
    "s_abs_i32": ("33", lambda a: abs(signed(a)), True),
    "s_brev_b32": ("33", lambda a: int(f"{a:032b}"[::-1], 2), False),
    "s_brev_b64": ("66", lambda a: int(f"{a:064b}"[::-1], 2), False),
    "s_bcnt1_i32_b32": ("33", int.bit_count, True),
    "s_bcnt1_i32_b64": ("63", int.bit_count, True),
    "s_bcnt0_i32_b32": ("33", lambda a: 32 - a.bit_count(), True),
    "s_bcnt0_i32_b64": ("63", lambda a: 64 - a.bit_count(), True),
    "s_ff1_i32_b32": ("33", lambda a: (a & -a).bit_length() - 1, False),
    "s_ff1_i32_b64": ("63", lambda a: (a & -a).bit_length() - 1, False),
    "s_flbit_i32_b32": ("33", lambda a: 32 - a.bit_length() if a else -1, False),
    "s_flbit_i32_b64": ("63", lambda a: 64 - a.bit_length() if a else -1, False),
    "s_sext_i32_i8": ("33", lambda a: signed(a, 8), False),
    "s_sext_i32_i16": ("33", lambda a: signed(a, 16), False),
    "s_wqm_b64": ("66", whole_quads, True),
}


@pytest.mark.parametrize("name", ONE)
def test_a_one_operand_instruction_is_its_definition(execute: Any, name: str) -> None:
    widths, function, sets_scc = ONE[name]
    for a, _ in pairs(widths[0] == "6", False):
        source, target = ("s[4:5]" if widths[0] == "6" else "s4"), ("s[2:3]" if widths[1] == "6" else "s2")
        state = execute(f"{name} {target}, {source}", {}, {4: a, 5: a >> 32}, scc=1)
        expected = function(a) & (M64 if widths[1] == "6" else M32)
        assert expected == (state.scalar64(2) if widths[1] == "6" else state.scalar(2))
        assert (int(expected != 0) if sets_scc else 1) == state.scc


RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "eq": int.__eq__, "lg": int.__ne__, "gt": int.__gt__, "ge": int.__ge__, "lt": int.__lt__, "le": int.__le__,
}  # fmt: skip


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("kind", ["i32", "u32"])
def test_a_scalar_compare_sets_scc(execute: Any, relation: str, kind: str) -> None:
    for a, b in [*pairs(False, False), (5, 5), (M32, 1)]:
        x, y = (signed(a), signed(b)) if kind == "i32" else (a, b)
        assert (
            int(RELATIONS[relation](x, y)) == execute(f"s_cmp_{relation}_{kind} s4, s6", {}, {4: a, 6: b}).scc
        )
    for a in EDGES32:
        constant = -3 if kind == "i32" else 0xFFF0
        x = signed(a) if kind == "i32" else a
        text = f"s_cmpk_{relation}_{kind} s4, {constant & 0xFFFF:#x}"
        assert int(RELATIONS[relation](x, constant)) == execute(text, {}, {4: a}).scc


def test_64_bit_equality_looks_at_both_halves(execute: Any) -> None:
    assert 1 == execute("s_cmp_eq_u64 s[4:5], s[6:7]", {}, {4: 1, 5: 2, 6: 1, 7: 2}).scc
    assert 1 == execute("s_cmp_lg_u64 s[4:5], s[6:7]", {}, {4: 1, 5: 2, 6: 1, 7: 3}).scc
    assert 0 == execute("s_cmp_eq_u64 s[4:5], 0", {}, {4: 0, 5: 2}).scc


def test_cselect_and_cmov_follow_scc(execute: Any) -> None:
    for scc in (0, 1):
        assert (7 if scc else 9) == execute("s_cselect_b32 s2, s4, s6", {}, {4: 7, 6: 9}, scc=scc).scalar(2)
        wide = execute("s_cselect_b64 s[2:3], s[4:5], -1", {}, {4: 7, 5: 1}, scc=scc)
        assert (7 | 1 << 32 if scc else M64) == wide.scalar64(2)
        moved = execute("s_cmov_b64 s[2:3], s[4:5]", {}, {2: 3, 3: 9, 4: 7, 5: 1}, scc=scc)
        assert (7 | 1 << 32 if scc else 3 | 9 << 32) == moved.scalar64(2)
        assert (7 if scc else 3) == execute("s_cmov_b32 s2, s4", {}, {2: 3, 4: 7}, scc=scc).scalar(2)


@pytest.mark.parametrize("name", [*LOGIC, "andn1", "orn1"])
def test_saveexec_keeps_the_old_mask_and_sets_the_new_one(execute: Any, name: str) -> None:
    """The divergence of every `if` hangs on it."""
    functions = {**LOGIC, "andn1": lambda a, b: ~a & b, "orn1": lambda a, b: ~a | b}
    rng = random.Random(1)
    for _ in range(8):
        old, other = rng.getrandbits(64), rng.choice([0, M64, rng.getrandbits(64)])
        text = f"s_{name}_saveexec_b64 s[2:3], s[4:5]"
        state = execute(text, {}, {4: other, 5: other >> 32}, exec_mask=old)
        expected = functions[name](other, old) & M64
        assert (old, expected, int(expected != 0)) == (state.scalar64(2), state.exec, state.scc)


def test_a_16_bit_constant_is_sign_extended(execute: Any) -> None:
    assert -5 & M32 == execute("s_movk_i32 s2, 0xfffb").scalar(2)
    state = execute("s_addk_i32 s2, 0xffff", {}, {2: 0x80000000})
    assert (0x7FFFFFFF, 1) == (state.scalar(2), state.scc)
    assert -21 & M32 == execute("s_mulk_i32 s2, 0xfffd", {}, {2: 7}).scalar(2)
    assert (2, -1 & M32) == tuple(
        execute("s_cmovk_i32 s2, 0xffff", {}, {2: 2}, scc=scc).scalar(2) for scc in (0, 1)
    )


def test_bits_are_tested_and_set(execute: Any) -> None:
    assert 1 == execute("s_bitcmp1_b32 s2, s3", {}, {2: 8, 3: 35}).scc
    assert 1 == execute("s_bitcmp0_b32 s2, 4", {}, {2: 8}).scc
    assert 1 == execute("s_bitcmp1_b64 s[2:3], 33", {}, {2: 0, 3: 2}).scc
    assert 1 == execute("s_bitcmp0_b64 s[2:3], 32", {}, {2: 0, 3: 2}).scc
    assert 1 << 33 == execute("s_bitset1_b64 s[2:3], 33", {}, {2: 0, 3: 0}).scalar64(2)
    assert 4 << 32 == execute("s_bitset0_b64 s[2:3], 33", {}, {2: 0, 3: 6}).scalar64(2)
    assert 12 == execute("s_bitset1_b32 s2, 2", {}, {2: 8}).scalar(2)
    assert 8 == execute("s_bitset0_b32 s2, s3", {}, {2: 12, 3: 34}).scalar(2)


def test_bfm_b64_makes_a_mask(execute: Any) -> None:
    assert ((1 << 40) - 1) << 3 == execute("s_bfm_b64 s[2:3], s4, 3", {}, {4: 40}).scalar64(2)


def test_halves_of_vcc_and_exec_are_registers(execute: Any) -> None:
    state = execute(
        "s_mov_b32 exec_lo, 0xf0\ns_mov_b32 vcc_hi, exec_lo\nv_mov_b32_e32 v0, 1", {0: 0}, {}, vcc=5
    )
    assert (0xF0 << 32 | 5, M32 << 32 | 0xF0) == (state.vcc, state.exec)
    assert [int(4 <= lane < 8 or lane >= 32) for lane in range(64)] == state.vector(0)


def test_execz_and_vccz_may_be_read_as_numbers(execute: Any) -> None:
    assert 1 == execute("s_add_u32 s2, src_vccz, 0", {}, {}, vcc=0).scalar(2)
    assert 0 == execute("s_add_u32 s2, src_execz, 0").scalar(2)
    assert 1 == execute("s_add_u32 s2, src_scc, 0", {}, {}, scc=1).scalar(2)
