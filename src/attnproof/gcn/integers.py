"""Vector integer instructions ("Vega" 7nm ISA, chapter "Vector Instructions": VOP1, VOP2, VOP3).

`TABLE`: name -> (types of the sources, type of the result, function on arrays). Arrays wrap modulo 2**32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnproof.gcn.wave import LANES

Row = tuple[str, str, Any]
_LANE = np.arange(LANES, dtype=np.uint32)[None, :]
_24 = np.uint32(0xFFFFFF)


def _u(value: int) -> np.uint32:
    return np.uint32(value)


def _shift(amount: Any) -> Any:
    return amount & _u(31)


def _signed24(words: Any) -> Any:
    return (words << _u(8)).view(np.int32) >> np.int32(8)


def _high(product: Any) -> Any:
    return (product >> product.dtype.type(32)).astype(np.uint32)


def _mul_hi_u32(a: Any, b: Any) -> Any:
    return _high(a.astype(np.uint64) * b)


def _mul_hi_i32(a: Any, b: Any) -> Any:
    return ((a.astype(np.int64) * b) >> np.int64(32)).astype(np.int32)


def popcount(words: Any) -> Any:
    """Set bits of 32-bit words."""
    words = words - (words >> _u(1) & _u(0x55555555))
    words = (words & _u(0x33333333)) + (words >> _u(2) & _u(0x33333333))
    return ((words + (words >> _u(4)) & _u(0x0F0F0F0F)) * _u(0x01010101)) >> _u(24)


def _reverse(words: Any) -> Any:
    for step, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        words = (words >> _u(step) & _u(mask)) | (words & _u(mask)) << _u(step)
    return words


def _first_high(words: Any) -> Any:
    """Leading zeros, -1 for zero."""
    spread = words
    for step in (1, 2, 4, 8, 16):
        spread = spread | spread >> _u(step)
    return np.where(words == 0, _u(0xFFFFFFFF), _u(32) - popcount(spread))


def _first_low(words: Any) -> Any:
    """Trailing zeros, -1 for zero."""
    return np.where(words == 0, _u(0xFFFFFFFF), popcount((words & (~words + _u(1))) - _u(1)))


def _first_sign(words: Any) -> Any:
    """Leading bits equal to the sign bit, -1 when all are (V_FFBH_I32)."""
    signed = words.view(np.int32)
    return _first_high(np.where(signed < 0, ~words, words))


def _mbcnt_lo(mask: Any, base: Any) -> Any:
    below = np.where(_LANE >= 32, _u(0xFFFFFFFF), (_u(1) << (_LANE & _u(31))) - _u(1))
    return popcount(mask & below) + base


def _mbcnt_hi(mask: Any, base: Any) -> Any:
    below = np.where(_LANE < 32, _u(0), (_u(1) << (_LANE & _u(31))) - _u(1))
    return popcount(mask & below) + base


def _field(words: Any, offset: Any, width: Any) -> Any:
    return words >> _shift(offset) & ((_u(1) << _shift(width)) - _u(1))


def _field_signed(words: Any, offset: Any, width: Any) -> Any:
    """V_BFE_I32: zero width gives 0, a field that ends above bit 31 is the arithmetic shift."""
    offset, width = _shift(offset), _shift(width)
    sign = np.where(width == 0, _u(0), _u(1) << (width - _u(1) & _u(31)))
    inside = (_field(words, offset, width) ^ sign) - sign
    shifted = (words.view(np.int32) >> offset.view(np.int32)).view(np.uint32)
    return np.where(width == 0, _u(0), np.where(offset + width > _u(32), shifted, inside))


def permute_bytes(high: Any, low: Any, select: Any) -> Any:
    """V_PERM_B32: bytes of {S0, S1} (S1 is bytes 0 to 3); 8 to 11 sign of bytes 1, 3, 5, 7; 12 zero; above 0xff."""
    both = high.astype(np.uint64) << np.uint64(32) | low
    result: Any = np.zeros(np.broadcast_shapes(both.shape, select.shape), np.uint32)
    for place in (0, 8, 16, 24):
        chosen = select >> _u(place) & _u(0xFF)
        byte = (both >> (chosen & _u(7)).astype(np.uint64) * np.uint64(8) & np.uint64(0xFF)).astype(np.uint32)
        if (chosen > 7).any():
            source = (chosen - _u(8) & _u(3)) * _u(2) + _u(1)
            sign = (both >> (source.astype(np.uint64) * np.uint64(8) + np.uint64(7)) & np.uint64(1)).astype(
                np.uint32
            )
            byte = np.where(
                chosen < 8,
                byte,
                np.where(chosen < 12, sign * _u(0xFF), np.where(chosen == 12, _u(0), _u(0xFF))),
            )
        result = result | byte << _u(place)
    return result


def _align(high: Any, low: Any, bits: Any) -> Any:
    both = high.astype(np.uint64) << np.uint64(32) | low
    return (both >> bits.astype(np.uint64)).astype(np.uint32)


def _median(a: Any, b: Any, c: Any) -> Any:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _dot(count: int, bits: int, signed: bool) -> Any:
    """V_DOT{2,4,8}_{I32_I,U32_U}{16,8,4}: exact integer products added to S2 modulo 2**32."""

    def dot(a: Any, b: Any, c: Any) -> Any:
        total = c
        for k in range(count):
            left, right = (word << _u(32 - bits * (k + 1)) for word in (a, b))
            if signed:
                left, right = (
                    (part.view(np.int32) >> np.int32(32 - bits)).view(np.uint32) for part in (left, right)
                )
            else:
                left, right = left >> _u(32 - bits), right >> _u(32 - bits)
            total = total + left * right
        return total

    return dot


def _sad_bytes(a: Any, b: Any, c: Any) -> Any:
    """V_SAD_U8: the sum of four byte distances."""
    total = c
    for place in (0, 8, 16, 24):
        left, right = a >> _u(place) & _u(0xFF), b >> _u(place) & _u(0xFF)
        total = total + np.maximum(left, right) - np.minimum(left, right)
    return total


def _sad(a: Any, b: Any, c: Any) -> Any:
    return np.maximum(a, b) - np.minimum(a, b) + c


_ONE: dict[str, Row] = {
    "v_mov_b32": ("u", "u", lambda a: a),
    "v_not_b32": ("u", "u", lambda a: ~a),
    "v_bfrev_b32": ("u", "u", _reverse),
    "v_ffbh_u32": ("u", "u", _first_high),
    "v_ffbl_b32": ("u", "u", _first_low),
    "v_ffbh_i32": ("u", "u", _first_sign),
}
_TWO: dict[str, Row] = {
    "v_add_u32": ("uu", "u", lambda a, b: a + b),
    "v_sub_u32": ("uu", "u", lambda a, b: a - b),
    "v_subrev_u32": ("uu", "u", lambda a, b: b - a),
    "v_add_i32": ("uu", "u", lambda a, b: a + b),
    "v_sub_i32": ("uu", "u", lambda a, b: a - b),
    "v_and_b32": ("uu", "u", lambda a, b: a & b),
    "v_or_b32": ("uu", "u", lambda a, b: a | b),
    "v_xor_b32": ("uu", "u", lambda a, b: a ^ b),
    "v_xnor_b32": ("uu", "u", lambda a, b: ~(a ^ b)),
    "v_lshlrev_b32": ("uu", "u", lambda a, b: b << _shift(a)),
    "v_lshrrev_b32": ("uu", "u", lambda a, b: b >> _shift(a)),
    "v_ashrrev_i32": ("ui", "i", lambda a, b: b >> _shift(a).view(np.int32)),
    "v_lshlrev_b64": ("uq", "q", lambda a, b: b << (a & _u(63)).astype(np.uint64)),
    "v_lshrrev_b64": ("uq", "q", lambda a, b: b >> (a & _u(63)).astype(np.uint64)),
    "v_ashrrev_i64": ("ul", "l", lambda a, b: b >> (a & _u(63)).astype(np.int64)),
    "v_min_u32": ("uu", "u", np.minimum),
    "v_max_u32": ("uu", "u", np.maximum),
    "v_min_i32": ("ii", "i", np.minimum),
    "v_max_i32": ("ii", "i", np.maximum),
    "v_mul_lo_u32": ("uu", "u", lambda a, b: a * b),
    "v_mul_hi_u32": ("uu", "u", _mul_hi_u32),
    "v_mul_hi_i32": ("ii", "i", _mul_hi_i32),
    "v_mul_u32_u24": ("uu", "u", lambda a, b: (a & _24) * (b & _24)),
    "v_mul_hi_u32_u24": ("uu", "u", lambda a, b: _mul_hi_u32(a & _24, b & _24)),
    "v_mul_i32_i24": ("uu", "i", lambda a, b: _signed24(a) * _signed24(b)),
    "v_mul_hi_i32_i24": ("uu", "i", lambda a, b: _mul_hi_i32(_signed24(a), _signed24(b))),
    "v_bcnt_u32_b32": ("uu", "u", lambda a, b: popcount(a) + b),
    "v_bfm_b32": ("uu", "u", lambda a, b: ((_u(1) << _shift(a)) - _u(1)) << _shift(b)),
    "v_mbcnt_lo_u32_b32": ("uu", "u", _mbcnt_lo),
    "v_mbcnt_hi_u32_b32": ("uu", "u", _mbcnt_hi),
    "v_pack_b32_f16": ("ww", "u", lambda a, b: a | b << _u(16)),
    "v_add_u16": ("ww", "w", lambda a, b: a + b),
    "v_sub_u16": ("ww", "w", lambda a, b: a - b),
    "v_subrev_u16": ("ww", "w", lambda a, b: b - a),
    "v_mul_lo_u16": ("ww", "w", lambda a, b: a * b),
    "v_lshlrev_b16": ("ww", "w", lambda a, b: b << (a & _u(15))),
    "v_lshrrev_b16": ("ww", "w", lambda a, b: b >> (a & _u(15))),
    "v_ashrrev_i16": ("wx", "x", lambda a, b: b >> (a & _u(15)).view(np.int32)),
    "v_min_u16": ("ww", "w", np.minimum),
    "v_max_u16": ("ww", "w", np.maximum),
    "v_min_i16": ("xx", "x", np.minimum),
    "v_max_i16": ("xx", "x", np.maximum),
}
_THREE: dict[str, Row] = {
    "v_add3_u32": ("uuu", "u", lambda a, b, c: a + b + c),
    "v_lshl_add_u32": ("uuu", "u", lambda a, b, c: (a << _shift(b)) + c),
    "v_add_lshl_u32": ("uuu", "u", lambda a, b, c: (a + b) << _shift(c)),
    "v_lshl_or_b32": ("uuu", "u", lambda a, b, c: (a << _shift(b)) | c),
    "v_and_or_b32": ("uuu", "u", lambda a, b, c: (a & b) | c),
    "v_or3_b32": ("uuu", "u", lambda a, b, c: a | b | c),
    "v_xad_u32": ("uuu", "u", lambda a, b, c: (a ^ b) + c),
    "v_bfe_u32": ("uuu", "u", _field),
    "v_bfe_i32": ("uuu", "u", _field_signed),
    "v_bfi_b32": ("uuu", "u", lambda a, b, c: (a & b) | (~a & c)),
    "v_perm_b32": ("uuu", "u", permute_bytes),
    "v_alignbit_b32": ("uuu", "u", lambda a, b, c: _align(a, b, _shift(c))),
    "v_alignbyte_b32": ("uuu", "u", lambda a, b, c: _align(a, b, (c & _u(3)) * _u(8))),
    "v_mad_u32_u24": ("uuu", "u", lambda a, b, c: (a & _24) * (b & _24) + c),
    "v_mad_i32_i24": ("uuu", "u", lambda a, b, c: (_signed24(a) * _signed24(b)).view(np.uint32) + c),
    "v_mad_u32_u16": ("wwu", "u", lambda a, b, c: a * b + c),
    "v_mad_i32_i16": ("xxi", "i", lambda a, b, c: a * b + c),
    "v_min3_u32": ("uuu", "u", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_u32": ("uuu", "u", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_u32": ("uuu", "u", _median),
    "v_min3_i32": ("iii", "i", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_i32": ("iii", "i", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_i32": ("iii", "i", _median),
    "v_sad_u8": ("uuu", "u", _sad_bytes),
    "v_sad_u32": ("uuu", "u", _sad),
    "v_dot2_i32_i16": ("uuu", "u", _dot(2, 16, True)),
    "v_dot2_u32_u16": ("uuu", "u", _dot(2, 16, False)),
    "v_dot4_i32_i8": ("uuu", "u", _dot(4, 8, True)),
    "v_dot4_u32_u8": ("uuu", "u", _dot(4, 8, False)),
    "v_dot8_i32_i4": ("uuu", "u", _dot(8, 4, True)),
    "v_dot8_u32_u4": ("uuu", "u", _dot(8, 4, False)),
}
TABLE: dict[str, Row] = {**_ONE, **_TWO, **_THREE}
# gfx9: these keep the upper half of the destination, other 16-bit instructions clear it
KEEPS_HIGH: dict[str, Row] = {
    "v_mad_u16": ("www", "w", lambda a, b, c: a * b + c),
    "v_mad_i16": ("xxx", "x", lambda a, b, c: a * b + c),
}
