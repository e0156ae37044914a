// Definitions of blocks.h; included by one source file per accumulator type.
#pragma once

#include "blocks.h"

namespace attn::ATTN_TARGET {

// calls f with V as a compile-time constant, for the widths that a block may have
template <class T, class F>
ATTN_INLINE void with_vecs(int vecs, F&& f) {
  if constexpr (kMaxVecs >= 4)
    if (vecs == 4) return f(Number<4>{});
  if constexpr (kMaxVecs >= 3 && 3 * kLanes<T> % 4 == 0)
    if (vecs == 3) return f(Number<3>{});
  if constexpr (kMaxVecs >= 2)
    if (vecs == 2) return f(Number<2>{});
  if constexpr (kLanes<T> % 4 == 0)
    if (vecs == 1) return f(Number<1>{});
}

template <class T>
void Blocks<T>::scores(int vecs, KeySide<T> keys, long n, const T* b, Range range, T* s) {
  with_vecs<T>(vecs, [&](auto v) {
    constexpr int V = v.value, W = V * kLanes<T>;
    if (keys.row)
      for (long j = range.begin; j < range.end; j += kPanel)
        product_store<T, V, false>(keys.data + j * keys.row, keys.row, b, n, s + j * W);
    else
      for (long j = range.begin; j < range.end; j += kPanel)
        product_store<T, V, true>(keys.data + j * n, 0, b, n, s + j * W);
  });
}

// one panel of keys against a full block: scores stored, their max joined to top
template <class T, bool kPanelA>
ATTN_INLINE void panel_and_max(const T* a, long row, const T* b, long n, T* s, T* top) {
  constexpr int V = kMaxVecs, L = kLanes<T>;
  Micro<T, kPanel, V, kPanelA> m;
  m.whole(a, b, n, row, V * L);
  ATTN_UNROLL
  for (int r = 0; r < kPanel; ++r) {
    ATTN_UNROLL
    for (int v = 0; v < V; ++v) store(s + (r * V + v) * L, m.acc[r][v]);
  }
  ATTN_UNROLL
  for (int v = 0; v < V; ++v) {
    Vec<T> most = load(top + v * L);
    ATTN_UNROLL
    for (int r = 0; r < kPanel; ++r) most = max_keep<T>(m.acc[r][v], most);
    store(top + v * L, most);
  }
}

template <class T, bool kPanelA>
ATTN_INLINE void tile_beside(KeySide<T> keys, long n, const T* b, T* s, T* top, const Waiting<T>& before, T* sum) {
  constexpr int W = kBlock<T>;
  T* waiting = before.s;
  for (long j = 0; j < kTileKeys; j += kPanel) {
    panel_and_max<T, kPanelA>(keys.data + j * (kPanelA ? n : keys.row), keys.row, b, n, s + j * W, top);
    if (waiting) exponentials<T>(waiting + j * W, before.shift, sum);
  }
}

template <class T>
void Blocks<T>::scores_beside(KeySide<T> keys, long n, const T* b, T* s, T* top, const Waiting<T>& before, T* sum) {
  if (keys.row)
    tile_beside<T, false>(keys, n, b, s, top, before, sum);
  else
    tile_beside<T, true>(keys, n, b, s, top, before, sum);
}

template <class T>
void Blocks<T>::all_exponentials(Waiting<T>& w) {
  for (long j = 0; j < kTileKeys; j += kPanel) exponentials<T>(w.s + j * kBlock<T>, w.shift, w.sum);
}

template <class T>
void Blocks<T>::values(int vecs, const T* panels, long channels, Range range, const T* p, const T* alpha, T* o) {
  with_vecs<T>(vecs, [&](auto v) {
    constexpr int V = v.value, W = V * kLanes<T>;
    for (long x = 0; x < channels; x += kPanel)
      product_rescale<T, V>(panels + x * kPanelKeys + range.begin * kPanel, p + range.begin * W,
                            range.end - range.begin, alpha, o + x * W);
  });
}

template <class T>
void Blocks<T>::add(int vecs, const T* panels, long channels, Range range, const T* p, T* o) {
  with_vecs<T>(vecs, [&](auto v) {
    constexpr int V = v.value, W = V * kLanes<T>;
    for (long x = 0; x < channels; x += kPanel)
      product_add<T, V>(panels + x * kPanelKeys + range.begin * kPanel, p + range.begin * W, range.end - range.begin,
                        o + x * W);
  });
}

template <class T>
void Blocks<T>::outer(const OuterBlock<T>* blocks, long count, Range range, const T* b, long rows, long channels, T* c,
                      long ldc) {
  const long vecs = channels / kLanes<T>;
  for (long v = 0, take; v < vecs; v += take) {
    take = panel_vecs(vecs - v);
    const T* panel = b + v * kLanes<T> * rows;
    const auto keys = [&](auto width) {
      for (long j = range.begin; j < range.end; j += kPanel)
        product_outer<T, width.value>(blocks, count, j, panel, c + j * ldc + v * kLanes<T>, ldc);
    };
    if (take == 1) keys(Number<1>{});
    if constexpr (kMaxVecs >= 2)
      if (take == 2) keys(Number<2>{});
    if constexpr (kMaxVecs >= 3)
      if (take == 3) keys(Number<3>{});
    if constexpr (kMaxVecs >= 4)
      if (take == 4) keys(Number<4>{});
  }
}

template <class T>
using SoftmaxFn = void (*)(const SoftmaxTile<T>&);

template <class T, int V, bool kMasked>
inline constexpr SoftmaxFn<T> kSoftmax[8] = {
    softmax_tile<T, V, Scores<>, kMasked>,
    softmax_tile<T, V, Scores<Softcap>, kMasked>,
    softmax_tile<T, V, Scores<Alibi>, kMasked>,
    softmax_tile<T, V, Scores<Softcap, Alibi>, kMasked>,
    softmax_tile<T, V, Scores<Bias>, kMasked>,
    softmax_tile<T, V, Scores<Softcap, Bias>, kMasked>,
    softmax_tile<T, V, Scores<Alibi, Bias>, kMasked>,
    softmax_tile<T, V, Scores<Softcap, Alibi, Bias>, kMasked>,
};

template <class T>
using GradientFn = void (*)(const GradientTile<T>&);

template <class T, int V, bool kMasked>
inline constexpr GradientFn<T> kGradient[8] = {
    gradient_tile<T, V, Scores<>, kMasked>,
    gradient_tile<T, V, Scores<Softcap>, kMasked>,
    gradient_tile<T, V, Scores<Alibi>, kMasked>,
    gradient_tile<T, V, Scores<Softcap, Alibi>, kMasked>,
    gradient_tile<T, V, Scores<Bias>, kMasked>,
    gradient_tile<T, V, Scores<Softcap, Bias>, kMasked>,
    gradient_tile<T, V, Scores<Alibi, Bias>, kMasked>,
    gradient_tile<T, V, Scores<Softcap, Alibi, Bias>, kMasked>,
};

template <class T>
void Blocks<T>::gradient(int vecs, ScoreKinds kinds, const GradientTile<T>& tile) {
  with_vecs<T>(vecs, [&](auto v) {
    constexpr int V = v.value;
    (tile.bits ? kGradient<T, V, true> : kGradient<T, V, false>)[kinds.index()](tile);
  });
}

template <class T>
void Blocks<T>::softmax(int vecs, ScoreKinds kinds, const SoftmaxTile<T>& tile) {
  with_vecs<T>(vecs, [&](auto v) {
    constexpr int V = v.value;
    (tile.bits ? kSoftmax<T, V, true> : kSoftmax<T, V, false>)[kinds.index()](tile);
  });
}

}  // namespace attn::ATTN_TARGET
