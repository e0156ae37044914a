"""Vector floating-point instructions ("Vega" 7nm ISA, VOP1, VOP2, VOP3), round to nearest even.

fp16 sources arrive as fp32 (exact); add, multiply, divide and square root of fp16 in fp32 and then rounded once more
give the correctly rounded fp16 result (24 >= 2 * 11 + 2). A fused multiply-add of fp32 is formed in fp64 and
repaired where the second rounding could differ. NaN payloads and signs are not modelled.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from attnproof.gcn.integers import Row

_TINY = np.float32(2.0**-126)
# of an fp64 pattern: the bits that fp32 drops, their midpoint, and 2**-125 without its sign
_TAIL, _HALFWAY, _ONE64 = np.uint64(0x1FFFFFFF), np.uint64(0x10000000), np.uint64(1)
_NORMAL = np.uint64((np.array(2.0**-125).view(np.uint64) << _ONE64) - _ONE64)


def fma32(a: Any, b: Any, c: Any, power: Any = None) -> Any:
    """fp32 (a * b + c) * 2**power with one rounding.

    The product is exact in fp64; the sum is rounded to 53 bits and then to 24. Both roundings agree unless the
    53-bit value lies on a midpoint of fp32 (or the result is denormal), and there it is made odd first.
    """
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    bits = total.view(np.uint64)
    if power is None:
        midpoint = ((bits & _TAIL) == _HALFWAY).any()
        # shifted and less one, a zero is the largest number: only denormal results are below
        if not midpoint and ((bits << _ONE64) - _ONE64).min() >= _NORMAL:
            return total.astype(np.float32)
    odd = _to_odd(product, c.astype(np.float64), total)
    return (odd if power is None else np.ldexp(odd, power)).astype(np.float32)


def _to_odd(product: Any, addend: Any, total: Any) -> Any:
    """Round-to-odd sum: where the fp64 sum is inexact, its last bit is set toward the exact value."""
    shadow = total - product
    error = (product - (total - shadow)) + (addend - shadow)
    inexact = np.isfinite(total) & (error != 0) & ((total.view(np.uint64) & _ONE64) == 0)
    away = (error > 0) == (total > 0)
    bits = total.view(np.uint64)
    return np.where(inexact, np.where(away, bits + np.uint64(1), bits - np.uint64(1)), bits).view(np.float64)


def fma64(a: Any, b: Any, c: Any) -> Any:
    """fp64 a * b + c with one rounding: exact fractions, lane by lane (rare, so plain)."""
    a, b, c = np.broadcast_arrays(a, b, c)
    result: Any = a * b + c
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    for at in zip(*np.nonzero(finite & (result != 0)), strict=True):
        exact = Fraction(float(a[at])) * Fraction(float(b[at])) + Fraction(float(c[at]))
        try:
            result[at] = float(exact)
        except OverflowError:
            result[at] = np.inf if exact > 0 else -np.inf
    return result


def fma16(a: Any, b: Any, c: Any) -> Any:
    """fp16 a * b + c: in fp64 (what fp64 cannot hold lies too low to reach an fp16 midpoint), rounded by the caller."""
    return a.astype(np.float64) * b + c


def maximum(a: Any, b: Any) -> Any:
    """V_MAX: a NaN gives the other operand, and +0 is above -0."""
    result = np.fmax(a, b)
    zero = result == 0
    if zero.any():
        # of two zeros the sum is +0 unless both are -0
        return np.where(zero & (a == b), a + b, result)
    return result


def minimum(a: Any, b: Any) -> Any:
    """V_MIN: a NaN gives the other operand, and -0 is below +0."""
    return -maximum(-a, -b)


def _median(a: Any, b: Any, c: Any) -> Any:
    """V_MED3: the middle one; the least when one of them is a NaN."""
    middle = maximum(minimum(a, b), minimum(maximum(a, b), c))
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), minimum(minimum(a, b), c), middle)


def _flushed(function: Any) -> Any:
    """fp32 transcendental units take and give zero for denormals."""

    def run(a: Any) -> Any:
        return _without_denormals(function(_without_denormals(a)))

    return run


def _via64(function: Any) -> Any:
    """Evaluate in fp64 and round once: the hardware is within 1 ulp of this."""
    return lambda a: function(a.astype(np.float64)).astype(np.float32)


def _without_denormals(a: Any) -> Any:
    return np.where(np.abs(a) < _TINY, np.copysign(np.float32(0), a), a)


def _mad32(a: Any, b: Any, c: Any) -> Any:
    """V_MAD_F32, V_MAC_F32: two roundings, and denormals are flushed whatever the mode says."""
    a, b, c = (_without_denormals(part) for part in (a, b, c))
    return _without_denormals(_without_denormals(a * b) + c)


def _to_integer(low: int, high: int, dtype: Any, rounding: Any = np.trunc) -> Any:
    """Convert with saturation; a NaN gives 0."""

    def convert(a: Any) -> Any:
        wide = rounding(a.astype(np.float64))
        return np.clip(np.where(np.isnan(wide), 0, wide), low, high).astype(np.int64).astype(dtype)

    return convert


def _fract(a: Any) -> Any:
    """S0 - floor(S0), below 1."""
    return np.minimum(a - np.floor(a), np.float32(1 - 2.0**-24))


def _frexp_mant(a: Any) -> Any:
    return np.where(np.isfinite(a), np.frexp(a)[0], a)


def _frexp_exp(a: Any) -> Any:
    return np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(np.int32)


def _ldexp(a: Any, exponent: Any) -> Any:
    # 2**n in two exact fp64 factors; one rounding at the end
    return np.ldexp(a.astype(np.float64), np.clip(exponent, -500, 500)).astype(np.float32)


def _round_to_zero16(values: Any) -> Any:
    """fp32 -> fp16 bits, toward zero."""
    nearest = values.astype(np.float16)
    back = nearest.astype(np.float32)
    bits = nearest.view(np.uint16).astype(np.uint32)
    return np.where(np.abs(back) > np.abs(values), bits - np.uint32(1), bits)


def _pack_to_zero(a: Any, b: Any) -> Any:
    return _round_to_zero16(a) | _round_to_zero16(b) << np.uint32(16)


def _byte(place: int) -> Any:
    return lambda a: (a >> np.uint32(8 * place) & np.uint32(0xFF)).astype(np.float32)


def _cosine(a: Any) -> Any:
    return np.cos(2 * np.pi * a)


def _sine(a: Any) -> Any:
    return np.sin(2 * np.pi * a)


def _encoded_exponent(a: Any) -> Any:
    return (a.view(np.uint32) >> np.uint32(23) & np.uint32(255)).astype(np.int32)


def _divide_fixup(a: Any, b: Any, c: Any) -> Any:
    """V_DIV_FIXUP: special cases of a quotient, S0 quotient, S1 denominator, S2 numerator."""
    sign = np.where(np.signbit(b) != np.signbit(c), np.float32(-1), np.float32(1))
    # a quotient that left the range on the way has become a NaN: it overflows
    result = np.where(np.isnan(a), np.float32(np.inf), np.abs(a)) * sign
    # exponents as fp32 encodes them, 0 for denormals; fp16 has no such gap
    gap = _encoded_exponent(c) - _encoded_exponent(b)
    result = np.where(gap < -150, np.float32(0) * sign, result)
    infinite = np.isinf(c) | (b == 0)
    result = np.where(infinite, np.float32(np.inf) * sign, result)
    result = np.where(np.isinf(b) | ((c == 0) & (b != 0)), np.float32(0) * sign, result)
    invalid = ((b == 0) & (c == 0)) | (np.isinf(b) & np.isinf(c)) | np.isnan(b) | np.isnan(c)
    return np.where(invalid, np.float32(np.nan), result)


_EXP, _LOG, _SQRT, _RCP, _RSQ = np.exp2, np.log2, np.sqrt, np.reciprocal, lambda a: 1 / np.sqrt(a)  # type: ignore[no-any-return]
_ONE: dict[str, Row] = {
    "v_exp_f32": ("f", "f", _flushed(_via64(_EXP))),
    "v_log_f32": ("f", "f", _flushed(_via64(_LOG))),
    "v_rcp_f32": ("f", "f", _flushed(_via64(_RCP))),
    "v_rcp_iflag_f32": ("f", "f", _flushed(_via64(_RCP))),
    "v_rsq_f32": ("f", "f", _flushed(_via64(_RSQ))),
    "v_sqrt_f32": ("f", "f", _flushed(_via64(_SQRT))),
    "v_sin_f32": ("f", "f", _via64(_sine)),
    "v_cos_f32": ("f", "f", _via64(_cosine)),
    "v_exp_f16": ("h", "h", _via64(_EXP)),
    "v_log_f16": ("h", "h", _via64(_LOG)),
    "v_rcp_f16": ("h", "h", _via64(_RCP)),
    "v_rsq_f16": ("h", "h", _via64(_RSQ)),
    "v_sqrt_f16": ("h", "h", _via64(_SQRT)),
    "v_floor_f32": ("f", "f", np.floor),
    "v_ceil_f32": ("f", "f", np.ceil),
    "v_trunc_f32": ("f", "f", np.trunc),
    "v_rndne_f32": ("f", "f", np.rint),
    "v_fract_f32": ("f", "f", _fract),
    "v_floor_f16": ("h", "h", np.floor),
    "v_ceil_f16": ("h", "h", np.ceil),
    "v_trunc_f16": ("h", "h", np.trunc),
    "v_rndne_f16": ("h", "h", np.rint),
    "v_frexp_mant_f32": ("f", "f", _frexp_mant),
    "v_frexp_exp_i32_f32": ("f", "i", _frexp_exp),
    "v_cvt_f32_u32": ("u", "f", lambda a: a.astype(np.float32)),
    "v_cvt_f32_i32": ("i", "f", lambda a: a.astype(np.float32)),
    "v_cvt_u32_f32": ("f", "u", _to_integer(0, 2**32 - 1, np.uint32)),
    "v_cvt_i32_f32": ("f", "i", _to_integer(-(2**31), 2**31 - 1, np.int32)),
    "v_cvt_rpi_i32_f32": ("f", "i", _to_integer(-(2**31), 2**31 - 1, np.int32, lambda a: np.floor(a + 0.5))),
    "v_cvt_flr_i32_f32": ("f", "i", _to_integer(-(2**31), 2**31 - 1, np.int32, np.floor)),
    "v_cvt_f16_f32": ("f", "h", lambda a: a),
    "v_cvt_f32_f16": ("h", "f", lambda a: a),
    "v_cvt_f16_u16": ("w", "h", lambda a: a.astype(np.float32)),
    "v_cvt_f16_i16": ("x", "h", lambda a: a.astype(np.float32)),
    "v_cvt_u16_f16": ("h", "w", _to_integer(0, 65535, np.uint32)),
    "v_cvt_i16_f16": ("h", "x", _to_integer(-32768, 32767, np.int32)),
    "v_cvt_f64_f32": ("f", "d", lambda a: a.astype(np.float64)),
    "v_cvt_f32_f64": ("d", "f", lambda a: a.astype(np.float32)),
    "v_cvt_f64_i32": ("i", "d", lambda a: a.astype(np.float64)),
    "v_cvt_f64_u32": ("u", "d", lambda a: a.astype(np.float64)),
    "v_cvt_i32_f64": ("d", "i", _to_integer(-(2**31), 2**31 - 1, np.int32)),
    "v_cvt_u32_f64": ("d", "u", _to_integer(0, 2**32 - 1, np.uint32)),
    **{f"v_cvt_f32_ubyte{place}": ("u", "f", _byte(place)) for place in range(4)},
}
_TWO: dict[str, Row] = {
    "v_add_f32": ("ff", "f", lambda a, b: a + b),
    "v_sub_f32": ("ff", "f", lambda a, b: a - b),
    "v_subrev_f32": ("ff", "f", lambda a, b: b - a),
    "v_mul_f32": ("ff", "f", lambda a, b: a * b),
    "v_mul_legacy_f32": ("ff", "f", lambda a, b: np.where((a == 0) | (b == 0), np.float32(0), a * b)),
    "v_max_f32": ("ff", "f", maximum),
    "v_min_f32": ("ff", "f", minimum),
    "v_add_f16": ("hh", "h", lambda a, b: a + b),
    "v_sub_f16": ("hh", "h", lambda a, b: a - b),
    "v_subrev_f16": ("hh", "h", lambda a, b: b - a),
    "v_mul_f16": ("hh", "h", lambda a, b: a * b),
    "v_max_f16": ("hh", "h", maximum),
    "v_min_f16": ("hh", "h", minimum),
    "v_ldexp_f32": ("fi", "f", _ldexp),
    "v_ldexp_f16": ("hx", "h", _ldexp),
    "v_cvt_pkrtz_f16_f32": ("ff", "u", _pack_to_zero),
    "v_add_f64": ("dd", "d", lambda a, b: a + b),
    "v_mul_f64": ("dd", "d", lambda a, b: a * b),
    "v_max_f64": ("dd", "d", maximum),
    "v_min_f64": ("dd", "d", minimum),
}
_THREE: dict[str, Row] = {
    "v_fma_f32": ("fff", "f", fma32),
    "v_mad_f32": ("fff", "f", _mad32),
    "v_fma_f64": ("ddd", "d", fma64),
    "v_max3_f32": ("fff", "f", lambda a, b, c: maximum(maximum(a, b), c)),
    "v_min3_f32": ("fff", "f", lambda a, b, c: minimum(minimum(a, b), c)),
    "v_med3_f32": ("fff", "f", _median),
    "v_max3_f16": ("hhh", "h", lambda a, b, c: maximum(maximum(a, b), c)),
    "v_min3_f16": ("hhh", "h", lambda a, b, c: minimum(minimum(a, b), c)),
    "v_div_fixup_f32": ("fff", "f", _divide_fixup),
}
TABLE: dict[str, Row] = {**_ONE, **_TWO, **_THREE}
# dst is also the addend
ACCUMULATE: dict[str, Row] = {
    "v_fmac_f32": ("ff", "f", fma32),
    "v_mac_f32": ("ff", "f", _mad32),
    "v_mac_f16": ("hh", "h", lambda a, b, c: (a * b).astype(np.float16).astype(np.float32) + c),
}
# gfx9 VOP3 form: the upper half of the destination stays
KEEPS_HIGH: dict[str, Row] = {
    "v_fma_f16": ("hhh", "h", fma16),
    "v_div_fixup_f16": ("hhh", "h", _divide_fixup),
    "v_mad_f16": ("hhh", "h", lambda a, b, c: (a * b).astype(np.float16).astype(np.float32) + c),
}
