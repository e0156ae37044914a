// The micro-kernels of decoding: at most eight rows against long rows of keys, channels as lanes, nothing packed.
//
// Computes: s[key][r] = q[r] . k[key] and O[r] = O[r] * alpha[r] + sum_key p[key][r] v[key]; storage types are widened in
//   registers, so that each byte of the cache is read once.
// Shapes: q [r][channels, padded with zeros], s [key][W], O [r][channels, padded].
// Invariants: only rows of valid keys are read; values are prefetched while keys are multiplied, the next keys while values
//   are summed.
#pragma once

#include "rows.h"

namespace attn::ATTN_TARGET {

inline constexpr int kNarrowRows = 8;

template <class In>
inline bool use_narrow(const Args& a) {
  if constexpr (sizeof(Acc<In>) == 8) return false;
  // packed sequences are all computed one way: a sequence's bits shall not depend on how long its neighbours are
  if (a.rows == RowKind::packed) return false;
  return a.M * (a.H / a.Hkv) <= kNarrowRows && element_stride(a, a.k) == sizeof(In) && element_stride(a, a.v) == sizeof(In);
}

template <class In>
inline void load_narrow(const In* const* rows, long count, long stride, long D, Acc<In> scale, Acc<In>* q) {
  const long padded = round_up(D, kLanes<Acc<In>>);
  for (long r = 0; r < count; ++r) {
    widen_row(rows[r], stride, D, q + r * padded);
    for (long x = 0; x < D; ++x) q[r * padded + x] *= scale;
    for (long x = D; x < padded; ++x) q[r * padded + x] = 0;
  }
  // the micro-kernels come in 1, 2, 4 and 8 rows; rows that do not exist are zero queries
  for (long x = count * padded; x < kNarrowRows * padded; ++x) q[x] = 0;
}

// the last, partial vector of a row, without reading past it
template <class In>
ATTN_INLINE Vec<float> load_tail(const In* p, long count) {
  In buffer[kLanes<float>] = {};
  std::memcpy(buffer, p, size_t(count) * sizeof(In));
  return load_as(buffer);
}
ATTN_INLINE Vec<float> load_tail(const float* p, long count) {
  float buffer[kLanes<float>] = {};
  std::memcpy(buffer, p, size_t(count) * sizeof(float));
  return load(buffer);
}

ATTN_INLINE Quad quarter_sum(Vec<float> x) {
  Quad parts[kBytes / 16];
  std::memcpy(parts, &x, sizeof x);
  if constexpr (kBytes == 64) return (parts[0] + parts[2]) + (parts[1] + parts[3]);
  if constexpr (kBytes == 32) return parts[0] + parts[1];
  return parts[0];
}
// sums of the lanes of four vectors
ATTN_INLINE Quad lane_sums(const Vec<float>* x) {
  const Quad a = quarter_sum(x[0]), b = quarter_sum(x[1]), c = quarter_sum(x[2]), d = quarter_sum(x[3]);
  const Quad ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Quad cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

// KEYS keys against R rows; KEYS * R is a multiple of 4
template <class In, int KEYS, int R>
ATTN_INLINE void dot_rows(const In* const* keys, const float* q, long D, float* out) {
  constexpr int L = kLanes<float>;
  const long padded = round_up(D, L);
  Vec<float> acc[KEYS * R];
  ATTN_UNROLL
  for (int n = 0; n < KEYS * R; ++n) acc[n] = Vec<float>{};
  const auto step = [&](long x, const Vec<float>* k) __attribute__((always_inline)) {
    ATTN_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec<float> row = load(q + r * padded + x);
      ATTN_UNROLL
      for (int u = 0; u < KEYS; ++u) acc[u * R + r] = fma<float>(k[u], row, acc[u * R + r]);
    }
  };
  long x = 0;
  for (; x + L <= D; x += L) {
    Vec<float> k[KEYS];
    ATTN_UNROLL
    for (int u = 0; u < KEYS; ++u) k[u] = load_as(keys[u] + x);
    step(x, k);
  }
  if (x < D) {
    Vec<float> k[KEYS];
    for (int u = 0; u < KEYS; ++u) k[u] = load_tail(keys[u] + x, D - x);
    step(x, k);
  }
  ATTN_UNROLL
  for (int n = 0; n < KEYS * R; n += 4) {
    const Quad sums = lane_sums(acc + n);
    std::memcpy(out + n, &sums, sizeof sums);
  }
}

template <class In, int R>
inline void dot_tile(const In* const* krow, const In* const* vrow, long begin, long end, const float* q, long D,
                     long Dv, float* s, long width) {
  constexpr int KEYS = R >= 8 ? 1 : R == 4 ? 2 : 4;
  const long copied = min_of(R, width);
  float out[KEYS * R];
  for (long j = begin; j < end; j += KEYS) {
    const In* keys[KEYS];
    for (int u = 0; u < KEYS; ++u) {
      keys[u] = krow[min_of(j + u, end - 1)];
      const char* ahead = reinterpret_cast<const char*>(vrow[min_of(j + u, end - 1)]);
      for (long byte = 0; byte < Dv * long(sizeof(In)); byte += 64) __builtin_prefetch(ahead + byte, 0, 2);
    }
    dot_rows<In, KEYS, R>(keys, q, D, out);
    for (int u = 0; u < KEYS && j + u < end; ++u)
      for (int r = 0; r < copied; ++r) s[(j + u) * width + r] = out[u * R + r];
  }
}

template <class In>
inline void scores_narrow(int vecs, const In* const* krow, const In* const* vrow, long valid, Range range,
                          const Acc<In>* q, long rows, long D, long Dv, Acc<In>* s) {
  if constexpr (sizeof(Acc<In>) == 4) {
    const long width = vecs * kLanes<float>;
    std::memset(s + range.begin * width, 0, size_t((range.end - range.begin) * width) * sizeof(float));
    const auto tile = rows > 4 ? dot_tile<In, 8> : rows > 2 ? dot_tile<In, 4> : rows > 1 ? dot_tile<In, 2> : dot_tile<In, 1>;
    tile(krow, vrow, range.begin, valid, q, D, Dv, s, width);
  }
}

// R rows by C vectors of channels, over all keys of the range
// next: rows of keys to come; a line of each travels to L2 with the values of one key, so that memory is never idle
template <class In, int R, int C, bool kTail>
ATTN_INLINE void sum_values(const In* const* vrow, const In* const* next, long begin, long end, const float* p,
                            long width, long x, long tail, const float* alpha, float* o, long ldo) {
  constexpr int L = kLanes<float>;
  Vec<float> acc[R][C];
  ATTN_UNROLL
  for (int r = 0; r < R; ++r) {
    ATTN_UNROLL
    for (int c = 0; c < C; ++c) acc[r][c] = Vec<float>{};
  }
  const bool new_line = x * long(sizeof(In)) % 64 == 0;
  for (long j = begin; j < end; ++j) {
    if (new_line) __builtin_prefetch(next[j] + x, 0, 2);
    Vec<float> v[C];
    ATTN_UNROLL
    for (int c = 0; c < C; ++c) v[c] = kTail ? load_tail(vrow[j] + x, tail) : load_as(vrow[j] + x + c * L);
    ATTN_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec<float> weight = splat<float>(p[j * width + r]);
      ATTN_UNROLL
      for (int c = 0; c < C; ++c) acc[r][c] = fma<float>(weight, v[c], acc[r][c]);
    }
  }
  ATTN_UNROLL
  for (int r = 0; r < R; ++r) {
    ATTN_UNROLL
    for (int c = 0; c < C; ++c) {
      float* at = o + r * ldo + x + c * L;
      store(at, fma<float>(load(at), splat<float>(alpha[r]), acc[r][c]));
    }
  }
}

template <class In, int R>
inline void value_tile(const In* const* vrow, const In* const* next, long begin, long end, const float* p, long width,
                       long Dv, const float* alpha, float* o) {
  constexpr int L = kLanes<float>, C = R >= 8 ? 1 : R == 4 ? 2 : 4;
  const long ldo = round_up(Dv, L);
  long x = 0;
  for (; x + C * L <= Dv; x += C * L)
    sum_values<In, R, C, false>(vrow, next, begin, end, p, width, x, 0, alpha, o, ldo);
  for (; x + L <= Dv; x += L) sum_values<In, R, 1, false>(vrow, next, begin, end, p, width, x, 0, alpha, o, ldo);
  if (x < Dv) sum_values<In, R, 1, true>(vrow, next, begin, end, p, width, x, Dv - x, alpha, o, ldo);
}

template <class In>
inline void values_narrow(int vecs, const In* const* vrow, const In* const* next, long valid, Range range,
                          const Acc<In>* p, long rows, long Dv, const Acc<In>* alpha, Acc<In>* o) {
  // lanes past `rows` hold zero queries: their sums are computed and never stored
  if constexpr (sizeof(Acc<In>) == 4) {
    const auto tile = rows > 4 ? value_tile<In, 8> : rows > 2 ? value_tile<In, 4> : rows > 1 ? value_tile<In, 2> : value_tile<In, 1>;
    tile(vrow, next, range.begin, valid, p, vecs * kLanes<float>, Dv, alpha, o);
  }
}

}  // namespace attn::ATTN_TARGET
