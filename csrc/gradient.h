// The backward of one block and one tile of keys: p is rebuilt from lse, then turned into dS.
//
// Computes: p = e^(s - lse), ds = p * (dropout(dp) - delta), then the derivatives of the scores in reverse order; sums of
//   ds * distance for the slopes.
// Shapes: s and dp [key of the tile][lane]; lse and delta [lane].
// Invariants: s becomes dropout(p) and dp becomes dS with respect to scale * q.k (or to the final logits, where `raw` asks
//   for the gradient of the bias); both are 0 where the lane does not see the key, whatever v holds there.
// Mirror: backends/streaming.py, _backward_tile.
#pragma once

#include "softmax.h"

namespace attn::ATTN_TARGET {

template <class T>
struct GradientTile {
  T *s, *dp;           // [key][lane]
  long begin, end;
  const Int<T>* bits;  // null: every key is seen
  const T* factor;     // dropout; null: none
  const T *lse, *delta;
  T* slope_sum;        // [lane], adds -ds * distance; null: not wanted
  bool raw;            // dp is dS of the final logits
  ScoreArgs<T> scores;
};

template <class T, int V, class S, bool kMasked>
void gradient_tile(const GradientTile<T>& given) {
  const GradientTile<T> t = given;
  constexpr int L = kLanes<T>, W = V * L;
  Vec<T> lse[V], delta[V], slope[V];
  ATTN_UNROLL
  for (int v = 0; v < V; ++v) {
    lse[v] = load(t.lse + v * L);
    delta[v] = load(t.delta + v * L);
    slope[v] = Vec<T>{};
  }
  for (long j = t.begin; j < t.end; ++j) {
    Vec<T> p[V], y[V][3];
    ATTN_UNROLL
    for (int v = 0; v < V; ++v) {
      p[v] = load(t.s + j * W + v * L);
      if constexpr (S::kAny) p[v] = S::template value<T>(p[v], t.scores, j, W, v * L, y[v]);
      p[v] = p[v] - lse[v];
    }
    exp2_each<T, V>(p, kLog2e<T>);
    ATTN_UNROLL
    for (int v = 0; v < V; ++v) {
      const long at = j * W + v * L;
      if constexpr (kMasked) p[v] = zero_unless<T>(seen<T>(t.bits, j, W, v * L), p[v]);
      Vec<T> dp = load(t.dp + at), kept = p[v];
      if (t.factor) {
        const Vec<T> factor = load(t.factor + at);
        dp = dp * factor;
        kept = kept * factor;
      }
      Vec<T> ds = p[v] * (dp - delta[v]);
      if constexpr (kMasked) ds = zero_unless<T>(seen<T>(t.bits, j, W, v * L), ds);
      if constexpr (S::kAny) {
        if (t.slope_sum) slope[v] = slope[v] - ds * Alibi::distance<T>(t.scores, j, v * L);
        if (!t.raw) ds = S::template derivative<T>(ds, t.scores, y[v]);
      }
      store(t.s + at, kept);
      store(t.dp + at, ds);
    }
  }
  if constexpr (S::kAny)
    if (t.slope_sum) {
      ATTN_UNROLL
      for (int v = 0; v < V; ++v) store(t.slope_sum + v * L, load(t.slope_sum + v * L) + slope[v]);
    }
}

}  // namespace attn::ATTN_TARGET
