// The micro-kernels of decoding: at most eight rows against long rows of keys, channels as lanes, nothing packed.
//
// Computes: s[key][r] = q[r] . k[key] and O[r] = O[r] * alpha[r] + sum_key p[key][r] v[key]; storage types are widened in
//   registers, so that each byte of the cache is read once.
// Shapes: q [r][channels, padded with zeros], s [key][W], O [r][channels, padded]; channels of q and O in the order of
//   `channel_at`, that of the registers.
// Invariants: only rows of valid keys are read. Memory is the limit here, so it is asked for keys and values in the order in
//   which they will be read, a fixed number of rows ahead, and at the pace at which they are used up.
#pragma once

#include <type_traits>

#include "rows.h"

namespace attn::ATTN_TARGET {

inline constexpr int kNarrowRows = 8;
inline constexpr int kAheadRows = kTileKeys / 2;  // rows between prefetch and use
inline constexpr int kSumKeys = 32;               // keys whose values stay in L1 while their channels are summed
inline constexpr int kUnrolled = 4;               // keys

template <class In>
inline bool use_narrow(const Args& a) {
  if constexpr (sizeof(Acc<In>) == 8) return false;
  // packed sequences are all computed one way: a sequence's bits shall not depend on how long its neighbours are
  if (a.rows == RowKind::packed) return false;
  return a.M * (a.H / a.Hkv) <= kNarrowRows && element_stride(a, a.k) == sizeof(In) && element_stride(a, a.v) == sizeof(In);
}

inline constexpr int kPair = 2 * kLanes<float>;  // channels that are widened together

// channels [0, kPair) of a row. Two bf16 of a 32-bit word take one instruction each: even channels come first, then odd
template <class In>
ATTN_INLINE void load_pair(const In* p, Vec<float>& a, Vec<float>& b) {
  a = load_as(p);
  b = load_as(p + kLanes<float>);
}
ATTN_INLINE void load_pair(const bf16* p, Vec<float>& a, Vec<float>& b) {
  UVec words;
  std::memcpy(&words, p, sizeof words);
  a = (Vec<float>)(words << 16);
  b = (Vec<float>)(words & 0xffff0000u);
}
// the last, partial pair of a row, without reading past it
template <class In>
ATTN_INLINE void load_pair(const In* p, long count, Vec<float>& a, Vec<float>& b) {
  In buffer[kPair] = {};
  std::memcpy(buffer, p, size_t(count) * sizeof(In));
  load_pair(buffer, a, b);
}

// the channel that stands at place x of a row that `load_pair` widened
template <class In>
inline long channel_at(long x) {
  constexpr int L = kLanes<float>;
  if constexpr (!std::is_same_v<In, bf16>) return x;
  const long lane = x % L;
  return x / kPair * kPair + 2 * lane + x % kPair / L;
}

template <class In>
inline void load_narrow(const In* const* rows, long count, long stride, long D, Acc<In> scale, Acc<In>* q,
                        Acc<In>* scratch) {
  const long padded = round_up(D, kPair);
  // the micro-kernels come in 1, 2, 4 and 8 rows; rows that do not exist are zero queries
  for (long x = 0; x < kNarrowRows * padded; ++x) q[x] = 0;
  for (long r = 0; r < count; ++r) {
    widen_row(rows[r], stride, D, scratch);
    for (long x = 0; x < padded; ++x)
      if (const long from = channel_at<In>(x); from < D) q[r * padded + x] = scratch[from] * scale;
  }
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

// What is prefetched while row j of a tile is used: the row kAheadRows later, first of the tile, then of what is read next.
template <class In>
struct Ahead {
  const In* const* rows;
  long bytes, bytes_then;  // of a row

  Ahead(const In* const* tile, long channels, long channels_then)
      : rows(tile + kAheadRows), bytes(channels * long(sizeof(In))), bytes_then(channels_then * long(sizeof(In))) {}
  ATTN_INLINE long bytes_at(long j) const { return j < kTileKeys - kAheadRows ? bytes : bytes_then; }
  // `size` bytes of row j, in whole lines
  ATTN_INLINE void ask(long j, long from, long size) const {
    const char* line = reinterpret_cast<const char*>(rows[j]) + from;
    for (long byte = 0; byte < size; byte += kLine) __builtin_prefetch(line + byte, 0, 2);
  }
};

// asks for the rows of some keys bit by bit
template <class In>
struct Cursor {
  Ahead<In> ahead;
  long row, last, share;
  long size = ahead.bytes_at(row), at = 0;

  ATTN_INLINE void advance() {
    ahead.ask(row, at, share);
    at += share;
    if (at < size) return;
    at = 0;
    row = min_of(row + 1, last);
  }
};

// KEYS keys against R rows; KEYS * R is a multiple of 4
template <class In, int KEYS, int R>
ATTN_INLINE void dot_rows(const In* const* keys, const float* q, long D, float* out) {
  constexpr int L = kLanes<float>;
  const long padded = round_up(D, kPair);
  Vec<float> acc[KEYS * R];
  ATTN_UNROLL
  for (int n = 0; n < KEYS * R; ++n) acc[n] = Vec<float>{};
  const auto multiply = [&](const float* at, const Vec<float>* k) __attribute__((always_inline)) {
    ATTN_UNROLL
    for (int r = 0; r < R; ++r) {
      Vec<float> row = load(at + r * padded);
      ATTN_IN_REGISTER(row);  // one load for all keys
      ATTN_UNROLL
      for (int u = 0; u < KEYS; ++u) acc[u * R + r] = fma<float>(k[u], row, acc[u * R + r]);
    }
  };
  Vec<float> a[KEYS], b[KEYS];
  long x = 0;
  for (; x + kPair <= D; x += kPair) {
    ATTN_UNROLL
    for (int u = 0; u < KEYS; ++u) load_pair(keys[u] + x, a[u], b[u]);
    multiply(q + x, a);
    multiply(q + x + L, b);
  }
  if (x < D) {
    for (int u = 0; u < KEYS; ++u) load_pair(keys[u] + x, D - x, a[u], b[u]);
    multiply(q + x, a);
    multiply(q + x + L, b);
  }
  ATTN_UNROLL
  for (int n = 0; n < KEYS * R; n += 4) {
    const Quad sums = lane_sums(acc + n);
    std::memcpy(out + n, &sums, sizeof sums);
  }
}

template <class In, int R>
inline void dot_tile(const In* const* krow, Ahead<In> ahead, long begin, long end, const float* q, long D, float* s, long width) {
  constexpr int KEYS = R >= 8 ? 1 : R == 4 ? 2 : 4;
  float out[KEYS * R];
  for (long j = begin; j < end; j += KEYS) {
    const In* keys[KEYS];
    for (int u = 0; u < KEYS; ++u) {
      const long key = min_of(j + u, end - 1);
      keys[u] = krow[key];
      ahead.ask(key, 0, ahead.bytes_at(key));
    }
    dot_rows<In, KEYS, R>(keys, q, D, out);
    for (int u = 0; u < KEYS && j + u < end; ++u) std::memcpy(s + (j + u) * width, out + u * R, R * sizeof(float));
  }
}

template <class In>
inline void scores_narrow(int vecs, const In* const* krow, Ahead<In> ahead, long valid, Range range, const Acc<In>* q,
                          long rows, long D, Acc<In>* s) {
  if constexpr (sizeof(Acc<In>) == 4) {
    const long width = vecs * kLanes<float>;
    std::memset(s + range.begin * width, 0, size_t((range.end - range.begin) * width) * sizeof(float));
    const auto tile = rows > 4 ? dot_tile<In, 8> : rows > 2 ? dot_tile<In, 4> : rows > 1 ? dot_tile<In, 2> : dot_tile<In, 1>;
    tile(krow, ahead, range.begin, valid, q, D, s, width);
  }
}

// the keys of one tile, or one part of them after the other: sums wait in `waiting` for those that follow
struct Part {
  long begin, end;
  bool first, last;
};

// R rows by C pairs of channel vectors from channel x. Each channel is summed key by key, in parts or not
template <class In, int R, int C, bool kTail>
ATTN_INLINE void sum_values(const In* const* vrow, Cursor<In>& ahead, Part part, const float* p, long width, long x,
                            long tail, const float* alpha, float* waiting, float* o, long ldo) {
  constexpr int L = kLanes<float>;
  Vec<float> acc[R][2 * C];
  ATTN_UNROLL
  for (int r = 0; r < R; ++r) {
    ATTN_UNROLL
    for (int c = 0; c < 2 * C; ++c) acc[r][c] = part.first ? Vec<float>{} : load(waiting + r * ldo + x + c * L);
  }
  const auto add = [&](long j) __attribute__((always_inline)) {
    Vec<float> v[2 * C];
    ATTN_UNROLL
    for (int c = 0; c < C; ++c) {
      if constexpr (kTail)
        load_pair(vrow[j] + x, tail, v[0], v[1]);
      else
        load_pair(vrow[j] + x + c * kPair, v[2 * c], v[2 * c + 1]);
    }
    ATTN_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec<float> weight = splat<float>(p[j * width + r]);
      ATTN_UNROLL
      for (int c = 0; c < 2 * C; ++c) acc[r][c] = fma<float>(weight, v[c], acc[r][c]);
    }
  };
  long j = part.begin;
  for (; j + kUnrolled <= part.end; j += kUnrolled) {
    ahead.advance();
    ATTN_UNROLL
    for (int n = 0; n < kUnrolled; ++n) add(j + n);
  }
  for (; j < part.end; ++j) add(j);
  ATTN_UNROLL
  for (int r = 0; r < R; ++r) {
    ATTN_UNROLL
    for (int c = 0; c < 2 * C; ++c) {
      const long at = r * ldo + x + c * L;
      if (part.last)
        store(o + at, fma<float>(load(o + at), splat<float>(alpha[r]), acc[r][c]));
      else
        store(waiting + at, acc[r][c]);
    }
  }
}

template <class In, int R>
inline void value_tile(const In* const* vrow, Ahead<In> ahead, long begin, long end, const float* p, long width, long Dv,
                       const float* alpha, float* waiting, float* o) {
  constexpr int C = R >= 4 ? 1 : 2;
  const long ldo = round_up(Dv, kPair), passes = max_of(1, (Dv + C * kPair - 1) / (C * kPair));
  if constexpr (R > 4) {  // more rows than registers: the values are read a second time
    value_tile<In, R / 2>(vrow, ahead, begin, end, p, width, Dv, alpha, waiting, o);
    value_tile<In, R / 2>(vrow, ahead, begin, end, p + R / 2, width, Dv, alpha + R / 2, waiting, o + R / 2 * ldo);
    return;
  }
  for (long j = begin; j < end; j += kSumKeys) {
    const Part part{j, min_of(j + kSumKeys, end), j == begin, j + kSumKeys >= end};
    Cursor<In> cursor{ahead, j, part.end - 1, kUnrolled * ahead.bytes_at(j) / passes};
    long x = 0;
    for (; x + C * kPair <= Dv; x += C * kPair)
      sum_values<In, R, C, false>(vrow, cursor, part, p, width, x, 0, alpha, waiting, o, ldo);
    for (; x + kPair <= Dv; x += kPair)
      sum_values<In, R, 1, false>(vrow, cursor, part, p, width, x, 0, alpha, waiting, o, ldo);
    if (x < Dv) sum_values<In, R, 1, true>(vrow, cursor, part, p, width, x, Dv - x, alpha, waiting, o, ldo);
  }
}

// waiting: room for kNarrowRows rows of O
template <class In>
inline void values_narrow(int vecs, const In* const* vrow, Ahead<In> ahead, long valid, Range range, const Acc<In>* p,
                          long rows, long Dv, const Acc<In>* alpha, Acc<In>* waiting, Acc<In>* o) {
  // lanes past `rows` hold zero queries: their sums are computed and never stored
  if constexpr (sizeof(Acc<In>) == 4) {
    const auto tile = rows > 4 ? value_tile<In, 8> : rows > 2 ? value_tile<In, 4> : rows > 1 ? value_tile<In, 2> : value_tile<In, 1>;
    tile(vrow, ahead, range.begin, valid, p, vecs * kLanes<float>, Dv, alpha, waiting, o);
  }
}

}  // namespace attn::ATTN_TARGET
