"""Floating-point instructions, each against the ISA's definition in exact rational arithmetic, rounded once here."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath
import pytest

M32 = (1 << 32) - 1
INF = float("inf")
# (bits of the significand, least exponent of a normal number, greatest exponent)
FORMATS = {"f16": (11, -14, 15), "f32": (24, -126, 127), "f64": (53, -1022, 1023)}


def rounded(exact: Fraction, form: str, negative_zero: bool = False) -> float:
    """A rational number rounded to nearest even in a format: infinity above its range, denormals kept."""
    if exact == 0:
        return -0.0 if negative_zero else 0.0
    bits, least, greatest = FORMATS[form]
    size = abs(exact)
    exponent = max(math.frexp(float(size))[1] - 1 if 0 < float(size) < INF else _log2(size), least)
    step = Fraction(2) ** (exponent - bits + 1)
    count, rest = divmod(size, step)
    if rest * 2 > step or (rest * 2 == step and count % 2):
        count += 1
    value = count * step
    if value >= Fraction(2) ** (greatest + 1):
        return math.copysign(INF, exact)
    return math.copysign(float(value), exact)


def _log2(size: Fraction) -> int:
    guess = size.numerator.bit_length() - size.denominator.bit_length()
    return guess if Fraction(2) ** guess <= size else guess - 1


def f32(word: int) -> float:
    return struct.unpack("<f", struct.pack("<I", word & M32))[0]


def b32(number: float) -> int:
    return struct.unpack("<I", struct.pack("<f", number))[0]


def f16(word: int) -> float:
    return struct.unpack("<e", struct.pack("<H", word & 0xFFFF))[0]


def b16(number: float) -> int:
    return (
        struct.unpack("<H", struct.pack("<e", number))[0]
        if math.isfinite(number)
        else (0xFC00 if number < 0 else 0x7C00)
    )


def same(wanted: float, got: float) -> bool:
    """Equal to the bit, all NaNs alike."""
    return (math.isnan(wanted) and math.isnan(got)) or (
        wanted == got and math.copysign(1, wanted) == math.copysign(1, got)
    )


EDGES32 = [
    0,
    0x80000000,
    1,
    0x807FFFFF,
    0x00800000,
    0x3F800000,
    0xBF800000,
    0x7F7FFFFF,
    0x7F800000,
    0xFF800000,
    0x7FC00000,
    0x33800000,
    0x4B7FFFFF,
]
EDGES16 = [0, 0x8000, 1, 0x83FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x3555, 0x0001]


def floats(seed: int, wild: bool = True) -> list[int]:
    """fp32 patterns: edges, any bits, and plain numbers near 1."""
    rng = random.Random(seed)
    plain = [b32(rng.gauss(0, 2)) for _ in range(24)]
    if not wild:
        return plain + [b32(rng.gauss(0, 1) * 2.0 ** rng.randint(-20, 20)) for _ in range(40)]
    found = [rng.choice(EDGES32) for _ in range(24)] + [rng.getrandbits(32) for _ in range(16)] + plain
    rng.shuffle(found)
    return found


def halves(seed: int) -> list[int]:
    """Words of two fp16 patterns."""
    rng = random.Random(seed)
    one = [rng.choice(EDGES16) for _ in range(40)] + [rng.getrandbits(16) for _ in range(40)]
    one += [b16(rng.gauss(0, 2)) for _ in range(48)]
    rng.shuffle(one)
    return [one[2 * k] | one[2 * k + 1] << 16 for k in range(64)]


def fma(a: float, b: float, c: float, form: str) -> float:
    if not all(map(math.isfinite, (a, b, c))):
        if any(map(math.isnan, (a, b, c))) or (0.0 in (abs(a), abs(b)) and INF in (abs(a), abs(b))):
            return math.nan
        if INF in (abs(a), abs(b)):
            product = math.copysign(INF, math.copysign(1, a) * math.copysign(1, b))
            return math.nan if c == -product else product
        return c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    sign = math.copysign(1, a) * math.copysign(1, b)
    return rounded(
        exact, form, exact == 0 and (a == 0 or b == 0 or exact == 0) and sign < 0 and math.copysign(1, c) < 0
    )


def product(a: float, b: float, form: str) -> float:
    """a * b rounded, with the sign of zero."""
    if math.isfinite(a) and math.isfinite(b):
        value = rounded(Fraction(a) * Fraction(b), form)
        return math.copysign(value, math.copysign(1, a) * math.copysign(1, b))
    return (
        math.nan
        if math.isnan(a) or math.isnan(b) or 0.0 in (abs(a), abs(b))
        else math.copysign(INF, math.copysign(1, a) * math.copysign(1, b))
    )


def largest(*numbers: float) -> float:
    real = [number for number in numbers if not math.isnan(number)]
    return max(real, key=lambda number: (number, math.copysign(1, number))) if real else math.nan


def smallest(*numbers: float) -> float:
    return -largest(*(-number for number in numbers))


def median(a: float, b: float, c: float) -> float:
    if any(map(math.isnan, (a, b, c))):
        return smallest(a, b, c)
    return sorted((a, b, c), key=lambda number: (number, math.copysign(1, number)))[1]


def arithmetic(form: str) -> dict[str, tuple[int, Callable[..., float]]]:
    return {
        "add": (2, lambda a, b: fma(a, 1.0, b, form)),
        "sub": (2, lambda a, b: fma(a, 1.0, -b, form)),
        "subrev": (2, lambda a, b: fma(b, 1.0, -a, form)),
        "mul": (2, lambda a, b: product(a, b, form)),
        "max": (2, largest),
        "min": (2, smallest),
        "max3": (3, largest),
        "min3": (3, smallest),
        "fma": (3, lambda a, b, c: fma(a, b, c, form)),
    }


@pytest.mark.parametrize("name", [*arithmetic("f32"), "med3"])
def test_an_fp32_instruction_is_its_definition_rounded_once(execute: Any, name: str) -> None:
    """Denormals, infinities, signed zeros and halfway cases included."""
    count, function = {**arithmetic("f32"), "med3": (3, median)}[name]
    inputs = [floats(k) for k in range(1, 4)]
    text = f"v_{name}_f32 v0, " + ", ".join(f"v{k + 1}" for k in range(count))
    got = execute(text, dict(enumerate(inputs, 1))).vector(0)
    for lane, given in enumerate(zip(*inputs[:count], strict=True)):
        values = [f32(word) for word in given]
        assert same(function(*values), f32(got[lane])), (values, f32(got[lane]))


def test_a_fused_multiply_add_is_rounded_once_at_a_midpoint(execute: Any) -> None:
    """Cases where fp64 rounds onto an fp32 midpoint: the second rounding would then go the wrong way."""
    rng = random.Random(1)
    rows = []
    while len(rows) < 64:
        a, b = f32(rng.getrandbits(23) | 0x3F800000), f32(rng.getrandbits(23) | 0x3F800000)
        # an addend far below that pushes the exact sum off a midpoint by less than fp64 can hold
        whole = Fraction(a) * Fraction(b)
        tie = Fraction(rounded(whole, "f32")) + Fraction(2) ** -24
        rest = tie - whole
        c = rounded(rest, "f32")
        rows.append((b32(a), b32(b), b32(c)))
    big = (b32(1 + 2**-12), b32(1 + 2**-12), b32(2.0**-80))
    # (1 + 2**-12)**2 = 1 + 2**-11 + 2**-24: a midpoint of fp32, and the addend decides
    rows[0], rows[1] = big, (big[0], big[1], b32(-(2.0**-80)))
    inputs = [list(column) for column in zip(*rows, strict=True)]
    got = execute("v_fma_f32 v0, v1, v2, v3", dict(enumerate(inputs, 1))).vector(0)
    for lane, given in enumerate(rows):
        assert b32(fma(*(f32(word) for word in given), "f32")) == got[lane]
    assert got[0] == got[1] + 1


def test_fmac_adds_to_its_destination(execute: Any) -> None:
    inputs = [floats(k) for k in range(1, 4)]
    got = execute("v_fmac_f32_e32 v0, v1, v2", {0: inputs[2], 1: inputs[0], 2: inputs[1]}).vector(0)
    for lane, given in enumerate(zip(*inputs, strict=True)):
        assert same(fma(*(f32(word) for word in given), "f32"), f32(got[lane]))


def flushed(number: float) -> float:
    return math.copysign(0.0, number) if abs(number) < 2.0**-126 else number


@pytest.mark.parametrize("text", ["v_mad_f32 v0, v1, v2, v0", "v_mac_f32_e32 v0, v1, v2"])
def test_mad_rounds_twice_and_flushes_denormals(execute: Any, text: str) -> None:
    inputs = [floats(k) for k in range(1, 4)]
    got = execute(text, {0: inputs[2], 1: inputs[0], 2: inputs[1]}).vector(0)
    for lane, given in enumerate(zip(*inputs, strict=True)):
        a, b, c = (flushed(f32(word)) for word in given)
        assert same(flushed(fma(flushed(product(a, b, "f32")), 1.0, c, "f32")), f32(got[lane]))


@pytest.mark.parametrize(
    ("text", "order"),
    [("v_madmk_f32 v0, v1, 0x40490fdb, v2", (1, 0, 2)), ("v_madak_f32 v0, v1, v2, 0x40490fdb", (1, 2, 0))],
)
def test_madmk_and_madak_take_their_literal(execute: Any, text: str, order: tuple[int, int, int]) -> None:
    a, b = floats(1, wild=False), floats(2, wild=False)
    got = execute(text, {1: a, 2: b}).vector(0)
    for lane in range(64):
        pool = (f32(0x40490FDB), f32(a[lane]), f32(b[lane]))
        x, y, z = (pool[k] for k in order)
        assert fma(product(x, y, "f32"), 1.0, z, "f32") == f32(got[lane])


def test_with_flushing_set_denormals_count_as_zero(execute: Any) -> None:
    """FLOAT_DENORM_MODE of the kernel descriptor decides."""
    inputs = [[1, 0x80000001, 0x00800000] + [0x00400000] * 61, [0x3F800000] * 64]
    kept = execute("v_add_f32_e32 v0, v1, v2\nv_mul_f32_e32 v3, v1, v2", dict(enumerate(inputs, 1)))
    gone = execute("v_mul_f32_e32 v3, 0.5, v1", dict(enumerate(inputs, 1)), flush=True)
    assert [1, 0x80000001, 0x00800000] == kept.vector(3)[:3]
    assert [0, 0x80000000, 0] == gone.vector(3)[:3]


@pytest.mark.parametrize("name", ["add", "sub", "subrev", "mul", "max", "min", "max3", "min3", "fma"])
def test_an_fp16_instruction_is_its_definition_rounded_once(execute: Any, name: str) -> None:
    """The upper half is cleared, except by the three-operand fused form, which keeps it on gfx9."""
    count, function = arithmetic("f16")[name]
    inputs = [halves(k) for k in range(1, 4)]
    text = f"v_{name}_f16 v0, " + ", ".join(f"v{k + 1}" for k in range(count))
    got = execute(text, {0: 0xABCD1234, **dict(enumerate(inputs, 1))}).vector(0)
    for lane, given in enumerate(zip(*inputs[:count], strict=True)):
        values = [f16(word) for word in given]
        assert same(function(*values), f16(got[lane])), values
        assert (0xABCD if name == "fma" else 0) == got[lane] >> 16


@pytest.mark.parametrize("name", ["add", "mul", "max", "min", "fma"])
@pytest.mark.parametrize("tail", ["", "op_sel:[1,0,0] op_sel_hi:[0,1,1]", "neg_lo:[0,1,0] neg_hi:[1,0,0]"])
def test_a_packed_fp16_instruction_works_on_both_halves(execute: Any, name: str, tail: str) -> None:
    count, function = arithmetic("f16")[name]
    inputs = [halves(k) for k in range(1, count + 1)]
    tail = (
        tail
        if count == 3
        else tail.replace(",0]", "]").replace(",1]", "]", 1)
        if tail.startswith("neg")
        else tail
    )
    if count == 2:
        tail = {"": "", "o": "op_sel:[1,0] op_sel_hi:[0,1]", "n": "neg_lo:[0,1] neg_hi:[1,0]"}[tail[:1]]
    text = f"v_pk_{name}_f16 v0, " + ", ".join(f"v{k + 1}" for k in range(count)) + f" {tail}"
    got = execute(text.rstrip(), dict(enumerate(inputs, 1))).vector(0)
    for lane, given in enumerate(zip(*inputs, strict=True)):
        low, high = [f16(word) for word in given], [f16(word >> 16) for word in given]
        if tail.startswith("op"):
            low[0], high[0] = high[0], low[0]
        if tail.startswith("neg"):
            low[1], high[0] = -low[1], -high[0]
        assert same(function(*low), f16(got[lane])) and same(function(*high), f16(got[lane] >> 16))


def test_dot2_adds_two_exact_products_one_after_the_other(execute: Any) -> None:
    """D = (S2 + lo * lo) + hi * hi, each addition rounded to fp32: the ISA's pseudo code."""
    a, b, c = halves(1), halves(2), floats(3)
    got = execute("v_dot2_f32_f16 v0, v1, v2, v3", {1: a, 2: b, 3: c}).vector(0)
    other_order = 0
    for lane in range(64):
        low = product(f16(a[lane]), f16(b[lane]), "f32")
        high = product(f16(a[lane] >> 16), f16(b[lane] >> 16), "f32")
        total = fma(fma(low, 1.0, f32(c[lane]), "f32"), 1.0, high, "f32")
        assert same(total, f32(got[lane]))
        other_order += not same(total, fma(fma(high, 1.0, f32(c[lane]), "f32"), 1.0, low, "f32"))
    assert other_order > 0


def test_dot2_takes_constants_and_negation(execute: Any) -> None:
    a = halves(1)
    got = execute("v_dot2_f32_f16 v0, v1, 1.0, 0 neg_lo:[1,0,0] neg_hi:[0,0,0]", {1: a}).vector(0)
    for lane in range(64):
        low, high = product(-f16(a[lane]), 1.0, "f32"), product(f16(a[lane] >> 16), 0.0, "f32")
        assert same(fma(fma(low, 1.0, 0.0, "f32"), 1.0, high, "f32"), f32(got[lane]))


@pytest.mark.parametrize("name", ["v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16"])
def test_fma_mix_reads_either_type_and_rounds_like_fp32(execute: Any, name: str) -> None:
    """Source 0 is the upper fp16 half, source 1 a lower half with a sign, source 2 fp32."""
    a, b, c = halves(1), halves(2), floats(3)
    text = f"{name} v0, v1, -v2, |v3| op_sel:[1,0,0] op_sel_hi:[1,1,0]"
    got = execute(text, {0: 0x12345678, 1: a, 2: b, 3: c}).vector(0)
    for lane in range(64):
        total = fma(f16(a[lane] >> 16), -f16(b[lane]), abs(f32(c[lane])), "f32")
        if name == "v_fma_mix_f32":
            assert same(total, f32(got[lane]))
            continue
        half = rounded(Fraction(total), "f16", math.copysign(1, total) < 0) if math.isfinite(total) else total
        low = name == "v_fma_mixlo_f16"
        assert same(half, f16(got[lane] if low else got[lane] >> 16))
        assert (0x1234 if low else 0x5678) == (got[lane] >> 16 if low else got[lane] & 0xFFFF)


def test_modifiers_negate_take_the_size_scale_and_clamp(execute: Any) -> None:
    a, b = floats(1), floats(2)
    got = execute("v_add_f32_e64 v0, -|v1|, v2 clamp mul:2", {1: a, 2: b}).vector(0)
    for lane in range(64):
        total = fma(-abs(f32(a[lane])), 1.0, f32(b[lane]), "f32")
        scaled = product(total, 2.0, "f32")
        wanted = 0.0 if math.isnan(scaled) else min(max(scaled, 0.0), 1.0)
        assert wanted == f32(got[lane])


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


@pytest.mark.parametrize("name", ["add", "mul", "fma", "max", "min"])
def test_an_fp64_instruction_is_its_definition(execute: Any, name: str) -> None:
    rng = random.Random(4)
    rows = [[rng.gauss(0, 1) * 2.0 ** rng.randint(-40, 40) for _ in range(64)] for _ in range(3)]
    count, function = arithmetic("f64")[name]
    registers: dict[int, list[int]] = {}
    for k, row in enumerate(rows):
        patterns = [struct.unpack("<Q", struct.pack("<d", x))[0] for x in row]
        registers[2 + 2 * k], registers[3 + 2 * k] = [p & M32 for p in patterns], [p >> 32 for p in patterns]
    text = f"v_{name}_f64 v[0:1], " + ", ".join(f"v[{2 + 2 * k}:{3 + 2 * k}]" for k in range(count))
    got = [struct.unpack("<d", struct.pack("<Q", p))[0] for p in execute(text, registers).vector64(0)]
    assert [function(*values) for values in zip(*rows[:count], strict=True)] == got


def test_fp64_conversions_are_exact_or_rounded_once(execute: Any) -> None:
    given = floats(1, wild=False)
    state = execute("v_cvt_f64_f32_e32 v[2:3], v1\nv_cvt_f32_f64_e32 v0, v[2:3]", {1: given})
    assert given == state.vector(0)
    assert [struct.unpack("<Q", struct.pack("<d", f32(word)))[0] for word in given] == state.vector64(2)
