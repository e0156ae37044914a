// Where a workgroup and its rows are: the sequence, its lengths, the interval of keys or queries it has to visit.
//
// Computes: tiles of keys that some, and that every, row of a tile sees; likewise for queries seen from a tile of keys.
// Invariants: key j is in the band of query i iff -left <= j - (i + offset) <= right, offset = keys - rows.
// Mirror: masks.py, backends/triton/kernels/pieces.py
#pragma once
#include "args.h"
#include "tile.h"

enum { SKIP = 0, EDGE = 1, FULL = 2 };

struct Sequence {
  int b, rows, keys;
  i64 q_row, k_row;  // first token on the packed axes
  METHOD int offset() const { return keys - rows; }
};

INLINE Sequence sequence_of(const Args& a, int b) {
  Sequence s = {b, a.M, a.N, 0, 0};
#if ROWS == 1
  s.q_row = uniform(a.cu_q + b);
  s.k_row = uniform(a.cu_k + b);
  s.rows = uniform(a.cu_q + b + 1) - uniform(a.cu_q + b);
  s.keys = uniform(a.cu_k + b + 1) - uniform(a.cu_k + b);
#elif ROWS >= 2
  s.keys = uniform(a.lengths + b);
#endif
  return s;
}

INLINE StridedRows rows_of(const void* x, i64 base, i64 row, i64 row_stride, i64 column_stride) {
  return StridedRows{(const Stored*)x + base + row * row_stride, row_stride, column_stride};
}

INLINE StridedRows query_rows(const Args& a, const Sequence& s, int h) {
  return rows_of(a.q, s.b * a.q_b + h * a.q_h, s.q_row, a.q_m, a.q_d);
}
INLINE StridedRows dout_rows(const Args& a, const Sequence& s, int h) {
  return rows_of(a.dout, s.b * a.dout_b + h * a.dout_h, s.q_row, a.dout_m, a.dout_d);
}
INLINE GroupedRows grouped_rows(const Args& a, const Sequence& s, int kv) {
  const Stored* base = (const Stored*)a.q + s.b * a.q_b + kv * a.G * a.q_h;
  return GroupedRows{base, a.q_m, a.q_d, a.q_h, a.G};
}

#if ROWS == 3
typedef PagedRows CacheRows;
INLINE PagedRows key_rows(const Args& a, const Sequence& s, int kv) {
  return PagedRows{(const Stored*)a.k + kv * a.k_h, a.k_n, a.k_d, a.k_b, a.table + s.b * a.table_b};
}
INLINE PagedRows value_rows(const Args& a, const Sequence& s, int kv) {
  return PagedRows{(const Stored*)a.v + kv * a.v_h, a.v_n, a.v_d, a.v_b, a.table + s.b * a.table_b};
}
#else
INLINE StridedRows key_rows(const Args& a, const Sequence& s, int kv) {
  return rows_of(a.k, s.b * a.k_b + kv * a.k_h, s.k_row, a.k_n, a.k_d);
}
INLINE StridedRows value_rows(const Args& a, const Sequence& s, int kv) {
  return rows_of(a.v, s.b * a.v_b + kv * a.v_h, s.k_row, a.v_n, a.v_d);
}
#endif

struct Band {
  int left, right, offset;
  METHOD bool holds(int i, int j) const {
    const int distance = j - i - offset;
    return (distance >= -left) & (distance <= right);
  }
};

INLINE Band band_of(const Args& a, const Sequence& s) {
  const int right = a.top_left ? least(a.right, -s.offset()) : a.right;
  return Band{a.left, right, s.offset()};
}

// positions seen by some row of a tile, and inside them those seen by every row
struct Interval {
  int low, full_low, full_high, high;
  METHOD bool full(int first, int count) const { return first >= full_low && first + count <= full_high; }
};

INLINE Interval key_interval(const Band& band, const Sequence& s, int first, int last) {
  Interval at = {0, 0, s.keys, s.keys};
#if BANDED
  at.low = most(first + band.offset - band.left, 0);
  at.full_low = most(last + band.offset - band.left, 0);
  at.full_high = least(first + band.offset + band.right + 1, s.keys);
  at.high = least(last + band.offset + band.right + 1, s.keys);
#endif
  return at;
}

INLINE Interval query_interval(const Band& band, const Sequence& s, int first, int last) {
  Interval at = {0, 0, s.rows, s.rows};
#if BANDED
  at.low = most(first - band.right - band.offset, 0);
  at.full_low = most(last - band.right - band.offset, 0);
  at.full_high = least(first + band.left - band.offset + 1, s.rows);
  at.high = least(last + band.left - band.offset + 1, s.rows);
#endif
  return at;
}

INLINE const i32* bounds_of(const Args& a, const Sequence& s, int i) {
  return a.bounds + s.b * a.bounds_b + (s.q_row + i) * a.bounds_m;
}

// the interval of a tile of queries cut down to its rows' explicit bounds
INLINE void narrow(Interval& at, const Args& a, const Sequence& s, int first, int last) {
#if BOUNDS
  int low = s.keys, full_low = 0, full_high = s.keys, high = 0;
  for (int i = first; i <= last; ++i) {
    const i32* row = bounds_of(a, s, i);
    const int from = uniform(row), to = uniform(row + 1);
    full_low = most(full_low, from);
    full_high = least(full_high, to);
    if (to > from) {
      low = least(low, from);
      high = most(high, to);
    }
  }
  at.low = most(at.low, low);
  at.high = least(at.high, high);
  at.full_low = most(at.full_low, full_low);
  at.full_high = least(at.full_high, full_high);
#endif
}

// what the boolean mask says about a whole tile
INLINE int mask_kind(const Args& a, int b, int h, int m_tile, int n_tile) {
#if KEEP && GROUPED
  return EDGE;
#elif KEEP
  return a.kinds[b * a.kinds_b + h * a.kinds_h + m_tile * a.kinds_m + n_tile];
#else
  return FULL;
#endif
}
