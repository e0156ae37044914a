// The online softmax of one block and one tile of keys; queries are lanes, so that max and sum need no shuffles.
//
// Computes: m_new = max(m, s), alpha = e^(m - m_new), p = e^(s - m_new), l = l * alpha + sum(p), p *= dropout.
// Shapes: s [key of the tile][lane], m, l, alpha [lane].
// Invariants: after a tile l = sum(p) and O = sum(p v), both relative to m; while m is -inf (no key seen) alpha and p
//   are 0, never NaN; a NaN score passes the max by and reaches its row through p.
// Mirror: backends/streaming.py, online_softmax.py.
#pragma once

#include "philox.h"
#include "scores.h"

namespace attn::ATTN_TARGET {

template <class T>
struct SoftmaxTile {
  T* s;                  // [key][lane]: scores in, probabilities out
  long begin, end;       // keys of the tile
  const Int<T>* bits;    // [word][lane]; null: every key is seen
  const T* factor;       // dropout, [key][lane]; null: none
  T *m, *l, *alpha;      // [lane]
  ScoreArgs<T> scores;
};

template <class T>
ATTN_INLINE Vec<T> infinity() {
  return splat<T>(T(__builtin_inf()));
}

// all ones where the lane sees the key
template <class T>
ATTN_INLINE IVec<T> seen(const Int<T>* bits, long key, long width, int lane) {
  const IVec<T> word = load_int<T>(bits + (key >> 5) * width + lane);
  return (word & Int<T>(int32_t(uint32_t(1) << (key & 31)))) != 0;
}

// final logits, and their running max
template <class T, int V, class S, bool kMasked>
ATTN_INLINE void logits_and_max(const SoftmaxTile<T>& t, Vec<T>* top) {
  constexpr int L = kLanes<T>, W = V * L;
  for (long j = t.begin; j < t.end; ++j) {
    T* row = t.s + j * W;
    ATTN_UNROLL
    for (int v = 0; v < V; ++v) {
      Vec<T> s = load(row + v * L);
      if constexpr (S::kAny) {
        Vec<T> y[3];
        s = S::template value<T>(s, t.scores, j, W, v * L, y);
      }
      if constexpr (kMasked) s = select<T>(seen<T>(t.bits, j, W, v * L), s, -infinity<T>());
      if constexpr (S::kAny || kMasked) store(row + v * L, s);
      top[v] = max_keep<T>(s, top[v]);
    }
  }
}

template <class T, int V, class S, bool kMasked>
void softmax_tile(const SoftmaxTile<T>& given) {
  const SoftmaxTile<T> t = given;  // a local copy: stores through vector types may alias what they are read from
  constexpr int L = kLanes<T>, W = V * L;
  Vec<T> top[V], shift[V];
  ATTN_UNROLL
  for (int v = 0; v < V; ++v) top[v] = load(t.m + v * L);
  logits_and_max<T, V, S, kMasked>(t, top);
  ATTN_UNROLL
  for (int v = 0; v < V; ++v) {
    shift[v] = select<T>(top[v] == -infinity<T>(), Vec<T>{}, top[v]);
    store(t.alpha + v * L, exp_of<T>(load(t.m + v * L) - shift[v]));
    store(t.m + v * L, top[v]);
  }
  ATTN_UNROLL
  for (int v = 0; v < V; ++v) {
    // one column of vectors at a time, four keys together: all of it stays in registers
    const Vec<T> point = shift[v];
    Vec<T> sum{};
    for (long j = t.begin; j < t.end; j += 4) {
      T* at = t.s + j * W + v * L;
      Vec<T> p[4];
      ATTN_UNROLL
      for (int n = 0; n < 4; ++n) p[n] = load(at + n * W) - point;
      exp2_each<T, 4>(p, kLog2e<T>);
      ATTN_UNROLL
      for (int n = 0; n < 4; ++n) store(at + n * W, p[n]);
      // key by key, as the products sum: an average of equal values is then that value exactly
      ATTN_UNROLL
      for (int n = 0; n < 4; ++n) sum = sum + p[n];
    }
    store(t.l + v * L, fma<T>(load(t.l + v * L), load(t.alpha + v * L), sum));
  }
  if (t.factor)
    for (long x = t.begin * W; x < t.end * W; x += L) store(t.s + x, load(t.s + x) * load(t.factor + x));
}

// A tile without modifiers, mask and dropout whose exponentials wait for the products of the next block: they run between
// its panels, where a chain of multiply-adds ends and the next one starts and the pipes would be half empty. The bits are
// those of softmax_tile.
template <class T>
struct Waiting {
  T* s = nullptr;  // null: nothing waits
  T alpha[kBlock<T>], shift[kBlock<T>], sum[kBlock<T>];
};

// the running max takes in `top`, the max of the tile's scores
template <class T>
inline void open_waiting(Waiting<T>& w, T* s, const T* top, T* m) {
  w.s = s;
  for (int r = 0; r < kBlock<T>; r += kLanes<T>) {
    const Vec<T> before = load(m + r), now = load(top + r), shift = select<T>(now == -infinity<T>(), Vec<T>{}, now);
    store(w.shift + r, shift);
    store(w.alpha + r, exp_of<T>(before - shift));
    store(w.sum + r, Vec<T>{});
    store(m + r, now);
  }
}

// probabilities of one panel of keys. Not inlined: the compiler would keep its constants in registers that the products
// of the caller need
template <class T>
__attribute__((noinline)) void exponentials(T* s, const T* shift, T* sum) {
  constexpr int L = kLanes<T>, V = kMaxVecs, W = V * L;
  ATTN_UNROLL
  for (int v = 0; v < V; ++v) {
    const Vec<T> point = load(shift + v * L);
    Vec<T> total = load(sum + v * L);
    ATTN_UNROLL
    for (int j = 0; j < kPanel; j += 4) {
      T* at = s + j * W + v * L;
      Vec<T> p[4];
      ATTN_UNROLL
      for (int n = 0; n < 4; ++n) p[n] = load(at + n * W) - point;
      exp2_each<T, 4>(p, kLog2e<T>);
      ATTN_UNROLL
      for (int n = 0; n < 4; ++n) store(at + n * W, p[n]);
      ATTN_UNROLL
      for (int n = 0; n < 4; ++n) total = total + p[n];
    }
    store(sum + v * L, total);
  }
}

template <class T>
inline void close_waiting(Waiting<T>& w, T* l) {
  for (int r = 0; r < kBlock<T>; r += kLanes<T>)
    store(l + r, fma<T>(load(l + r), load(w.alpha + r), load(w.sum + r)));
  w.s = nullptr;
}

}  // namespace attn::ATTN_TARGET
