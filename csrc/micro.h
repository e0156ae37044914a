// The one matrix micro-kernel: C[r][lane] = sum_x A[x][r] * B[x][lane], R rows by V vectors in registers.
//
// Computes: S^T = K Q^T, dP^T = V dO^T (x = channel), O^T = V^T P^T, dQ^T = K^T dS^T (x = key) and, with a strided A,
//   dV = P^T dO, dK = dS^T Q (x = query row).
// Shapes: A is a panel [x][R] (stride_x = R, stride_r = 1) or a column walk of another tile; B is [x][V * lanes].
// Invariants: every C element is one chain of fused multiply-adds over x in rising order, so its bits do not depend on
//   which side was broadcast nor on how rows were grouped.
// Cost on AVX2 (R = 4, V = 3): 12 FMAs, 3 vector loads and 4 broadcasts a step, 6 cycles on two FMA pipes.
#pragma once

#include "simd.h"

namespace attn::ATTN_TARGET {

template <class T, int R, int V, bool kPanelA>
struct Micro {
  Vec<T> acc[R][V];

  ATTN_INLINE void run(const T* a, long stride_r, long stride_x, const T* b, long ldb, long n) {
    ATTN_UNROLL
    for (int r = 0; r < R; ++r) {
      ATTN_UNROLL
      for (int v = 0; v < V; ++v) acc[r][v] = Vec<T>{};
    }
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
      a += kPanelA ? R : stride_x;
      b += kPanelA ? V * kLanes<T> : ldb;
    }
  }
};

// C = A B for a panel; C rows are V * lanes apart
template <class T, int V>
ATTN_INLINE void product_store(const T* a, const T* b, long n, T* c) {
  Micro<T, kPanel, V, true> m;
  m.run(a, 0, 0, b, 0, n);
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
  m.run(a, 0, 0, b, 0, n);
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
  m.run(a, 0, 0, b, 0, n);
  ATTN_UNROLL
  for (int r = 0; r < kPanel; ++r) {
    ATTN_UNROLL
    for (int v = 0; v < V; ++v) {
      T* at = c + (r * V + v) * kLanes<T>;
      store(at, load(at) + m.acc[r][v]);
    }
  }
}

}  // namespace attn::ATTN_TARGET
