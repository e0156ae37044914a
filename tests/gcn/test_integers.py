"""Vector integer instructions, each against the ISA's definition in plain Python integers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from attnproof import gcn

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
EDGES = [
    0,
    1,
    2,
    31,
    32,
    33,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x10000,
    0x7FFFFF,
    0x800000,
    0xFFFFFF,
    0x7FFFFFFF,
    0x80000000,
    M32,
]


def words(seed: int) -> list[int]:
    rng = random.Random(seed)
    found = [rng.choice(EDGES) for _ in range(24)] + [rng.getrandbits(32) for _ in range(40)]
    rng.shuffle(found)
    return found


def s32(word: int) -> int:
    return word - (word >> 31 << 32)


def s16(word: int) -> int:
    return (word & 0xFFFF) - ((word >> 15 & 1) << 16)


def s24(word: int) -> int:
    return (word & 0xFFFFFF) - ((word >> 23 & 1) << 24)


def signed(word: int, bits: int) -> int:
    return (word & (1 << bits) - 1) - ((word >> bits - 1 & 1) << bits)


def bfe_i32(a: int, b: int, c: int) -> int:
    offset, width = b & 31, c & 31
    if width == 0:
        return 0
    if offset + width < 32:
        return signed(a >> offset, width)
    return s32(a) >> offset


def perm(a: int, b: int, c: int) -> int:
    source, result = (a << 32 | b).to_bytes(8, "little"), 0
    for k in range(4):
        select = c >> 8 * k & 255
        if select <= 7:
            byte = source[select]
        elif select <= 11:
            byte = 255 if source[2 * (select - 8) + 1] & 128 else 0
        else:
            byte = 0 if select == 12 else 255
        result |= byte << 8 * k
    return result


def dot(count: int, bits: int, is_signed: bool) -> Callable[[int, int, int], int]:
    def run(a: int, b: int, c: int) -> int:
        mask = (1 << bits) - 1
        for k in range(count):
            x, y = a >> bits * k & mask, b >> bits * k & mask
            c += signed(x, bits) * signed(y, bits) if is_signed else x * y
        return c

    return run


def ffbh_i32(a: int) -> int:
    bits = f"{a:032b}"
    return next((k for k in range(1, 32) if bits[k] != bits[0]), -1)


ONE: dict[str, Callable[[int], int]] = {
    "v_mov_b32_e32": lambda a: a,
    "v_not_b32_e32": lambda a: ~a,
    "v_bfrev_b32_e32": lambda a: int(f"{a:032b}"[::-1], 2),
    "v_ffbh_u32_e32": lambda a: 32 - a.bit_length() if a else -1,
    "v_ffbl_b32_e32": lambda a: (a & -a).bit_length() - 1,
    "v_ffbh_i32_e32": ffbh_i32,
}
TWO: dict[str, Callable[[int, int], int]] = {
    "v_add_u32_e32": lambda a, b: a + b,
    "v_sub_u32_e32": lambda a, b: a - b,
    "v_subrev_u32_e32": lambda a, b: b - a,
    "v_and_b32_e32": lambda a, b: a & b,
    "v_or_b32_e32": lambda a, b: a | b,
    "v_xor_b32_e32": lambda a, b: a ^ b,
    "v_xnor_b32_e32": lambda a, b: ~(a ^ b),
    "v_lshlrev_b32_e32": lambda a, b: b << a % 32,
    "v_lshrrev_b32_e32": lambda a, b: b >> a % 32,
    "v_ashrrev_i32_e32": lambda a, b: s32(b) >> a % 32,
    "v_min_u32_e32": min,
    "v_max_u32_e32": max,
    "v_min_i32_e32": lambda a, b: min(s32(a), s32(b)),
    "v_max_i32_e32": lambda a, b: max(s32(a), s32(b)),
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": lambda a, b: a * b >> 32,
    "v_mul_hi_i32": lambda a, b: s32(a) * s32(b) >> 32,
    "v_mul_u32_u24_e32": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "v_mul_hi_u32_u24_e32": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32,
    "v_mul_i32_i24_e32": lambda a, b: s24(a) * s24(b),
    "v_mul_hi_i32_i24_e32": lambda a, b: s24(a) * s24(b) >> 32,
    "v_bcnt_u32_b32": lambda a, b: a.bit_count() + b,
    "v_bfm_b32": lambda a, b: ((1 << a % 32) - 1) << b % 32,
    "v_pack_b32_f16": lambda a, b: a & 0xFFFF | (b & 0xFFFF) << 16,
    "v_add_u16_e32": lambda a, b: (a + b) & 0xFFFF,
    "v_sub_u16_e32": lambda a, b: (a - b) & 0xFFFF,
    "v_subrev_u16_e32": lambda a, b: (b - a) & 0xFFFF,
    "v_mul_lo_u16_e32": lambda a, b: (a * b) & 0xFFFF,
    "v_lshlrev_b16_e32": lambda a, b: (b << a % 16) & 0xFFFF,
    "v_lshrrev_b16_e32": lambda a, b: (b & 0xFFFF) >> a % 16,
    "v_ashrrev_i16_e32": lambda a, b: (s16(b) >> a % 16) & 0xFFFF,
    "v_min_u16_e32": lambda a, b: min(a & 0xFFFF, b & 0xFFFF),
    "v_max_u16_e32": lambda a, b: max(a & 0xFFFF, b & 0xFFFF),
    "v_min_i16_e32": lambda a, b: min(s16(a), s16(b)) & 0xFFFF,
    "v_max_i16_e32": lambda a, b: max(s16(a), s16(b)) & 0xFFFF,
}
THREE: dict[str, Callable[[int, int, int], int]] = {
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_lshl_add_u32": lambda a, b, c: (a << b % 32) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b & M32) << c % 32,
    "v_lshl_or_b32": lambda a, b, c: a << b % 32 | c,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_bfe_u32": lambda a, b, c: a >> b % 32 & (1 << c % 32) - 1,
    "v_bfe_i32": bfe_i32,
    "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
    "v_perm_b32": perm,
    "v_alignbit_b32": lambda a, b, c: (a << 32 | b) >> c % 32,
    "v_alignbyte_b32": lambda a, b, c: (a << 32 | b) >> 8 * (c % 4),
    "v_mad_u32_u24": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
    "v_mad_i32_i24": lambda a, b, c: s24(a) * s24(b) + c,
    "v_mad_u32_u16": lambda a, b, c: (a & 0xFFFF) * (b & 0xFFFF) + c,
    "v_mad_i32_i16": lambda a, b, c: s16(a) * s16(b) + c,
    "v_min3_u32": min,
    "v_max3_u32": max,
    "v_med3_u32": lambda a, b, c: sorted((a, b, c))[1],
    "v_min3_i32": lambda a, b, c: min(s32(a), s32(b), s32(c)),
    "v_max3_i32": lambda a, b, c: max(s32(a), s32(b), s32(c)),
    "v_med3_i32": lambda a, b, c: sorted((s32(a), s32(b), s32(c)))[1],
    "v_sad_u32": lambda a, b, c: abs(a - b) + c,
    "v_sad_u8": lambda a, b, c: sum(abs((a >> k & 255) - (b >> k & 255)) for k in (0, 8, 16, 24)) + c,
    "v_dot2_i32_i16": dot(2, 16, True),
    "v_dot2_u32_u16": dot(2, 16, False),
    "v_dot4_i32_i8": dot(4, 8, True),
    "v_dot4_u32_u8": dot(4, 8, False),
    "v_dot8_i32_i4": dot(8, 4, True),
    "v_dot8_u32_u4": dot(8, 4, False),
}
ROWS: list[tuple[str, int, Any]] = (
    [(name, 1, function) for name, function in ONE.items()]
    + [(name, 2, function) for name, function in TWO.items()]
    + [(name, 3, function) for name, function in THREE.items()]
)


@pytest.mark.parametrize(("name", "count", "function"), ROWS, ids=[row[0] for row in ROWS])
def test_an_integer_instruction_is_its_definition(execute: Any, name: str, count: int, function: Any) -> None:
    """64 lanes of edge values and random words."""
    inputs = [words(11 * (k + 1)) for k in range(3)]
    if name == "v_perm_b32":
        rng = random.Random(5)
        inputs[2] = [sum(rng.choice([*range(14), 255]) << 8 * k for k in range(4)) for _ in range(64)]
    text = f"{name} v0, " + ", ".join(f"v{k + 1}" for k in range(count))
    state = execute(text, {0: 0xDEADBEEF, 1: inputs[0], 2: inputs[1], 3: inputs[2]})
    expected = [function(*lane) & M32 for lane in zip(*inputs[:count], strict=True)]
    assert expected == state.vector(0)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("v_lshlrev_b64", lambda a, b: b << a % 64),
        ("v_lshrrev_b64", lambda a, b: b >> a % 64),
        ("v_ashrrev_i64", lambda a, b: signed(b, 64) >> a % 64),
    ],
)
def test_a_64_bit_shift_is_its_definition(execute: Any, name: str, function: Any) -> None:
    shift, low, high = words(1), words(2), words(3)
    state = execute(f"{name} v[4:5], v1, v[2:3]", {1: shift, 2: low, 3: high})
    expected = [function(a, b | c << 32) & M64 for a, b, c in zip(shift, low, high, strict=True)]
    assert expected == state.vector64(4)


@pytest.mark.parametrize("name", ["v_mad_u64_u32", "v_mad_i64_i32"])
def test_a_64_bit_multiply_add_gives_sum_and_carry(execute: Any, name: str) -> None:
    """The Philox multiply: a lost carry or a 32-bit product would change every random number."""
    a, b, low, high = words(1), words(2), words(3), words(4)
    state = execute(f"{name} v[4:5], vcc, v1, v2, v[6:7]", {1: a, 2: b, 6: low, 7: high})
    carries = 0
    for lane in range(64):
        addend = low[lane] | high[lane] << 32
        if "u64" in name:
            total = a[lane] * b[lane] + addend
        else:
            total = s32(a[lane]) * s32(b[lane]) + signed(addend, 64)
        assert total & M64 == state.vector64(4)[lane]
        carries |= (total >> 64 & 1) << lane
    assert carries == state.vcc


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("v_add_co_u32_e32 v0, vcc, v1, v2", lambda a, b, c: a + b),
        ("v_sub_co_u32_e32 v0, vcc, v1, v2", lambda a, b, c: a - b),
        ("v_subrev_co_u32_e32 v0, vcc, v1, v2", lambda a, b, c: b - a),
        ("v_addc_co_u32_e32 v0, vcc, v1, v2, vcc", lambda a, b, c: a + b + c),
        ("v_subb_co_u32_e32 v0, vcc, v1, v2, vcc", lambda a, b, c: a - b - c),
        ("v_subbrev_co_u32_e32 v0, vcc, v1, v2, vcc", lambda a, b, c: b - a - c),
        ("v_addc_co_u32_e64 v0, s[4:5], v1, v2, s[6:7]", lambda a, b, c: a + b + c),
    ],
)
def test_a_carry_chain_is_a_33_bit_sum(execute: Any, text: str, function: Any) -> None:
    """Active lanes only: the carry of an inactive lane is 0, its register stays."""
    a, b, carry_in, active = (
        words(1),
        words(2),
        random.Random(3).getrandbits(64),
        random.Random(4).getrandbits(64),
    )
    state = execute(
        text, {0: 77, 1: a, 2: b}, {6: carry_in, 7: carry_in >> 32}, vcc=carry_in, exec_mask=active
    )
    carries = 0
    for lane in range(64):
        total = function(a[lane], b[lane], carry_in >> lane & 1)
        if active >> lane & 1:
            carries |= (not 0 <= total <= M32) << lane
        assert (total & M32 if active >> lane & 1 else 77) == state.vector(0)[lane]
    assert carries == (state.scalar64(4) if "s[4:5]" in text else state.vcc)


def test_cndmask_takes_source_1_where_the_mask_is_set(execute: Any) -> None:
    mask = random.Random(1).getrandbits(64)
    a, b = words(1), words(2)
    expected = [y if mask >> lane & 1 else x for lane, (x, y) in enumerate(zip(a, b, strict=True))]
    assert expected == execute("v_cndmask_b32_e32 v0, v1, v2, vcc", {1: a, 2: b}, vcc=mask).vector(0)
    other = execute("v_cndmask_b32_e64 v0, v1, v2, s[8:9]", {1: a, 2: b}, {8: mask, 9: mask >> 32})
    assert expected == other.vector(0)


@pytest.mark.parametrize("relation", ["lt", "eq", "le", "gt", "ne", "ge", "f", "t"])
@pytest.mark.parametrize("kind", ["i16", "u16", "i32", "u32", "i64", "u64"])
def test_an_integer_compare_gives_a_lane_mask(execute: Any, relation: str, kind: str) -> None:
    functions = {
        "lt": int.__lt__, "eq": int.__eq__, "le": int.__le__, "gt": int.__gt__, "ne": int.__ne__, "ge": int.__ge__,
        "f": lambda a, b: False, "t": lambda a, b: True,
    }  # fmt: skip
    bits, is_signed = int(kind[1:]), kind[0] == "i"
    a, b = words(1), words(2)
    b[::3] = a[::3]
    high_a, high_b = [word % 3 for word in words(3)], [word % 3 for word in words(4)]
    wide = bits == 64
    left, right = ("v[2:3]", "v[4:5]") if wide else ("v2", "v4")
    active = random.Random(9).getrandbits(64)
    values = {2: a, 3: high_a, 4: b, 5: high_b}
    state = execute(f"v_cmp_{relation}_{kind}_e64 s[6:7], {left}, {right}", values, exec_mask=active)
    expected = 0
    for lane in range(64):
        x, y = a[lane] | high_a[lane] << 32, b[lane] | high_b[lane] << 32
        x, y = (signed(x, bits), signed(y, bits)) if is_signed else (x % (1 << bits), y % (1 << bits))
        expected |= int(functions[relation](x, y)) << lane
    assert expected & active == state.scalar64(6)


@pytest.mark.parametrize("relation", ["lt", "eq", "le", "gt", "ne", "ge", "f", "t"])
@pytest.mark.parametrize("kind", ["i16", "u16", "i32", "u32", "i64", "u64"])
def test_cmpx_is_cmp_and_writes_exec(execute: Any, relation: str, kind: str) -> None:
    left, right = ("v[2:3]", "v[4:5]") if "64" in kind else ("v2", "v4")
    values, active = (
        {2: words(1), 3: words(2), 4: words(1)[::-1], 5: words(2)},
        random.Random(9).getrandbits(64),
    )
    plain = execute(f"v_cmp_{relation}_{kind}_e32 vcc, {left}, {right}", values, exec_mask=active)
    narrowed = execute(f"v_cmpx_{relation}_{kind}_e32 vcc, {left}, {right}", values, exec_mask=active)
    assert (plain.vcc, plain.vcc) == (narrowed.vcc, narrowed.exec)
    assert active == plain.exec


@pytest.mark.parametrize(
    ("name", "bits", "function"),
    [
        ("v_add_u32_e64", 32, lambda a, b: a + b), ("v_sub_u32_e64", 32, lambda a, b: a - b),
        ("v_subrev_u32_e64", 32, lambda a, b: b - a), ("v_add_u16_e64", 16, lambda a, b: a + b),
        ("v_sub_u16_e64", 16, lambda a, b: a - b), ("v_subrev_u16_e64", 16, lambda a, b: b - a),
    ],
)  # fmt: skip
def test_clamp_saturates_an_unsigned_sum(execute: Any, name: str, bits: int, function: Any) -> None:
    a, b, top = words(1), words(2), (1 << bits) - 1
    expected = [min(max(function(x & top, y & top), 0), top) for x, y in zip(a, b, strict=True)]
    assert expected == execute(f"{name} v0, v1, v2 clamp", {1: a, 2: b}).vector(0)


@pytest.mark.parametrize(("name", "function"), [("v_add_i32", int.__add__), ("v_sub_i32", int.__sub__)])
def test_a_signed_sum_wraps_and_saturates_with_clamp(execute: Any, name: str, function: Any) -> None:
    a, b = words(1), words(2)
    exact = [function(s32(x), s32(y)) for x, y in zip(a, b, strict=True)]
    assert [total & M32 for total in exact] == execute(f"{name} v0, v1, v2", {1: a, 2: b}).vector(0)
    clamped = [min(max(total, -(1 << 31)), (1 << 31) - 1) & M32 for total in exact]
    assert clamped == execute(f"{name} v0, v1, v2 clamp", {1: a, 2: b}).vector(0)


@pytest.mark.parametrize(
    "text",
    [
        "v_mul_lo_u32 v0, v1, v2 clamp",
        "v_add_u32_e64 v0, v1, v2 op_sel:[1,0,0]",
        "ds_read_b32 v0, v1 gds",
        "v_mov_b32_dpp v0, v1 row_xmask:1",
    ],
)
def test_a_modifier_without_semantics_is_an_unknown_instruction(execute: Any, text: str) -> None:
    """Read past in silence it would change the meaning."""
    with pytest.raises(gcn.UnknownInstruction):
        execute(text, {1: 0, 2: 0})


def test_cmpx_narrows_exec_as_well(execute: Any) -> None:
    values = words(1)
    state = execute("v_cmpx_gt_u32_e32 vcc, 32, v1\nv_mov_b32_e32 v2, 5", {1: values, 2: 9})
    expected = sum((32 > word) << lane for lane, word in enumerate(values))
    assert (expected, expected) == (state.vcc, state.exec)
    assert [5 if 32 > word else 9 for word in values] == state.vector(2)


def test_mbcnt_counts_set_bits_below_the_lane(execute: Any) -> None:
    low, high = random.Random(1).getrandbits(32), random.Random(2).getrandbits(32)
    text = "v_mbcnt_lo_u32_b32 v0, s0, 3\nv_mbcnt_hi_u32_b32 v0, s1, v0"
    whole = low | high << 32
    expected = [3 + (whole & (1 << lane) - 1).bit_count() for lane in range(64)]
    assert expected == execute(text, {}, {0: low, 1: high}).vector(0)


@pytest.mark.parametrize(
    ("name", "function"),
    [("v_mad_u16", lambda a, b, c: a * b + c), ("v_mad_i16", lambda a, b, c: a * b + c)],
)
def test_a_16_bit_mad_of_gfx9_keeps_the_upper_half(execute: Any, name: str, function: Any) -> None:
    a, b, c = words(1), words(2), words(3)
    old = words(4)
    expected = [o & 0xFFFF0000 | function(x, y, z) & 0xFFFF for o, x, y, z in zip(old, a, b, c, strict=True)]
    assert expected == execute(f"{name} v0, v1, v2, v3", {0: old, 1: a, 2: b, 3: c}).vector(0)


PACKED: dict[str, Callable[..., int]] = {
    "v_pk_add_u16": lambda a, b: a + b,
    "v_pk_sub_u16": lambda a, b: a - b,
    "v_pk_add_i16": lambda a, b: a + b,
    "v_pk_sub_i16": lambda a, b: a - b,
    "v_pk_mul_lo_u16": lambda a, b: a * b,
    "v_pk_min_u16": min,
    "v_pk_max_u16": max,
    "v_pk_min_i16": lambda a, b: min(s16(a), s16(b)),
    "v_pk_max_i16": lambda a, b: max(s16(a), s16(b)),
    "v_pk_lshlrev_b16": lambda a, b: b << a % 16,
    "v_pk_lshrrev_b16": lambda a, b: b >> a % 16,
    "v_pk_ashrrev_i16": lambda a, b: s16(b) >> a % 16,
    "v_pk_mad_u16": lambda a, b, c: a * b + c,
    "v_pk_mad_i16": lambda a, b, c: a * b + c,
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("crossed", [False, True])
def test_a_packed_integer_instruction_works_on_both_halves(execute: Any, name: str, crossed: bool) -> None:
    """With op_sel and op_sel_hi the first source's halves are exchanged."""
    count = 3 if "mad" in name else 2
    inputs = [words(k) for k in range(1, count + 1)]
    tail = f" op_sel:[1{',0' * (count - 1)}] op_sel_hi:[0{',1' * (count - 1)}]" if crossed else ""
    state = execute(
        f"{name} v0, " + ", ".join(f"v{k + 1}" for k in range(count)) + tail, dict(enumerate(inputs, 1))
    )
    for lane, given in enumerate(zip(*inputs, strict=True)):
        low, high = [word & 0xFFFF for word in given], [word >> 16 for word in given]
        if crossed:
            low[0], high[0] = high[0], low[0]
        assert PACKED[name](*low) & 0xFFFF | (PACKED[name](*high) & 0xFFFF) << 16 == state.vector(0)[lane]


def test_sources_may_be_scalars_and_constants(execute: Any) -> None:
    values = words(1)
    assert [(word + 7) & M32 for word in values] == execute(
        "v_add_u32_e32 v0, s3, v1", {1: values}, {3: 7}
    ).vector(0)
    assert [(word - 16) & M32 for word in values] == execute("v_add_u32_e32 v0, -16, v1", {1: values}).vector(
        0
    )
    assert [(word + 0x12345) & M32 for word in values] == execute(
        "v_add_u32_e32 v0, 0x12345, v1", {1: values}
    ).vector(0)
    assert [word ^ 0x3F800000 for word in values] == execute("v_xor_b32_e32 v0, 1.0, v1", {1: values}).vector(
        0
    )


def test_an_inactive_lane_keeps_its_register(execute: Any) -> None:
    active = random.Random(1).getrandbits(64)
    values = words(1)
    state = execute("v_mov_b32_e32 v0, v1", {0: 5, 1: values}, exec_mask=active)
    assert [word if active >> lane & 1 else 5 for lane, word in enumerate(values)] == state.vector(0)
