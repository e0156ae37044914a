// Rows of a tensor into the layouts of the micro-kernel, and back.
//
// Computes: conversion of storage types (bf16, fp16) to the accumulator type, 4 x 4 transposes.
// Shapes: `interleave` turns rows [r][x] into [x][r]; a key panel is [x][kPanel], a value panel [key][kPanel].
// Invariants: a null row is a row of zeros (padding lanes, keys past the end): memory outside the valid range is never read.
#pragma once

#include "simd.h"

namespace attn::ATTN_TARGET {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

template <class In>
inline constexpr bool kIsHalf = sizeof(In) == 2;

// storage type -> type of scores and accumulators
template <class In>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};
template <class In>
using Acc = typename AccOf<In>::type;

typedef uint16_t HalfVec __attribute__((vector_size(kBytes / 2), aligned(1), may_alias));
typedef uint32_t UVec __attribute__((vector_size(kBytes), may_alias));

ATTN_INLINE Vec<float> widen_f16(HalfVec h) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_cvtph_ps((__m256i)h);
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_cvtph_ps((__m128i)h);
#elif defined(__aarch64__)
  return (Vec<float>)vcvt_f32_f16((float16x4_t)h);
#else
  // exponent moved by a multiply, which also makes denormals right; inf and NaN get their exponent back
  const UVec w = __builtin_convertvector(h, UVec);
  const UVec magnitude = w & 0x7fffu;
  UVec bits = (UVec)((Vec<float>)(magnitude << 13) * 0x1p112f);
  bits |= (UVec)(magnitude >= 0x7c00u) & 0x7f800000u;
  return (Vec<float>)(bits | (w & 0x8000u) << 16);
#endif
}

ATTN_INLINE HalfVec narrow_f16(Vec<float> x) {
#if defined(__AVX512F__)
  return (HalfVec)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
  return (HalfVec)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
  return (HalfVec)vcvt_f16_f32((float32x4_t)x);
#else
  // normal results: round to nearest even on the bits; small ones: let an addition align and round the mantissa
  const UVec w = (UVec)x, magnitude = w & 0x7fffffffu;
  const UVec odd = (magnitude >> 13) & 1u;
  const UVec normal = (magnitude + 0xfffu + odd - (112u << 23)) >> 13;
  const UVec small = (UVec)((Vec<float>)magnitude + 0.5f) - 0x3f000000u;
  UVec h = magnitude < (113u << 23) ? small : normal;
  h = magnitude >= 0x477ff000u ? (UVec{} + 0x7c00u) : h;      // at least 65520 rounds to inf
  h = magnitude > 0x7f800000u ? (UVec{} + 0x7e00u) : h;
  return __builtin_convertvector(h | (w & 0x80000000u) >> 16, HalfVec);
#endif
}

ATTN_INLINE Vec<float> widen_bf16(HalfVec h) {
  // one instruction where there is one: GCC 12 takes five for the conversion of vectors
#if defined(__AVX512F__)
  return (Vec<float>)((UVec)_mm512_cvtepu16_epi32((__m256i)h) << 16);
#elif defined(__AVX2__)
  return (Vec<float>)((UVec)_mm256_cvtepu16_epi32((__m128i)h) << 16);
#else
  return (Vec<float>)(__builtin_convertvector(h, UVec) << 16);
#endif
}

ATTN_INLINE HalfVec narrow_bf16(Vec<float> x) {
  const UVec w = (UVec)x;
  UVec h = (w + 0x7fffu + ((w >> 16) & 1u)) >> 16;
  h = (w & 0x7fffffffu) > 0x7f800000u ? ((w >> 16) | 0x40u) : h;
  return __builtin_convertvector(h, HalfVec);
}

ATTN_INLINE Vec<float> load_as(const float* p) { return load(p); }
ATTN_INLINE Vec<double> load_as(const double* p) { return load(p); }
ATTN_INLINE Vec<float> load_as(const bf16* p) { return widen_bf16(*(const HalfVec*)p); }
ATTN_INLINE Vec<float> load_as(const f16* p) { return widen_f16(*(const HalfVec*)p); }
ATTN_INLINE void store_as(float* p, Vec<float> x) { store(p, x); }
ATTN_INLINE void store_as(double* p, Vec<double> x) { store(p, x); }
ATTN_INLINE void store_as(bf16* p, Vec<float> x) { *(HalfVec*)p = narrow_bf16(x); }
ATTN_INLINE void store_as(f16* p, Vec<float> x) { *(HalfVec*)p = narrow_f16(x); }

template <class In>
ATTN_INLINE Acc<In> load_one(const In* p) {
  In one[kLanes<float>] = {};
  std::memcpy(one, p, sizeof(In));
  if constexpr (kIsHalf<In>)
    return load_as(one)[0];
  else
    return one[0];
}
template <class In>
ATTN_INLINE void store_one(In* p, Acc<In> x) {
  if constexpr (kIsHalf<In>) {
    In buffer[kLanes<float>];
    store_as(buffer, splat<float>(x));
    *p = buffer[0];
  } else {
    *p = x;
  }
}

// n elements, any stride in bytes, into a contiguous accumulator row
template <class In>
inline void widen_row(const In* src, long stride, long n, Acc<In>* dst) {
  constexpr int L = kLanes<Acc<In>>;
  long x = 0;
  if (stride == sizeof(In))
    for (; x + L <= n; x += L) store(dst + x, load_as(src + x));
  for (; x < n; ++x) dst[x] = load_one(reinterpret_cast<const In*>(reinterpret_cast<const char*>(src) + x * stride));
}
template <class In>
inline void narrow_row(const Acc<In>* src, long n, In* dst, long stride) {
  constexpr int L = kLanes<Acc<In>>;
  long x = 0;
  if (stride == sizeof(In))
    for (; x + L <= n; x += L) store_as(dst + x, load(src + x));
  for (; x < n; ++x) store_one(reinterpret_cast<In*>(reinterpret_cast<char*>(dst) + x * stride), src[x]);
}

// an accumulator row for `src`: itself where nothing has to be converted, else a copy in `scratch`; null gives zeros
template <class In>
ATTN_INLINE const Acc<In>* as_acc(const In* src, long stride, long n, Acc<In>* scratch) {
  if (!src) {
    std::memset(scratch, 0, size_t(n) * sizeof(Acc<In>));
    return scratch;
  }
  if constexpr (!kIsHalf<In>)
    if (stride == sizeof(In) && reinterpret_cast<uintptr_t>(src) % sizeof(In) == 0) return src;
  widen_row(src, stride, n, scratch);
  return scratch;
}

typedef float Quad __attribute__((vector_size(16), aligned(1), may_alias));

// out[x * ld + r] = rows[r][x] for four rows
ATTN_INLINE void interleave4(const float* const* rows, long n, float* out, long ld) {
  long x = 0;
  for (; x + 4 <= n; x += 4) {
    const Quad a = *(const Quad*)(rows[0] + x), b = *(const Quad*)(rows[1] + x);
    const Quad c = *(const Quad*)(rows[2] + x), d = *(const Quad*)(rows[3] + x);
    const Quad ab0 = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab1 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const Quad cd0 = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd1 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    *(Quad*)(out + (x + 0) * ld) = __builtin_shufflevector(ab0, cd0, 0, 1, 4, 5);
    *(Quad*)(out + (x + 1) * ld) = __builtin_shufflevector(ab0, cd0, 2, 3, 6, 7);
    *(Quad*)(out + (x + 2) * ld) = __builtin_shufflevector(ab1, cd1, 0, 1, 4, 5);
    *(Quad*)(out + (x + 3) * ld) = __builtin_shufflevector(ab1, cd1, 2, 3, 6, 7);
  }
  for (; x < n; ++x)
    for (int r = 0; r < 4; ++r) out[x * ld + r] = rows[r][x];
}
ATTN_INLINE void interleave4(const double* const* rows, long n, double* out, long ld) {
  for (long x = 0; x < n; ++x)
    for (int r = 0; r < 4; ++r) out[x * ld + r] = rows[r][x];
}

// rows[count] of n elements -> out[x * ld + r], count rounded up to 4 with zeros; scratch holds 4 rows
template <class In>
inline void interleave(const In* const* rows, long count, long stride, long n, Acc<In>* out, long ld, Acc<In>* scratch) {
  for (long r = 0; r < count; r += 4) {
    const Acc<In>* quad[4];
    for (long u = 0; u < 4; ++u)
      quad[u] = as_acc(r + u < count ? rows[r + u] : nullptr, stride, n, scratch + u * n);
    interleave4(quad, n, out + r, ld);
  }
}

// key panels: keys [0, count) -> out[group][x][kPanel]
template <class In>
inline void pack_keys(const In* const* rows, long count, long stride, long n, Acc<In>* out, Acc<In>* scratch) {
  for (long j = 0; j < count; j += kPanel) {
    const long have = min_of(kPanel, count - j);
    Acc<In>* panel = out + j * n;
    if (have < kPanel) std::memset(panel, 0, size_t(n * kPanel) * sizeof(Acc<In>));
    interleave(rows + j, have, stride, n, panel, kPanel, scratch);
  }
}

// value panels: keys [0, count) -> out[channel group][key][kPanel], `keys` apart; channels and keys padded with zeros
template <class In>
inline void pack_values(const In* const* rows, long count, long stride, long n, long keys, Acc<In>* out,
                        Acc<In>* scratch) {
  using T = Acc<In>;
  constexpr long kBatch = 4;  // keys a time: whole cache lines are written, so panels a power of two apart do not fight
  for (long j = 0; j < round_up(count, kPanel); j += kBatch) {
    const T* src[kBatch];
    for (long u = 0; u < kBatch; ++u)
      src[u] = as_acc(j + u < count ? rows[j + u] : nullptr, stride, n, scratch + u * n);
    long x = 0;
    for (; x + kPanel <= n; x += kPanel)
      for (long u = 0; u < kBatch; ++u) std::memcpy(out + x * keys + (j + u) * kPanel, src[u] + x, kPanel * sizeof(T));
    for (; x < n; x += kPanel)
      for (long u = 0; u < kBatch; ++u)
        for (long c = 0; c < kPanel; ++c) out[x * keys + (j + u) * kPanel + c] = x + c < n ? src[u][x + c] : T(0);
  }
}

}  // namespace attn::ATTN_TARGET
