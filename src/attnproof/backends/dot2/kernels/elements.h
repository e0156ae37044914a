// How each dtype is stored, multiplied and rounded; the tile steps are written once over these structs.
//
// Computes: dot(a, b, c) of one dword of a row tile; weigh(p, n, x, c) of the n-th weight of a 16-byte run of weights
//   with one dword of a pair tile.
// Shapes: a pair tile holds kPair rows in one: for 16-bit elements a dword is (row 2r, row 2r + 1) of one column.
// Invariants: every sum is fp32.
// Mirror: csrc/narrow.h
#pragma once
#include "device.h"
#include "options.h"

INLINE float low_half(u32 x) { return as_float(x << 16); }  // bf16 -> fp32
INLINE float high_half(u32 x) { return as_float(x & 0xffff0000u); }

// to nearest, ties to even; NaN stays NaN
INLINE u16 round_brain(float x) {
  const u32 bits = as_bits(x);
  return x != x ? u16(0x7fff) : u16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

INLINE u16 half_bits(float x) { return __builtin_bit_cast(u16, f16(x)); }

struct Half {
  typedef f16 Stored;
  typedef f16 Weight;
  static constexpr int kBytes = 2, kPair = 2, kWeightBytes = 2;
  static METHOD float wide(f16 x) { return float(x); }
  static METHOD f16 narrow(float x) { return f16(x); }
  static METHOD u32x4 staged(u32x4 x) { return x; }
  static METHOD f16 weight(float p) { return f16(p); }
  static METHOD float dot(u32 a, u32 b, float c) { return dot2(a, b, c); }
  static METHOD float weigh(u32x4 p, int n, u32 x, float c) { return dot2(p[n], x, c); }
};

struct Brain {
  typedef u16 Stored;
  typedef float Weight;  // weights stay fp32: there is no bf16 product to feed
  static constexpr int kBytes = 2, kPair = 2, kWeightBytes = 4;
  static METHOD float wide(u16 x) { return as_float(u32(x) << 16); }
  static METHOD u16 narrow(float x) { return round_brain(x); }
  static METHOD u32x4 staged(u32x4 x) { return x; }
  static METHOD float weight(float p) { return p; }
  static METHOD float dot(u32 a, u32 b, float c) {
    return __builtin_fmaf(high_half(a), high_half(b), __builtin_fmaf(low_half(a), low_half(b), c));
  }
  static METHOD float weigh(u32x4 p, int n, u32 x, float c) {
    c = __builtin_fmaf(as_float(p[2 * n]), low_half(x), c);
    return __builtin_fmaf(as_float(p[2 * n + 1]), high_half(x), c);
  }
};

// opt-in: the host has checked that every input is within the range of fp16
struct NarrowedBrain : Half {
  typedef u16 Stored;
  static METHOD float wide(u16 x) { return as_float(u32(x) << 16); }
  static METHOD u16 narrow(float x) { return round_brain(x); }
  static METHOD u32x4 staged(u32x4 x) {
    UNROLL
    for (int c = 0; c < 4; ++c) x[c] = u32(half_bits(low_half(x[c]))) | (u32(half_bits(high_half(x[c]))) << 16);
    return x;
  }
};

struct Single {
  typedef float Stored;
  typedef float Weight;
  static constexpr int kBytes = 4, kPair = 1, kWeightBytes = 4;
  static METHOD float wide(float x) { return x; }
  static METHOD float narrow(float x) { return x; }
  static METHOD u32x4 staged(u32x4 x) { return x; }
  static METHOD float weight(float p) { return p; }
  static METHOD float dot(u32 a, u32 b, float c) { return __builtin_fmaf(as_float(a), as_float(b), c); }
  static METHOD float weigh(u32x4 p, int n, u32 x, float c) {
    return __builtin_fmaf(as_float(p[n]), as_float(x), c);
  }
};

template <int kDtype>
struct ElementOf {
  typedef Half Type;
};
template <>
struct ElementOf<1> {
  typedef Brain Type;
};
template <>
struct ElementOf<2> {
  typedef Single Type;
};
template <>
struct ElementOf<3> {
  typedef NarrowedBrain Type;
};
typedef ElementOf<DTYPE>::Type Element;
typedef Element::Stored Stored;

constexpr int kChunk = 16 / Element::kBytes;  // elements of a 16-byte load

#if BIAS == 2
INLINE float load_bias(const void* x, i64 at) { return ((const float*)x)[at]; }
#else
INLINE float load_bias(const void* x, i64 at) { return Element::wide(((const Stored*)x)[at]); }
#endif
