// Products of bf16 in AMX: sixteen rows by sixteen lanes, thirty-two deep, sums in fp32.
//
// Computes: S^T = K Q^T of bf16 operands, exact products; O^T = V^T P^T with each weight as a sum of two bf16 numbers,
//   hi + lo, that is off by at most 2^-17 of it.
// Shapes: a square is 1 KiB, [16][16 pairs of bf16]. Left operands are rows with neighbouring channels (K) or keys (V^T) as
//   pairs, right operands [pair][lane] (Q^T, P^T). Squares: K [key / 16][step], Q [block][vector][step], V [channel / 16]
//   [key / 32], P [vector][key / 32]; a step is 32 channels, the last one padded with zeros.
// Invariants: the unit takes denormals for zeros, and 0 * inf is NaN in a padded or split product: a tile of keys or a block
//   of queries that holds numbers below 2^-95, infinities or NaN is left to the fp32 products. Blocks and tiles start where
//   the problem says, so that this never depends on the threads.
// The assembler statements carry a memory clobber, which the compiler's own intrinsics lack: it would move stores of
//   operands past the loads of tiles.
#pragma once

#include "plan.h"
#include "tile.h"

namespace attn::ATTN_TARGET {

inline constexpr long kSquare = 16, kDepth = 32;         // rows or lanes; bf16 numbers of a row
inline constexpr long kSquareWords = kSquare * kSquare;  // 32-bit pairs
inline constexpr long kKeySteps = kTileKeys / kDepth;
static_assert(kLanes<float> == kSquare && kMaxVecs == 3 && kTileKeys % kDepth == 0);

// tile registers hold sums in 0 to 2, the left operand in 3, right operands in 4 to 6
inline constexpr int kLeft = 3, kRight = 4;

template <int kRegister>
ATTN_INLINE void load_square(const void* p, long stride = 4 * kSquare) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kRegister) : "memory");
}
template <int kRegister>
ATTN_INLINE void store_square(void* p, long stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(kRegister) : "memory");
}
template <int kRegister>
ATTN_INLINE void clear_square() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kRegister));
}
template <int kSum, int kA, int kB>
ATTN_INLINE void multiply_squares() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
}

// calls f with Number<0> to Number<V - 1>
template <int V, class F>
ATTN_INLINE void each_vector(F&& f) {
  f(Number<0>{});
  if constexpr (V > 1) f(Number<1>{});
  if constexpr (V > 2) f(Number<2>{});
}

// the thread's tile registers, all of them whole squares
class SquareRegisters {
 public:
  SquareRegisters() {
    alignas(64) uint8_t shape[64] = {1};  // palette
    for (int each = 0; each < 8; ++each) {
      shape[16 + 2 * each] = 4 * kSquare;  // bytes of a row
      shape[48 + each] = kSquare;          // rows
    }
    asm volatile("ldtilecfg (%0)" ::"r"(shape) : "memory");
  }
  SquareRegisters(const SquareRegisters&) = delete;
  SquareRegisters& operator=(const SquareRegisters&) = delete;
  ~SquareRegisters() { asm volatile("tilerelease"); }
};

// sixteen keys against V vectors of lanes
template <int V>
ATTN_INLINE void multiply_keys(const uint32_t* k, const uint32_t* q, long steps, float* s) {
  each_vector<V>([](auto v) { clear_square<v.value>(); });
  for (long step = 0; step < steps; ++step) {
    load_square<kLeft>(k + step * kSquareWords);
    each_vector<V>([&](auto v) {
      load_square<kRight + v.value>(q + (v.value * steps + step) * kSquareWords);
      multiply_squares<v.value, kLeft, kRight + v.value>();
    });
  }
  each_vector<V>([&](auto v) { store_square<v.value>(s + v.value * kSquare, V * 4 * kSquare); });
}

// sixteen channels: o[channel][lane] += values^T (hi + lo) over key steps [begin, end)
template <int V>
ATTN_INLINE void multiply_values(const uint32_t* values, const uint32_t* hi, const uint32_t* lo, long begin, long end, float* o) {
  each_vector<V>([&](auto v) { load_square<v.value>(o + v.value * kSquare, V * 4 * kSquare); });
  for (long step = begin; step < end; ++step) {
    load_square<kLeft>(values + step * kSquareWords);
    for (const uint32_t* part : {hi, lo})
      each_vector<V>([&](auto v) {
        load_square<kRight + v.value>(part + (v.value * kKeySteps + step) * kSquareWords);
        multiply_squares<v.value, kLeft, kRight + v.value>();
      });
  }
  each_vector<V>([&](auto v) { store_square<v.value>(o + v.value * kSquare, V * 4 * kSquare); });
}

// weights of two neighbouring keys as pairs: to nearest, then what is left to nearest. A NaN may be lost here: it is in the
// sum of the row
ATTN_INLINE void split_pair(Vec<float> first, Vec<float> second, uint32_t* hi, uint32_t* lo) {
  constexpr uint32_t kHalf = 0x8000u, kUpper = 0xffff0000u;
  const UVec a = ((UVec)first + kHalf) & kUpper, b = ((UVec)second + kHalf) & kUpper;
  const UVec c = (UVec)(first - (Vec<float>)a) + kHalf, d = (UVec)(second - (Vec<float>)b) + kHalf;
  *reinterpret_cast<UVec*>(hi) = a >> 16 | b;
  *reinterpret_cast<UVec*>(lo) = c >> 16 | (d & kUpper);
}

// place of the pair of keys (key, key + 1) of a vector of lanes in P
ATTN_INLINE long pair_at(long vector, long key) {
  return (vector * kKeySteps + key / kDepth) * kSquareWords + key % kDepth / 2 * kSquare;
}

// does every number have an exponent that the unit multiplies exactly?
inline bool fits(const uint16_t* row, long padded) {
  typedef uint16_t Words __attribute__((vector_size(kBytes), may_alias));
  constexpr uint16_t kLeast = 32u << 7, kInfinite = 0x7f80;
  Words bad{};
  for (long x = 0; x < padded; x += kDepth) {
    const Words magnitude = *reinterpret_cast<const Words*>(row + x) & uint16_t(0x7fff);
    bad |= (Words)(magnitude != 0) & (Words)((magnitude - kLeast) >= uint16_t(kInfinite - kLeast));
  }
  Words none{};
  return std::memcmp(&bad, &none, sizeof bad) == 0;
}

// sixteen keys of a block that waits: scores to the two parts of their weights. Not inlined: see `exponentials`
__attribute__((noinline)) inline void split_exponentials(const float* s, float scale, const float* shift, float* sum, long key,
                                                         uint32_t* hi, uint32_t* lo) {
  constexpr int L = kLanes<float>, V = kMaxVecs, W = V * L;
  const Vec<float> by = splat<float>(scale);
  ATTN_UNROLL
  for (int v = 0; v < V; ++v) {
    const Vec<float> point = load(shift + v * L);
    Vec<float> total = load(sum + v * L);
    for (int j = 0; j < kSquare; j += 4) {
      const float* at = s + (key + j) * W + v * L;
      Vec<float> p[4];
      ATTN_UNROLL
      for (int n = 0; n < 4; ++n) p[n] = load(at + n * W) * by - point;
      exp2_each<float, 4>(p, kLog2e<float>);
      ATTN_UNROLL
      for (int n = 0; n < 4; n += 2) {
        const long to = pair_at(v, key + j + n);
        split_pair(p[n], p[n + 1], hi + to, lo + to);
      }
      ATTN_UNROLL
      for (int n = 0; n < 4; ++n) total = total + p[n];
    }
    store(sum + v * L, total);
  }
}

// the operands of a row tile and of the tile of keys at hand, and the products
struct Amx {
  long steps, value_groups, unfit_queries;
  float scale;
  uint32_t *q, *k, *v, *hi, *lo;
  uint16_t* rows;  // four rows, padded
  bool* fit;       // per block

  void allocate(const Args& a, long tile_rows, Arena& arena) {
    steps = round_up(a.D, kDepth) / kDepth;
    value_groups = round_up(a.Dv, kSquare) / kSquare;
    scale = float(a.scale);
    q = arena.take<uint32_t>(round_up(tile_rows, kBlock<float>) / kSquare * steps * kSquareWords);
    k = arena.take<uint32_t>(kTileKeys / kSquare * steps * kSquareWords);
    v = arena.take<uint32_t>(value_groups * kKeySteps * kSquareWords);
    hi = arena.take<uint32_t>(kMaxVecs * kKeySteps * kSquareWords);
    lo = arena.take<uint32_t>(kMaxVecs * kKeySteps * kSquareWords);
    rows = arena.take<uint16_t>(8 * max_of(steps * kDepth, value_groups * kSquare + kDepth));
    fit = arena.take<bool>(kMaxBlocks<float>);
    unfit_queries = 0;
  }

  // products come before the scale: where that could leave the range of fp32, or be zero times infinity, they are not made here
  bool scale_fits() const { return __builtin_fabsf(scale) > 0x1p-40f && __builtin_fabsf(scale) < 0x1p40f; }

  const uint32_t* queries(long first) const { return q + first / kSquare * steps * kSquareWords; }

  // queries of a block as right operands
  void load_queries(long index, const Block& block, const bf16* const* from, long stride, long D) {
    const long padded = steps * kDepth;
    uint32_t* to = q + block.first / kSquare * steps * kSquareWords;
    fit[index] = scale_fits();
    for (long r = 0; r < block.vecs * kSquare; r += 4) {
      const float* quad[4];
      for (long u = 0; u < 4; ++u) {
        uint16_t* row = rows + u * padded;
        fit[index] &= copy_row(r + u < block.lanes ? from[r + u] : nullptr, stride, D, padded, row);
        quad[u] = reinterpret_cast<const float*>(row);
      }
      // words are moved, not computed with
      interleave4(quad, padded / 2, reinterpret_cast<float*>(to + r / kSquare * steps * kSquareWords + r % kSquare), kSquare);
    }
    unfit_queries += !fit[index];
  }

  // false: the tile is for the fp32 products
  bool load_tile(const bf16* const* krow, long key_stride, long D, const bf16* const* vrow, long value_stride, long Dv, long keys) {
    return load_keys(krow, key_stride, D, keys) && load_values(vrow, value_stride, Dv, keys);
  }

  void scores(int vecs, const uint32_t* queries, Range range, float* s) const {
    const auto all = [&](auto width) {
      constexpr int V = width.value, W = V * kLanes<float>;
      const Vec<float> by = splat<float>(scale);
      for (long j = range.begin / kSquare * kSquare; j < range.end; j += kSquare)
        multiply_keys<V>(k + j * steps * kSquare, queries, steps, s + j * W);
      for (float* at = s + range.begin * W; at < s + range.end * W; at += kLanes<float>) store(at, load(at) * by);
    };
    vecs == 3 ? all(Number<3>{}) : vecs == 2 ? all(Number<2>{}) : all(Number<1>{});
  }

  // O = O * alpha + V^T P^T; p [key][lane]
  void values(int vecs, Range range, const float* p, const float* alpha, float* o) const {
    split(vecs, range, p);
    add(vecs, range, alpha, o);
  }

  // scores, not scaled yet, of a whole tile and a block of full width, and the max of the scaled ones joined to top; meanwhile
  // the weights of the block before, if one waits
  void scores_beside(const uint32_t* queries, float* s, float* top, Waiting<float>& before) const {
    constexpr int V = kMaxVecs, L = kLanes<float>, W = V * L;
    Vec<float> most[V];
    ATTN_UNROLL
    for (int n = 0; n < V; ++n) most[n] = -infinity<float>();
    for (long j = 0; j < kTileKeys; j += kSquare) {
      multiply_keys<V>(k + j * steps * kSquare, queries, steps, s + j * W);
      if (before.s) split_exponentials(before.s, scale, before.shift, before.sum, j, hi, lo);
      for (long at = j * W; at < (j + kSquare) * W; at += W) {
        ATTN_UNROLL
        for (int n = 0; n < V; ++n) most[n] = max_keep<float>(load(s + at + n * L), most[n]);
      }
    }
    ATTN_UNROLL
    for (int n = 0; n < V; ++n) store(top + n * L, max_keep<float>(most[n] * scale, load(top + n * L)));
  }
  void all_exponentials(Waiting<float>& w) const {
    for (long j = 0; j < kTileKeys; j += kSquare) split_exponentials(w.s, scale, w.shift, w.sum, j, hi, lo);
  }

  // O = O * alpha + V^T (hi + lo)
  void add(int vecs, Range range, const float* alpha, float* o) const {
    const auto all = [&](auto width) {
      constexpr int V = width.value, W = V * kLanes<float>;
      rescale<V>(alpha, o);
      for (long g = 0; g < value_groups; ++g)
        multiply_values<V>(v + g * kKeySteps * kSquareWords, hi, lo, range.begin / kDepth, (range.end + kDepth - 1) / kDepth,
                           o + g * kSquare * W);
    };
    vecs == 3 ? all(Number<3>{}) : vecs == 2 ? all(Number<2>{}) : all(Number<1>{});
  }

 private:
  // a row and zeros up to `padded`; null is a row of zeros. Do its numbers fit?
  static bool copy_row(const bf16* from, long stride, long n, long padded, uint16_t* to) {
    const long have = from ? n : 0;
    if (stride == sizeof(bf16))
      std::memcpy(to, from ? static_cast<const void*>(from) : to, size_t(have) * sizeof(bf16));
    else
      for (long x = 0; x < have; ++x) to[x] = read<uint16_t>(reinterpret_cast<const char*>(from) + x * stride);
    for (long x = have; x < padded; ++x) to[x] = 0;
    return fits(to, padded);
  }

  bool load_keys(const bf16* const* krow, long stride, long D, long keys) {
    bool fit_all = true;
    for (long j = 0; j < kTileKeys; ++j) {
      fit_all &= copy_row(j < keys ? krow[j] : nullptr, stride, D, steps * kDepth, rows);
      uint32_t* to = k + j / kSquare * steps * kSquareWords + j % kSquare * kSquare;
      for (long step = 0; step < steps; ++step)
        std::memcpy(to + step * kSquareWords, rows + step * kDepth, kDepth * sizeof(uint16_t));
    }
    return fit_all;
  }

  // two keys a pair, four pairs a time
  bool load_values(const bf16* const* vrow, long stride, long Dv, long keys) {
    const long padded = round_up(value_groups * kSquare, kDepth);
    bool fit_all = true;
    for (long j = 0; j < kTileKeys; j += 8) {
      for (long u = 0; u < 8; ++u)
        fit_all &= copy_row(j + u < keys ? vrow[j + u] : nullptr, stride, Dv, padded, rows + u * padded);
      for (long g = 0; g < value_groups; ++g) {
        float words[4][kSquare];
        const float* quad[4] = {words[0], words[1], words[2], words[3]};
        for (long u = 0; u < 4; ++u) {
          const uint16_t* pair = rows + 2 * u * padded + g * kSquare;
          const UVec low = (UVec)widen_bf16(*(const HalfVec*)pair), high = (UVec)widen_bf16(*(const HalfVec*)(pair + padded));
          store(words[u], (Vec<float>)(low >> 16 | high));
        }
        uint32_t* to = v + (g * kKeySteps + j / kDepth) * kSquareWords + j % kDepth / 2;
        interleave4(quad, kSquare, reinterpret_cast<float*>(to), kSquare);
      }
    }
    return fit_all;
  }

  void split(int vecs, Range range, const float* p) const {
    const long W = vecs * kLanes<float>, end = round_up(range.end, kDepth);
    for (long n = 0; n < vecs; ++n)
      for (long j = range.begin / kDepth * kDepth; j < end; j += 2) {
        const bool in = j >= range.begin && j < range.end;  // both ends are multiples of kPanel
        const float* at = p + j * W + n * kLanes<float>;
        const long to = pair_at(n, j);
        split_pair(in ? load(at) : Vec<float>{}, in ? load(at + W) : Vec<float>{}, hi + to, lo + to);
      }
  }

  // most tiles leave the max where it was: times one, which changes no bit, is left out
  template <int V>
  void rescale(const float* alpha, float* o) const {
    constexpr int L = kLanes<float>, W = V * L;
    Vec<float> by[V];
    IVec<float> moved{};
    ATTN_UNROLL
    for (int n = 0; n < V; ++n) {
      by[n] = load(alpha + n * L);
      moved |= by[n] != 1.0f;
    }
    const IVec<float> none{};
    if (std::memcmp(&moved, &none, sizeof moved) == 0) return;
    for (float* at = o; at < o + value_groups * kSquare * W; at += W) {
      ATTN_UNROLL
      for (int n = 0; n < V; ++n) store(at + n * L, load(at + n * L) * by[n]);
    }
  }
};

}  // namespace attn::ATTN_TARGET
