// From raw products to logits, which pairs may attend, and which survive dropout.
//
// Computes: s = cap tanh(scale q.k / cap) - slope |i + N - M - j| + bias, in this order; Philox4x32-10.
// Invariants: an index past the end is clamped before it is loaded from, and its pair is not `visible`.
// Mirror: scores.py, philox.py, csrc/scores.h, csrc/philox.h
#pragma once
#include "places.h"

// Options that read more arguments per tile than registers can hold on to.
constexpr bool kHeavy = KEEP || BOUNDS || BIAS || ALIBI || DROPOUT;

// The same arguments, read again where they are used: scalar loads are cheap, scalar registers are few.
INLINE const Args& reloaded(const Args& given) {
#if defined(__CUDA__)
  return given;
#else
  auto at = __builtin_amdgcn_kernarg_segment_ptr();
  asm volatile("" : "+s"(at));  // or the compiler would load everything before the loop
  return *(const Args*)at;
#endif
}

// what all pairs of one query share
struct Query {
  int i;
  u32 plane;
  float slope;
  i64 bias_at, keep_at;
  int low, high;  // explicit bounds
};

INLINE Query query_of(const Args& a, const Sequence& s, int h, int i) {
  Query q = {i, u32(s.b * a.H + h), 0.0f, 0, 0, 0, 0};
  [[maybe_unused]] const int row = most(least(i, s.rows - 1), 0);
#if ALIBI
  q.slope = a.slopes[s.b * a.slopes_b + h * a.slopes_h];
#endif
#if BIAS
  q.bias_at = s.b * a.bias_b + h * a.bias_h + row * a.bias_m;
#endif
#if KEEP
  q.keep_at = s.b * a.keep_b + h * a.keep_h + row * a.keep_m;
#endif
#if BOUNDS
  q.low = bounds_of(a, s, row)[0];
  q.high = bounds_of(a, s, row)[1];
#endif
  return q;
}

// cap tanh(s / cap); a short series near 0, where 1 - 2 / (e^2x + 1) cancels
INLINE float softcap(float s, float cap, float inverse_cap) {
  const float x = s * inverse_cap, square = x * x;
  const float series = x * (1.0f + square * (-0.33333333f + square * (0.13333333f - square * 0.053968254f)));
  const float ratio = 1.0f - 2.0f * reciprocal(exp2_of(x * (2.0f * kLog2e)) + 1.0f);
  return cap * (square < 0.03f ? series : ratio);
}

struct Logit {
  float value, capped;
};

// no product here may fuse with a later difference: a maximum must be reproducible from its own score
INLINE Logit logit(const Args& a, const Sequence& s, const Query& q, int j, float raw) {
#pragma clang fp contract(off)
  float x = FOLD ? raw : raw * a.scale;
#if SOFTCAP
  x = softcap(x, a.cap, a.inverse_cap);
#endif
  const float capped = x;
#if ALIBI
  x = x - q.slope * __builtin_fabsf(float(q.i + s.offset() - j));
#endif
#if BIAS
  x = x + load_bias(a.bias, q.bias_at + least(j, s.keys - 1) * a.bias_n);
#endif
  return Logit{x, capped};
}

// no branches: every index is clamped, so every load is allowed
INLINE bool visible(const Args& a, const Sequence& s, const Band& band, const Query& q, int j) {
  bool sees = j < s.keys;
#if BANDED
  sees = sees & band.holds(q.i, j);
#endif
#if BOUNDS
  sees = sees & (j >= q.low) & (j < q.high);
#endif
#if KEEP
  sees = sees & (a.keep[q.keep_at + least(j, s.keys - 1) * a.keep_n] != 0);
#endif
  return sees;
}

// the stream of one launch
struct Stream {
  u32 key0, key1, offset;
};

INLINE Stream stream_of(const Args& a) {
#if DROPOUT
  const u64 seed = u64(uniform(a.rng));
  return Stream{u32(seed), u32(seed >> 32), u32(u64(uniform(a.rng + 1)))};
#else
  return Stream{0, 0, 0};
#endif
}

// one call of the generator serves four neighbouring keys: counter (j / 4, i, plane, offset), word j % 4
INLINE bool survives(const Args& a, const Stream& stream, const Query& q, int j) {
  u32 c0 = u32(j) >> 2, c1 = u32(q.i), c2 = q.plane, c3 = stream.offset, k0 = stream.key0, k1 = stream.key1;
  UNROLL
  for (int round = 0; round < 10; ++round) {
    const u32 low = c0, high = c2;
    c0 = multiply_high(high, 0xCD9E8D57u) ^ c1 ^ k0;
    c1 = high * 0xCD9E8D57u;
    c2 = multiply_high(low, 0xD2511F53u) ^ c3 ^ k1;
    c3 = low * 0xD2511F53u;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const u32 word = (j & 2) ? ((j & 1) ? c3 : c2) : ((j & 1) ? c1 : c0);
  return word >= a.threshold && !a.drop_all;
}
