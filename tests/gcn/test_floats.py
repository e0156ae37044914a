"""Floating-point arithmetic, each instruction against the ISA's definition in exact rational numbers, rounded once there."""

from __future__ import annotations

import math
import random
import struct
from fractions import Fraction
from typing import Any

import pytest
from tests.gcn.exact import (
    M32,
    arithmetic,
    b32,
    f16,
    f32,
    floats,
    flushed,
    fma,
    halves,
    median,
    product,
    rounded,
    same,
)


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
