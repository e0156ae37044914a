// What a block needs beside the products before its scores become probabilities: mask bits, bias, dropout factors.
#pragma once

#include "blocks.h"

namespace attn::ATTN_TARGET {

// hands out aligned pieces of a thread's scratch; with a null base it only measures
struct Arena {
  char* base;
  size_t used = 0;
  template <class U>
  U* take(long count) {
    U* p = reinterpret_cast<U*>(base + used);
    used += (size_t(count) * sizeof(U) + 63) / 64 * 64;
    return p;
  }
};

// bias[key][lane] of one block for keys [range.begin, range.end) of the tile at t0, `keys` of which exist
template <class In>
inline void bias_tile(const Args& a, const Lanes<Acc<In>>& t, const Block& block, long t0, Range range, long keys,
                      Acc<In>* out, Acc<In>* scratch) {
  using T = Acc<In>;
  const int width = block.vecs * kLanes<T>;
  const long begin = range.begin, count = min_of(range.end, keys) - begin, stride = a.bias.s[3];
  const auto copy = [&](auto tag) {
    using Stored = decltype(tag);
    const Stored* rows[kBlock<T>];
    for (int r = 0; r < width; ++r) {
      const char* p = r < block.lanes ? t.bias[block.first + r] : nullptr;
      rows[r] = p ? reinterpret_cast<const Stored*>(p + (t0 + begin) * stride) : nullptr;
    }
    for (int r = 0; r < width; r += 4) {
      const T* quad[4];
      for (int u = 0; u < 4; ++u) {
        T* to = scratch + u * kTileKeys;
        quad[u] = to;
        if (!rows[r + u])
          std::memset(to, 0, size_t(count) * sizeof(T));
        else if constexpr (sizeof(Acc<Stored>) == sizeof(T))
          widen_row(rows[r + u], stride, count, to);
        else
          for (long x = 0; x < count; ++x) to[x] = T(read<Stored>(reinterpret_cast<const char*>(rows[r + u]) + x * stride));
      }
      interleave4(quad, count, out + begin * width + r, width);
    }
  };
  if (a.bias_dtype == a.dtype)
    copy(In{});
  else
    copy(float{});
  // keys past the end are masked; their bias only has to be finite
  if (range.end > begin + count)
    std::memset(out + (begin + count) * width, 0, size_t((range.end - begin - count) * width) * sizeof(T));
}

template <class In>
inline Acc<In> sink_at(const Args& a, long h) {
  const char* at = a.sink.data + h * a.sink.s[0];
  return a.sink_dtype == a.dtype ? load_one(reinterpret_cast<const In*>(at)) : Acc<In>(read<float>(at));
}

template <class T>
struct Prepared {
  const Int<T>* bits;  // null: nothing is masked
  const T* factor;     // null: no dropout
  ScoreArgs<T> scores;
};

template <class In>
struct TileInputs {
  using T = Acc<In>;
  ScoreKinds kinds;
  Dropout drop;
  T *bias, *factor, *rowbuf;
  Int<T>* bits;

  void allocate(const Args& a, Arena& arena, T* shared_rowbuf) {
    constexpr long W = kBlock<T>;
    kinds = score_kinds(a);
    drop = dropout_of(a);
    bits = arena.take<Int<T>>(kWords * W);
    bias = arena.take<T>(kinds.bias ? kTileKeys * W : 0);
    factor = arena.take<T>(a.dropout_p > 0 ? kTileKeys * W : 0);
    rowbuf = shared_rowbuf;
  }

  Prepared<T> prepare(const Args& a, const Sequence& seq, const Lanes<T>& lanes, const Block& block, long t0, long keys,
                      Range range) {
    Prepared<T> out{nullptr, nullptr, {}};
    if (range.masked) {
      mask_bits(a, lanes, block, t0, range, keys, bits);
      out.bits = bits;
    }
    if (a.dropout_p > 0) {
      dropout_factors(a, drop, lanes, block, seq.b, t0, range, factor);
      out.factor = factor;
    }
    if (kinds.bias) bias_tile<In>(a, lanes, block, t0, range, keys, bias, rowbuf);
    if (kinds.any())
      out.scores = {T(a.softcap), T(1 / a.softcap), lanes.slope + block.first, lanes.pos + block.first, bias, t0};
    return out;
  }
};

}  // namespace attn::ATTN_TARGET
