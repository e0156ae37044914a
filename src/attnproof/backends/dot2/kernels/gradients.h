// What the backward kernels share: p and ds of a pair from saved lse and delta.
//
// Computes: p = e^(s - lse), d_logit = p (dropout(dp) - delta), ds = d_logit * softcap'(s); s is recomputed.
// Invariants: lse is not below any score that it was made of, so p <= 1; a pair that may not attend has p = ds = 0, and
//   so has every pair of a dead row.
// Mirror: backends/streaming.py, csrc/gradient.h
#pragma once
#include "scores.h"

// saved statistics of one query
struct Saved {
  float lse, delta;
};

INLINE Saved saved_of(const Args& a, const Sequence& s, int h, int i) {
  const i64 at = s.b * a.lse_b + h * a.lse_h + s.q_row + most(least(i, s.rows - 1), 0);
  const float lse = a.lse[at];
  return Saved{lse == -infinity() ? infinity() : lse, a.delta[at]};
}

struct PairGradient {
  float p;        // after dropout, not yet divided by the kept share
  float d_logit;  // of the logit, which is what bias and slopes feel
  float ds;       // of scale q.k
};

template <bool kTest>
INLINE PairGradient pair_gradient(const Args& a, const Sequence& s, const Band& band, const Query& q, const Saved& row,
                                  int j, float raw, float dp) {
#pragma clang fp contract(off)
  const Logit x = logit(a, s, q, j, raw);
  float p = exp2_of((x.value - row.lse) * kLog2e);
  if (kTest) p = q.i < s.rows && visible(a, s, band, q, j) ? p : 0.0f;
  PairGradient g = {p, 0.0f, 0.0f};
#if DROPOUT
  const bool kept = survives(a, stream_of(a), q, j);
  g.p = kept ? p : 0.0f;
  dp = kept ? dp * a.inverse_keep : 0.0f;
#endif
  g.d_logit = p * (dp - row.delta);
  if (kTest) g.d_logit = p == 0.0f ? 0.0f : g.d_logit;  // what was not seen may have been NaN
  g.ds = g.d_logit;
#if SOFTCAP
  const float ratio = x.capped * a.inverse_cap;
  g.ds = g.d_logit * (1.0f - ratio * ratio);
#endif
  return g;
}
