"""Transcendental, converting, rounding and comparing instructions, and the division sequence, against exact arithmetic."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath
import pytest
from tests.gcn.exact import (
    INF,
    M32,
    b16,
    b32,
    f16,
    f32,
    floats,
    fma,
    halves,
    product,
    rounded,
    same,
)

CLOSE: dict[str, Callable[[Any], Any]] = {
    "exp": lambda a: mpmath.mpf(2) ** a,
    "log": lambda a: mpmath.log(a, 2),
    "rcp": lambda a: 1 / a,
    "rcp_iflag": lambda a: 1 / a,
    "rsq": lambda a: 1 / mpmath.sqrt(a),
    "sqrt": mpmath.sqrt,
    "sin": lambda a: mpmath.sin(2 * mpmath.pi * a),
    "cos": lambda a: mpmath.cos(2 * mpmath.pi * a),
}


@pytest.mark.parametrize("name", CLOSE)
def test_a_transcendental_is_within_one_ulp(execute: Any, name: str) -> None:
    """The ISA promises 1 ulp; which neighbour the chip gives is not defined. Denormals are flushed."""
    rng = random.Random(3)
    values = [abs(rng.gauss(0, 1)) * 2.0 ** rng.randint(-12, 6) + 1e-3 for _ in range(64)]
    if name not in ("log", "rsq", "sqrt"):
        values = [value * rng.choice((-1, 1)) for value in values]
    patterns = [b32(value) for value in values]
    got = execute(f"v_{name}_f32_e32 v0, v1", {1: patterns}).vector(0)
    with mpmath.workdps(40):
        for word, result in zip(patterns, got, strict=True):
            exact = CLOSE[name](mpmath.mpf(f32(word)))
            near = f32(result)
            ulp = max(2.0**-149, 2.0 ** (math.frexp(near)[1] - 24))
            floor = 2.0**-22 if name in ("sin", "cos") else 0.0
            assert abs(exact - mpmath.mpf(near)) <= ulp + floor


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("exp", -INF, 0.0), ("exp", INF, INF), ("exp", -130.0, 0.0), ("exp", 128.0, INF), ("exp", 3.0, 8.0),
        ("log", 0.0, -INF), ("log", INF, INF), ("log", 2.0**-130, -INF), ("log", 8.0, 3.0), ("log", -1.0, math.nan),
        ("rcp", 0.0, INF), ("rcp", -0.0, -INF), ("rcp", INF, 0.0), ("rcp", 2.0**127, 0.0), ("rcp", 4.0, 0.25),
        ("rsq", 4.0, 0.5), ("sqrt", 9.0, 3.0), ("sqrt", -1.0, math.nan), ("exp", math.nan, math.nan),
    ],
)  # fmt: skip
def test_a_transcendental_at_its_edges(execute: Any, name: str, given: float, wanted: float) -> None:
    """Softmax relies on exp(-inf) = 0 and log(0) = -inf."""
    got = f32(execute(f"v_{name}_f32_e32 v0, v1", {1: b32(given)}).vector(0)[0])
    assert same(wanted, got)


def toward(number: float, low: int, high: int, how: Callable[[float], int]) -> int:
    if math.isnan(number):
        return 0
    return min(max(how(number) if math.isfinite(number) else (high if number > 0 else low), low), high)


CONVERSIONS: dict[str, Callable[[int], int]] = {
    "v_cvt_f32_u32_e32": lambda w: b32(rounded(Fraction(w), "f32")),
    "v_cvt_f32_i32_e32": lambda w: b32(rounded(Fraction(w - (w >> 31 << 32)), "f32")),
    "v_cvt_u32_f32_e32": lambda w: toward(f32(w), 0, M32, math.trunc),
    "v_cvt_i32_f32_e32": lambda w: toward(f32(w), -(2**31), 2**31 - 1, math.trunc),
    "v_cvt_flr_i32_f32_e32": lambda w: toward(f32(w), -(2**31), 2**31 - 1, math.floor),
    "v_cvt_rpi_i32_f32_e32": lambda w: toward(
        f32(w), -(2**31), 2**31 - 1, lambda a: math.floor(Fraction(a) + Fraction(1, 2))
    ),
    "v_cvt_f32_ubyte0_e32": lambda w: b32(float(w & 255)),
    "v_cvt_f32_ubyte1_e32": lambda w: b32(float(w >> 8 & 255)),
    "v_cvt_f32_ubyte2_e32": lambda w: b32(float(w >> 16 & 255)),
    "v_cvt_f32_ubyte3_e32": lambda w: b32(float(w >> 24)),
    "v_cvt_f16_u16_e32": lambda w: b16(rounded(Fraction(w & 0xFFFF), "f16")),
    "v_cvt_f16_i16_e32": lambda w: b16(rounded(Fraction((w & 0xFFFF) - ((w >> 15 & 1) << 16)), "f16")),
    "v_cvt_u16_f16_e32": lambda w: toward(f16(w), 0, 65535, math.trunc),
    "v_cvt_i16_f16_e32": lambda w: toward(f16(w), -32768, 32767, math.trunc) & 0xFFFF,
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_rounds_and_saturates(execute: Any, name: str) -> None:
    given = floats(1)
    got = execute(f"{name} v0, v1", {1: given}).vector(0)
    assert [CONVERSIONS[name](word) & M32 for word in given] == got


def test_fp32_to_fp16_rounds_to_nearest_even(execute: Any) -> None:
    """Halfway cases, overflow to infinity, and denormals of fp16."""
    rng = random.Random(1)
    given = [
        b32(x)
        for x in (
            65519.9,
            65520.0,
            -65504.0,
            2.0**-24,
            2.0**-25,
            2.0**-25 * 1.001,
            1 + 2**-11,
            1 + 3 * 2**-11,
        )
    ]
    given += [b32(rng.gauss(0, 1) * 2.0 ** rng.randint(-26, 16)) for _ in range(56)]
    got = execute("v_cvt_f16_f32_e32 v0, v1", {1: given}).vector(0)
    for word, result in zip(given, got, strict=True):
        assert same(rounded(Fraction(f32(word)), "f16", word >> 31 == 1), f16(result)) and result < 0x10000
    back = execute("v_cvt_f32_f16_e32 v0, v1", {1: halves(7)}).vector(0)
    assert all(same(f16(word), f32(result)) for word, result in zip(halves(7), back, strict=True))


def test_pkrtz_rounds_toward_zero(execute: Any) -> None:
    a, b = floats(1, wild=False), floats(2, wild=False)
    got = execute("v_cvt_pkrtz_f16_f32 v0, v1, v2", {1: a, 2: b}).vector(0)
    for lane in range(64):
        for word, half in ((a[lane], got[lane] & 0xFFFF), (b[lane], got[lane] >> 16)):
            exact, near = abs(Fraction(f32(word))), abs(f16(half))
            above = Fraction(abs(f16(half + 1))) if (half & 0x7FFF) < 0x7BFF else None
            assert (Fraction(near) <= exact and (above is None or exact < above)) and f32(word) * f16(
                half
            ) >= 0


ROUNDINGS: dict[str, Callable[[float], float]] = {
    "floor": lambda a: float(math.floor(a)),
    "ceil": lambda a: float(math.ceil(a)),
    "trunc": lambda a: float(math.trunc(a)),
    "rndne": lambda a: float(round(a)),
    "fract": lambda a: min(rounded(Fraction(a) - math.floor(a), "f32"), 1 - 2.0**-24),
    "frexp_mant": lambda a: math.frexp(a)[0],
}


@pytest.mark.parametrize("name", ROUNDINGS)
def test_a_rounding_instruction_is_its_definition(execute: Any, name: str) -> None:
    given = floats(1, wild=False)
    got = execute(f"v_{name}_f32_e32 v0, v1", {1: given}).vector(0)
    assert [ROUNDINGS[name](f32(word)) for word in given] == [f32(word) for word in got]


def test_frexp_exp_and_ldexp_take_numbers_apart_and_together(execute: Any) -> None:
    given = floats(1, wild=False)
    text = "v_frexp_exp_i32_f32_e32 v2, v1\nv_frexp_mant_f32_e32 v3, v1\nv_ldexp_f32 v0, v3, v2"
    state = execute(text, {1: given})
    assert [math.frexp(f32(word))[1] & M32 for word in given] == state.vector(2)
    assert given == state.vector(0)
    low = execute("v_ldexp_f32 v0, v1, v2", {1: given, 2: [-140 & M32] * 64}).vector(0)
    assert [rounded(Fraction(f32(word)) / 2**140, "f32", word >> 31 == 1) for word in given] == [
        f32(w) for w in low
    ]


FP_RELATIONS: dict[str, Callable[[float, float], bool]] = {
    "f": lambda a, b: False, "lt": lambda a, b: a < b, "eq": lambda a, b: a == b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "lg": lambda a, b: a < b or a > b, "ge": lambda a, b: a >= b,
    "o": lambda a, b: not (math.isnan(a) or math.isnan(b)), "u": lambda a, b: math.isnan(a) or math.isnan(b),
    "nge": lambda a, b: not a >= b, "nlg": lambda a, b: not (a < b or a > b), "ngt": lambda a, b: not a > b,
    "nle": lambda a, b: not a <= b, "neq": lambda a, b: a != b, "nlt": lambda a, b: not a < b,
    "tru": lambda a, b: True,
}  # fmt: skip


@pytest.mark.parametrize("relation", FP_RELATIONS)
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_a_floating_compare_gives_a_lane_mask(execute: Any, relation: str, kind: str) -> None:
    a, b = (floats(1), floats(2)) if kind == "f32" else (halves(1), halves(2))
    b[::4] = a[::4]
    read = f32 if kind == "f32" else f16
    expected = sum(
        int(FP_RELATIONS[relation](read(x), read(y))) << lane
        for lane, (x, y) in enumerate(zip(a, b, strict=True))
    )
    assert expected == execute(f"v_cmp_{relation}_{kind}_e32 vcc, v1, v2", {1: a, 2: b}).vcc
    narrowed = execute(f"v_cmpx_{relation}_{kind}_e32 vcc, v1, v2", {1: a, 2: b})
    assert (expected, expected) == (narrowed.vcc, narrowed.exec)


def doubles(seed: int) -> tuple[list[int], list[int]]:
    """Low and high words of fp64 numbers, some special."""
    rng = random.Random(seed)
    numbers = [rng.choice([0.0, -0.0, 1.5, INF, -INF, math.nan, 5e-324, rng.gauss(0, 1)]) for _ in range(64)]
    patterns = [struct.unpack("<Q", struct.pack("<d", number))[0] for number in numbers]
    return [pattern & M32 for pattern in patterns], [pattern >> 32 for pattern in patterns]


@pytest.mark.parametrize("relation", FP_RELATIONS)
def test_an_fp64_compare_gives_a_lane_mask(execute: Any, relation: str) -> None:
    a, b = doubles(1), doubles(2)
    values = {2: a[0], 3: a[1], 4: b[0], 5: b[1]}
    left, right = (
        [struct.unpack("<d", struct.pack("<2I", *pair))[0] for pair in zip(*x, strict=True)] for x in (a, b)
    )
    expected = sum(
        int(FP_RELATIONS[relation](x, y)) << lane for lane, (x, y) in enumerate(zip(left, right, strict=True))
    )
    assert expected == execute(f"v_cmp_{relation}_f64_e32 vcc, v[2:3], v[4:5]", values).vcc
    assert expected == execute(f"v_cmpx_{relation}_f64_e32 vcc, v[2:3], v[4:5]", values).exec


@pytest.mark.parametrize("name", ["exp", "log", "rcp", "rsq", "sqrt"])
def test_an_fp16_transcendental_is_within_one_ulp(execute: Any, name: str) -> None:
    rng = random.Random(3)
    patterns = [b16(abs(rng.gauss(0, 1)) + 0.01) for _ in range(64)]
    got = execute(f"v_{name}_f16_e32 v0, v1", {1: patterns}).vector(0)
    for word, result in zip(patterns, got, strict=True):
        exact, near = CLOSE[name](mpmath.mpf(f16(word))), f16(result)
        assert abs(exact - mpmath.mpf(near)) <= max(2.0**-24, 2.0 ** (math.frexp(near)[1] - 11))


@pytest.mark.parametrize("name", ["floor", "ceil", "trunc", "rndne"])
def test_an_fp16_rounding_instruction_is_its_definition(execute: Any, name: str) -> None:
    patterns = [b16(random.Random(k).gauss(0, 9)) for k in range(64)]
    got = execute(f"v_{name}_f16_e32 v0, v1", {1: patterns}).vector(0)
    assert [ROUNDINGS[name](f16(word)) for word in patterns] == [f16(word) for word in got]


def test_fp16_ldexp_scales_by_a_signed_power(execute: Any) -> None:
    patterns, powers = [b16(1.0 + k / 64) for k in range(64)], [k % 30 - 26 for k in range(64)]
    got = execute(
        "v_ldexp_f16_e32 v0, v1, v2", {1: patterns, 2: [power & 0xFFFF for power in powers]}
    ).vector(0)
    expected = [
        rounded(Fraction(f16(w)) * Fraction(2) ** e, "f16") for w, e in zip(patterns, powers, strict=True)
    ]
    assert expected == [f16(word) for word in got]


@pytest.mark.parametrize("text", ["v_mad_f16 v0, v1, v2, v0", "v_mac_f16_e32 v0, v1, v2"])
def test_fp16_mad_rounds_twice(execute: Any, text: str) -> None:
    a, b, c = halves(1), halves(2), halves(3)
    got = execute(text, {0: c, 1: a, 2: b}).vector(0)
    for lane in range(64):
        x = product(f16(a[lane]), f16(b[lane]), "f16")
        assert same(fma(x, 1.0, f16(c[lane]), "f16"), f16(got[lane]))


def test_legacy_multiply_takes_zero_times_anything_as_zero(execute: Any) -> None:
    a, b = floats(1), floats(2)
    got = execute("v_mul_legacy_f32 v0, v1, v2", {1: a, 2: b}).vector(0)
    for x, y, result in zip(map(f32, a), map(f32, b), got, strict=True):
        assert same(0.0 if 0.0 in (abs(x), abs(y)) else product(x, y, "f32"), f32(result))


def test_fp64_and_integers_convert_both_ways(execute: Any) -> None:
    given = [0, 1, 0x7FFFFFFF, 0x80000000, M32] + [random.Random(k).getrandbits(32) for k in range(59)]
    state = execute("v_cvt_f64_u32_e32 v[2:3], v1\nv_cvt_u32_f64_e32 v0, v[2:3]", {1: given})
    assert given == state.vector(0)
    assert [struct.unpack("<Q", struct.pack("<d", word))[0] for word in given] == state.vector64(2)
    state = execute(
        "v_cvt_f64_i32_e32 v[2:3], v1\nv_cvt_i32_f64_e32 v0, v[2:3]\nv_cvt_u32_f64_e32 v4, v[2:3]", {1: given}
    )
    assert given == state.vector(0)
    assert [0 if word >> 31 else word for word in given] == state.vector(4)


def test_fp16_division_fixup_sorts_out_special_operands(execute: Any) -> None:
    """S0 quotient, S1 denominator, S2 numerator."""
    rows = [(0.5, 0.0, 1.0, INF), (0.5, -0.0, 1.0, -INF), (0.5, 0.0, 0.0, math.nan), (0.5, INF, 1.0, 0.0), (0.5, INF, -INF, math.nan),
            (0.5, 2.0, -1.0, -0.5), (0.5, 2.0, 0.0, 0.0), (0.5, math.nan, 1.0, math.nan)]  # fmt: skip
    columns = [
        [b16(x) if not math.isnan(x) else 0x7E00 for x in column] * 8 for column in zip(*rows, strict=True)
    ]
    got = execute("v_div_fixup_f16 v0, v1, v2, v3", {1: columns[0], 2: columns[1], 3: columns[2]}).vector(0)
    assert all(same(row[3], f16(word)) for row, word in zip(rows * 8, got, strict=True))


def test_cmp_class_sorts_numbers_into_ten_classes(execute: Any) -> None:
    given = [
        0x7F800001,
        0x7FC00000,
        0xFF800000,
        0xC0000000,
        0x80000001,
        0x80000000,
        0,
        1,
        0x40000000,
        0x7F800000,
    ]
    for number, pattern in enumerate(given):
        state = execute(
            "v_cmp_class_f32_e64 s[0:1], v1, v2", {1: pattern, 2: [1 << lane % 10 for lane in range(64)]}
        )
        assert sum(1 << lane for lane in range(64) if lane % 10 == number) == state.scalar64(0)
        narrowed = execute(
            "v_cmpx_class_f32_e32 vcc, v1, v2", {1: pattern, 2: [1 << lane % 10 for lane in range(64)]}
        )
        assert (state.scalar64(0), state.scalar64(0)) == (narrowed.vcc, narrowed.exec)


def test_the_division_sequence_of_the_compiler_is_correctly_rounded(execute: Any) -> None:
    """v_div_scale, v_rcp, five fused steps, v_div_fmas, v_div_fixup: what clang emits for a / b."""
    rng = random.Random(2)
    a = floats(1)[:32] + [b32(rng.gauss(0, 1) * 2.0 ** rng.randint(-120, 120)) for _ in range(32)]
    b = floats(2)[:32] + [b32(rng.gauss(0, 1) * 2.0 ** rng.randint(-120, 120)) for _ in range(32)]
    text = """v_div_scale_f32 v3, s[4:5], v2, v2, v1
        v_div_scale_f32 v4, vcc, v1, v2, v1
        v_rcp_f32_e32 v5, v3
        v_fma_f32 v6, -v3, v5, 1.0
        v_fma_f32 v5, v6, v5, v5
        v_mul_f32_e32 v6, v4, v5
        v_fma_f32 v7, -v3, v6, v4
        v_fma_f32 v6, v7, v5, v6
        v_fma_f32 v3, -v3, v6, v4
        v_div_fmas_f32 v3, v3, v5, v6
        v_div_fixup_f32 v0, v3, v2, v1"""
    got = execute(text, {1: a, 2: b}).vector(0)
    for x, y, result in zip(map(f32, a), map(f32, b), got, strict=True):
        if math.isfinite(x) and math.isfinite(y) and y != 0 and x != 0:
            wanted = rounded(Fraction(x) / Fraction(y), "f32", (x < 0) != (y < 0))
        elif math.isnan(x) or math.isnan(y) or (x == 0 and y == 0) or (math.isinf(x) and math.isinf(y)):
            wanted = math.nan
        else:
            wanted = math.copysign(
                INF if y == 0 or math.isinf(x) else 0.0, math.copysign(1, x) * math.copysign(1, y)
            )
        assert same(wanted, f32(result)), (x, y, f32(result))
