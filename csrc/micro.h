// The one matrix micro-kernel: C[r][lane] = sum_x A[x][r] * B[x][lane], R rows by V vectors in registers.
//
// Computes: S^T = K Q^T, dP^T = V dO^T (x = channel), O^T = V^T P^T, dQ^T = K^T dS^T (x = key) and, with a strided A,
//   dV = P^T dO, dK = dS^T Q (x = query row).
// Shapes: A is a panel [x][R], or R rows [r][x] of a tile that was written lane by lane; B is [x][V * lanes].
// Invariants: every C element is one chain of fused multiply-adds over x in rising order, so its bits do not depend on
//   which side was broadcast nor on how rows were grouped.
// Cost on AVX2 (R = 4, V = 3): 12 FMAs, 3 vector loads and 4 broadcasts a step, 6 cycles on two FMA pipes.
#pragma once

#include "simd.h"

namespace attn::ATTN_TARGET {

template <class T, int R, int V, bool kPanelA>
struct Micro {
  Vec<T> acc[R][V];

  ATTN_INLINE void clear() {
    ATTN_UNROLL
    for (int r = 0; r < R; ++r) {
      ATTN_UNROLL
      for (int v = 0; v < V; ++v) acc[r][v] = Vec<T>{};
    }
  }

  // all n steps; where there are enough, the first one multiplies instead of adding to zeros: between two panels the pipes
  // would wait for the registers to be cleared
  ATTN_INLINE void whole(const T* a, const T* b, long n, long stride_r = 0, long ldb = 0) {
    constexpr int kFirst = 4;
    if (n < kFirst) {
      clear();
      return run(a, b, n, stride_r, ldb);
    }
    ATTN_UNROLL
    for (int x = 0; x < kFirst; ++x) {
      const T *rows = a + x * (kPanelA ? R : 1), *lanes = b + x * (kPanelA ? V * kLanes<T> : ldb);
      Vec<T> row[V];
      ATTN_UNROLL
      for (int v = 0; v < V; ++v) {
        row[v] = load(lanes + v * kLanes<T>);
        ATTN_IN_REGISTER(row[v]);
      }
      ATTN_UNROLL
      for (int r = 0; r < R; ++r) {
        const Vec<T> s = splat<T>(kPanelA ? rows[r] : rows[r * stride_r]);
        ATTN_UNROLL
        for (int v = 0; v < V; ++v) {
          acc[r][v] = x == 0 ? s * row[v] : fma<T>(s, row[v], acc[r][v]);
          ATTN_IN_REGISTER(acc[r][v]);
        }
      }
    }
    run(a + kFirst * (kPanelA ? R : 1), b + kFirst * (kPanelA ? V * kLanes<T> : ldb), n - kFirst, stride_r, ldb);
  }

  // goes on with the chains over n more steps; strides are read only where A is no panel
  ATTN_INLINE void run(const T* a, const T* b, long n, long stride_r = 0, long ldb = 0) {
    // four steps a turn: a shorter run of branches, whose end the predictor learns (measured: 15 to 25 % at n = 64)
    _Pragma("GCC unroll 4")
    for (long x = 0; x < n; ++x) {
      Vec<T> row[V];
      ATTN_UNROLL
      for (int v = 0; v < V; ++v) row[v] = load(b + v * kLanes<T>);
      ATTN_UNROLL
      for (int r = 0; r < R; ++r) {
        const Vec<T> s = splat<T>(kPanelA ? a[r] : a[r * stride_r]);
        ATTN_UNROLL
        for (int v = 0; v < V; ++v) acc[r][v] = fma<T>(s, row[v], acc[r][v]);
      }
      a += kPanelA ? R : 1;
      b += kPanelA ? V * kLanes<T> : ldb;
    }
  }
};

// C = A B for a panel, or for rows that are `row` apart; C rows are V * lanes apart
template <class T, int V, bool kPanelA>
ATTN_INLINE void product_store(const T* a, long row, const T* b, long n, T* c) {
  Micro<T, kPanel, V, kPanelA> m;
  m.whole(a, b, n, row, V * kLanes<T>);
  ATTN_UNROLL
  for (int r = 0; r < kPanel; ++r) {
    ATTN_UNROLL
    for (int v = 0; v < V; ++v) store(c + (r * V + v) * kLanes<T>, m.acc[r][v]);
  }
}

// C = C * alpha + A B, alpha per lane
template <class T, int V>
ATTN_INLINE void product_rescale(const T* a, const T* b, long n, const T* alpha, T* c) {
  Micro<T, kPanel, V, true> m;
  m.whole(a, b, n);
  ATTN_UNROLL
  for (int r = 0; r < kPanel; ++r) {
    ATTN_UNROLL
    for (int v = 0; v < V; ++v) {
      T* at = c + (r * V + v) * kLanes<T>;
      store(at, fma<T>(load(at), load(alpha + v * kLanes<T>), m.acc[r][v]));
    }
  }
}

// C += A B
template <class T, int V>
ATTN_INLINE void product_add(const T* a, const T* b, long n, T* c) {
  Micro<T, kPanel, V, true> m;
  m.whole(a, b, n);
  ATTN_UNROLL
  for (int r = 0; r < kPanel; ++r) {
    ATTN_UNROLL
    for (int v = 0; v < V; ++v) {
      T* at = c + (r * V + v) * kLanes<T>;
      store(at, load(at) + m.acc[r][v]);
    }
  }
}

// vectors of the next channel panel: as wide as the micro-kernel, but never a single vector at the end where it can be
// helped (its few chains of FMAs would be all latency)
ATTN_INLINE long panel_vecs(long left) {
  if (left <= kMaxVecs) return left;
  return left == kMaxVecs + 1 && kMaxVecs > 2 ? kMaxVecs - 1 : kMaxVecs;
}

// what the rows of a chunk of blocks add to one group of keys: acc[key][channel] += sum_row tile[key][row] * b[row][channel]
template <class T>
struct OuterBlock {
  const T* tile;  // [key][lane]
  long width, lanes, first_row;
};

// b: one channel panel, [row][V * lanes]
template <class T, int V>
ATTN_INLINE void product_outer(const OuterBlock<T>* blocks, long count, long key, const T* b, T* c, long ldc) {
  Micro<T, kPanel, V, false> m;
  m.clear();
  for (long n = 0; n < count; ++n) {
    const OuterBlock<T>& each = blocks[n];
    m.run(each.tile + key * each.width, b + each.first_row * V * kLanes<T>, each.lanes, each.width, V * kLanes<T>);
  }
  ATTN_UNROLL
  for (int r = 0; r < kPanel; ++r) {
    ATTN_UNROLL
    for (int v = 0; v < V; ++v) {
      T* at = c + r * ldc + v * kLanes<T>;
      store(at, load(at) + m.acc[r][v]);
    }
  }
}

}  // namespace attn::ATTN_TARGET
