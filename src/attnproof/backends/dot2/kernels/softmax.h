// The online softmax of a tile of rows; the 16 threads of a row share its maximum and each keep a part of its sum.
//
// Computes: m_new = max(m, s), alpha = e^(m - m_new), p = e^(s - m_new), l = l alpha + sum p.
// Invariants: after a tile, l summed over the 16 threads is sum p, and the accumulator is sum p v, both relative to m;
//   while m is -inf alpha and p are 0, never NaN; a NaN score passes the maximum by and reaches its row through p.
// Mirror: online_softmax.py, csrc/softmax.h
#pragma once
#include "scores.h"

template <int kHeight>
struct Softmax {
  float m[kHeight], l[kHeight];

  METHOD void start() {
    UNROLL
    for (int i = 0; i < kHeight; ++i) {
      m[i] = -infinity();
      l[i] = 0.0f;
    }
  }

  // scores of row i in, probabilities out; the factor for what was summed before comes back
  template <int kBreadth>
  METHOD float step(int i, float (&s)[kBreadth], float exponent) {
#pragma clang fp contract(off)
    float top = m[i];
    UNROLL
    for (int j = 0; j < kBreadth; ++j) top = larger(top, s[j]);
    top = row_max(top);
    const float shift = top == -infinity() ? 0.0f : top;
    const float alpha = exp2_of((m[i] - shift) * exponent);
    float sum = 0.0f;
    UNROLL
    for (int j = 0; j < kBreadth; ++j) {
      s[j] = exp2_of((s[j] - shift) * exponent);
      sum += s[j];
    }
    l[i] = l[i] * alpha + sum;
    m[i] = top;
    return alpha;
  }
};

// a row's result: what its accumulator is multiplied by, and its lse
struct Finished {
  float factor, lse;
  bool dead;
};

// `top` and `total` of natural logits; `sink` is one more logit without a value, -inf for none
INLINE Finished finish(float top, float total, float sink) {
  const float above = larger(top, sink);
  const float shift = above == -infinity() ? 0.0f : above;
  const float share = exp2_of((top - shift) * kLog2e);
  total = total * share + exp2_of((sink - shift) * kLog2e);
  const bool dead = total == 0.0f;
  return Finished{dead ? 0.0f : share * reciprocal(total), dead ? -infinity() : above + kLn2 * log2_of(total), dead};
}

// SINK: 1 in the dtype of q, 2 in fp32 beside it
INLINE float load_sink(const Args& a, int h) {
#if SINK == 2
  return ((const float*)a.sink)[h * a.sink_h];
#elif SINK
  return Element::wide(((const Stored*)a.sink)[h * a.sink_h]);
#else
  return -infinity();
#endif
}
