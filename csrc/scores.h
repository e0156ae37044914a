// How a score changes between q.k and the softmax: softcap, ALiBi, bias, always in that order.
//
// Each is a value and a derivative of one to three lines; `Scores<...>` applies a list of them by fold expression, the
// derivatives in reverse order and from the outputs. Mirror: backends/streaming.py, scores.py.
#pragma once

#include "rows.h"

namespace attn::ATTN_TARGET {

// tanh to 2 ulp: an odd polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel
ATTN_INLINE Vec<float> tanh_of(Vec<float> x) {
  const Vec<float> z = x * x, size = abs_of<float>(x);
  Vec<float> q = splat(-0.00570498712f);
  q = fma<float>(q, z, splat(0.0206390873f));
  q = fma<float>(q, z, splat(-0.0537397151f));
  q = fma<float>(q, z, splat(0.133314422f));
  q = fma<float>(q, z, splat(-0.333332819f));
  const Vec<float> near = fma<float>(q * z, x, x);
  const Vec<float> capped = size > 10.0f ? splat(10.0f) : size;  // tanh(10) is 1 in fp32; keeps NaN
  const Vec<float> far = 1.0f - 2.0f / (exp2<float>(capped * (2.0f * kLog2e<float>)) + 1.0f);
  const IVec<float> sign = (IVec<float>)x & INT32_MIN;
  return size < 0.625f ? near : (Vec<float>)((IVec<float>)far | sign);
}
ATTN_INLINE Vec<double> tanh_of(Vec<double> x) {
  for (int u = 0; u < kLanes<double>; ++u) x[u] = __builtin_tanh(x[u]);
  return x;
}

// what the scores read, for one block and one tile of keys
template <class T>
struct ScoreArgs {
  T cap, inverse_cap;
  const T* slope;     // [lane]
  const Int<T>* pos;  // [lane]
  const T* bias;      // [key of the tile][lane]
  long t0;
};

struct Softcap {
  template <class T>
  static ATTN_INLINE Vec<T> value(Vec<T> s, const ScoreArgs<T>& a, long, long, int) {
    return a.cap * tanh_of(s * a.inverse_cap);
  }
  template <class T>
  static ATTN_INLINE Vec<T> derivative(Vec<T> ds, Vec<T> y, const ScoreArgs<T>& a) {
    const Vec<T> t = y * a.inverse_cap;
    return ds * (T(1) - t * t);
  }
};
struct Alibi {
  template <class T>
  static ATTN_INLINE Vec<T> distance(const ScoreArgs<T>& a, long key, int lane) {
    const IVec<T> d = load_int<T>(a.pos + lane) - Int<T>(a.t0 + key);
    return __builtin_convertvector(d < 0 ? -d : d, Vec<T>);
  }
  template <class T>
  static ATTN_INLINE Vec<T> value(Vec<T> s, const ScoreArgs<T>& a, long key, long, int lane) {
    return s - load(a.slope + lane) * distance(a, key, lane);
  }
  template <class T>
  static ATTN_INLINE Vec<T> derivative(Vec<T> ds, Vec<T>, const ScoreArgs<T>&) {
    return ds;
  }
};
struct Bias {
  template <class T>
  static ATTN_INLINE Vec<T> value(Vec<T> s, const ScoreArgs<T>& a, long key, long width, int lane) {
    return s + load(a.bias + key * width + lane);
  }
  template <class T>
  static ATTN_INLINE Vec<T> derivative(Vec<T> ds, Vec<T>, const ScoreArgs<T>&) {
    return ds;
  }
};

// y[n] keeps the output of the n-th score for the way back
template <class... S>
struct Scores {
  static constexpr bool kAny = sizeof...(S) > 0;
  template <class T>
  static ATTN_INLINE Vec<T> value(Vec<T> s, const ScoreArgs<T>& a, long key, long width, int lane, Vec<T>* y) {
    int n = 0;
    ((y[n++] = s = S::template value<T>(s, a, key, width, lane)), ...);
    return s;
  }
  template <class T>
  static ATTN_INLINE Vec<T> derivative(Vec<T> ds, const ScoreArgs<T>& a, const Vec<T>* y) {
    return reversed<T, S...>(ds, a, y);
  }

 private:
  template <class T>
  static ATTN_INLINE Vec<T> reversed(Vec<T> ds, const ScoreArgs<T>&, const Vec<T>*) {
    return ds;
  }
  template <class T, class First, class... Rest>
  static ATTN_INLINE Vec<T> reversed(Vec<T> ds, const ScoreArgs<T>& a, const Vec<T>* y) {
    return First::template derivative<T>(reversed<T, Rest...>(ds, a, y + 1), y[0], a);
  }
};

}  // namespace attn::ATTN_TARGET
