"""IEEE arithmetic in rational numbers, rounded once: what the interpreter's floating-point results are compared with."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from fractions import Fraction

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


def flushed(number: float) -> float:
    return math.copysign(0.0, number) if abs(number) < 2.0**-126 else number
