// Products of bf16 in AMX: sixteen rows by sixteen lanes, thirty-two deep, sums in fp32.
//
// Computes: S^T = K Q^T of bf16 operands, exact products; O^T = V^T P^T with each weight as a sum of two bf16 numbers,
//   hi + lo, that is off by at most 2^-16 of it.
// Shapes: a square is 1 KiB, [16][16 pairs of bf16]. Left operands are rows with neighbouring channels (K) or keys (V^T) as
//   pairs, right operands [pair][lane] (Q^T, P^T). Squares: K [key / 16][step], Q [block][vector][step], V [channel / 16]
//   [key / 32], P [vector][key / 32]; a step is 32 channels, the last one padded with zeros.
// Invariants: the unit takes denormals for zeros, and the scale comes after the product: a tile of keys or a block of queries
//   that holds numbers below 2^-95, or finite ones from 2^58 on, is left to the fp32 products. Blocks and tiles start where the
//   problem says, so that this never depends on the threads. hi and lo times an infinity could be NaN where the weight times it
//   is not: infinities and NaN among the values are taken out and added with the whole weight, so that the rows which do not
//   see them keep their bits.
// The assembler statements carry a memory clobber, which the compiler's own intrinsics lack: it would move stores of
//   operands past the loads of tiles.
#pragma once

#include "plan.h"
#include "tile.h"

namespace attn::ATTN_TARGET {

inline constexpr long kSquare = 16, kDepth = 32;         // rows or lanes; bf16 numbers of a row
inline constexpr long kSquareWords = kSquare * kSquare;  // 32-bit pairs
inline constexpr long kKeySteps = kTileKeys / kDepth;
static_assert(kLanes<float> == kSquare && kMaxVecs == 3 && kTileKeys % kDepth == 0 && kTileKeys % 64 == 0);

// tile registers: sums in 0 to 3, operands in 5 to 7
inline constexpr int kSums = 4, kLeft = 5, kRight = 6, kOther = 7;
inline constexpr long kSpan = kSums * kSquare;  // keys whose scores, or channels whose sums, are made together

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

// calls f with Number<0> to Number<N - 1>
template <int N, class F>
ATTN_INLINE void each_number(F&& f) {
  f(Number<0>{});
  if constexpr (N > 1) f(Number<1>{});
  if constexpr (N > 2) f(Number<2>{});
  if constexpr (N > 3) f(Number<3>{});
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

// N times sixteen keys against one vector of lanes; `stride` in bytes between keys of s
template <int N>
ATTN_INLINE void multiply_keys(const uint32_t* k, const uint32_t* q, long steps, float* s, long stride) {
  each_number<N>([](auto n) { clear_square<n.value>(); });
  for (long step = 0; step < steps; ++step) {
    load_square<kRight>(q + step * kSquareWords);
    each_number<N>([&](auto n) {
      load_square<kLeft>(k + (n.value * steps + step) * kSquareWords);
      multiply_squares<n.value, kLeft, kRight>();
    });
  }
  each_number<N>([&](auto n) { store_square<n.value>(s + n.value * kSquare * stride / 4, stride); });
}

// the weights of one vector of lanes
struct Weights {
  uint32_t *hi, *lo;  // [step]
};

// N times sixteen channels of one vector: o[channel][lane] += values^T (hi + lo) over key steps [begin, end)
template <int N>
ATTN_INLINE void multiply_values(const uint32_t* values, Weights p, long begin, long end, float* o, long stride) {
  each_number<N>([&](auto n) { load_square<n.value>(o + n.value * kSquare * stride / 4, stride); });
  for (long step = begin; step < end; ++step) {
    load_square<kRight>(p.hi + step * kSquareWords);
    load_square<kOther>(p.lo + step * kSquareWords);
    each_number<N>([&](auto n) {
      load_square<kLeft>(values + (n.value * kKeySteps + step) * kSquareWords);
      multiply_squares<n.value, kLeft, kRight>();
      multiply_squares<n.value, kLeft, kOther>();
    });
  }
  each_number<N>([&](auto n) { store_square<n.value>(o + n.value * kSquare * stride / 4, stride); });
}

// weights of two neighbouring keys as pairs: their upper halves, then what is left, to nearest. A NaN may be lost here: it is
// in the sum of the row
ATTN_INLINE void split_pair(Vec<float> first, Vec<float> second, uint32_t* hi, uint32_t* lo) {
  constexpr uint32_t kHalf = 0x8000u, kUpper = 0xffff0000u;
  const UVec a = (UVec)first & kUpper, b = (UVec)second & kUpper;
  const UVec c = (UVec)(first - (Vec<float>)a) + kHalf, d = (UVec)(second - (Vec<float>)b) + kHalf;
  *reinterpret_cast<UVec*>(hi) = (UVec)first >> 16 | b;
  *reinterpret_cast<UVec*>(lo) = c >> 16 | (d & kUpper);
}

// place of the pair of keys (key, key + 1) in the weights of a vector
ATTN_INLINE long pair_at(long key) { return key / kDepth * kSquareWords + key % kDepth / 2 * kSquare; }

// bf16 numbers, and which of them are left to fp32 products, or are infinite or NaN, as ones
typedef uint16_t Halves __attribute__((vector_size(kBytes), may_alias));
inline constexpr uint16_t kMagnitude = 0x7fff, kInfinite = 0x7f80;
ATTN_INLINE Halves unfit(Halves x) {
  constexpr uint16_t kLeast = (127 - 95) << 7, kMost = (127 + 58) << 7;
  const Halves magnitude = x & kMagnitude;
  return (Halves)((magnitude - uint16_t(1)) < uint16_t(kLeast - 1)) | (Halves)((magnitude - kMost) < uint16_t(kInfinite - kMost));
}
ATTN_INLINE Halves wild(Halves x) { return (Halves)((x & kMagnitude) >= kInfinite); }
ATTN_INLINE bool any(Halves x) { return _mm512_test_epi32_mask((__m512i)x, (__m512i)x); }

// degree 5: relative error 1.1e-7, where the weights are cut to 2^-16
struct ShortExp2 : Exp2<float> {
  static constexpr float kPoly[] = {1.0f, 0.693147f, 0.24022242f, 0.055507336f, 0.009671513f, 0.0013264727f};
};

// a vector of lanes and a whole tile, whose scores wait for the products of the next vector
struct WaitingVector {
  float* s = nullptr;  // [key][lane], not scaled; null: nothing waits
  float *l, *o;
  Vec<float> shift, alpha, sum;
  bool far;  // is some shift so large that a product with one rounding could leave the max above zero by more than a little?
};

// kSpan keys of a vector that waits: scores to weights. Not inlined: see `exponentials`
template <bool kFar>
__attribute__((noinline)) void split_exponentials(WaitingVector& w, float scale, long key, Weights p) {
  constexpr int L = kLanes<float>;
  const Vec<float> by = splat<float>(scale), point = w.shift;
  const float* at = w.s + key * L;
  uint32_t *hi = p.hi + pair_at(key), *lo = p.lo + pair_at(key);  // whole steps lie one after the other
  Vec<float> total = w.sum;
  for (long j = 0; j < kSpan; j += 4) {
    Vec<float> x[4];
    ATTN_UNROLL
    for (int n = 0; n < 4; ++n) {
      const Vec<float> s = load(at + (j + n) * L);
      x[n] = kFar ? s * by - point : fma<float>(s, by, -point);
    }
    exp2_each<float, 4, ShortExp2>(x, kLog2e<float>);
    ATTN_UNROLL
    for (int n = 0; n < 4; n += 2) split_pair(x[n], x[n + 1], hi + (j + n) / 2 * L, lo + (j + n) / 2 * L);
    ATTN_UNROLL
    for (int n = 0; n < 4; ++n) total = total + x[n];
  }
  w.sum = total;
}

// the operands of a row tile and of the tile of keys at hand, and the products
struct Amx {
  long steps, value_groups, unfit_queries;
  float scale;
  uint32_t *q, *k, *v;
  Weights weights;
  float* both[2];  // scores of two vectors
  WaitingVector* waiting;
  uint16_t* rows;  // eight rows, padded
  Halves bad, not_finite;  // of the rows looked at
  bool any_wild;           // among the values of this tile
  uint16_t* wild_values;   // where one stands in v, else 0
  bool* fit;       // per block

  void allocate(const Args& a, long tile_rows, Arena& arena) {
    steps = round_up(a.D, kDepth) / kDepth;
    value_groups = round_up(a.Dv, kSquare) / kSquare;
    scale = float(a.scale);
    q = arena.take<uint32_t>(round_up(tile_rows, kBlock<float>) / kSquare * steps * kSquareWords);
    k = arena.take<uint32_t>(kTileKeys / kSquare * steps * kSquareWords);
    v = arena.take<uint32_t>(value_groups * kKeySteps * kSquareWords);
    wild_values = arena.take<uint16_t>(2 * value_groups * kKeySteps * kSquareWords);
    weights.hi = arena.take<uint32_t>(kKeySteps * kSquareWords);
    weights.lo = arena.take<uint32_t>(kKeySteps * kSquareWords);
    // half a page apart within their pages: a load waits for a store to the same place of another page
    constexpr long kApart = 2048 / sizeof(float);
    for (float*& each : both) each = arena.take<float>(kTileKeys * kLanes<float> + kApart);
    waiting = arena.take<WaitingVector>(1);
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
    bad = Halves{};
    for (long r = 0; r < block.vecs * kSquare; r += 4) {
      const float* quad[4];
      for (long u = 0; u < 4; ++u) {
        uint16_t* row = rows + u * padded;
        const uint16_t* whole = checked_row(r + u < block.lanes ? from[r + u] : nullptr, stride, D, padded, row);
        quad[u] = reinterpret_cast<const float*>(whole);
      }
      // words are moved, not computed with
      interleave4(quad, padded / 2, reinterpret_cast<float*>(to + r / kSquare * steps * kSquareWords + r % kSquare), kSquare);
    }
    fit[index] = scale_fits() && !any(bad);
    unfit_queries += !fit[index];
  }

  // false: the tile is for the fp32 products
  bool load_tile(const bf16* const* krow, long key_stride, long D, const bf16* const* vrow, long value_stride, long Dv, long keys) {
    bad = Halves{};
    load_keys(krow, key_stride, D, keys);
    not_finite = Halves{};
    load_values(vrow, value_stride, Dv, keys);
    any_wild = any(not_finite);
    if (any_wild) take_out();
    return !any(bad);
  }

  // nothing waits; the scratch may hold what another item left
  void start() { waiting->s = nullptr; }

  void scores(int vecs, const uint32_t* queries, Range range, float* s) const {
    constexpr int L = kLanes<float>;
    const long W = vecs * L;
    for (long n = 0; n < vecs; ++n)
      for (long j = range.begin / kSquare * kSquare; j < range.end; j += kSquare)
        multiply_keys<1>(k + j * steps * kSquare, queries + n * steps * kSquareWords, steps, s + j * W + n * L, 4 * W);
    const Vec<float> by = splat<float>(scale);
    for (float* at = s + range.begin * W; at < s + range.end * W; at += L) store(at, load(at) * by);
  }

  // O = O * alpha + V^T P^T; p [key][lane]
  void values(int vecs, Range range, const float* p, const float* alpha, float* o) const {
    constexpr int L = kLanes<float>;
    for (long n = 0; n < vecs; ++n) {
      split(vecs * L, range, p + n * L);
      rescale(load(alpha + n * L), o + n * L, vecs * L);
      add(range, o + n * L, vecs * L);
    }
  }

  // scores of a whole tile and a block of full width, vector by vector, each beside the exponentials of the one before, which
  // is finished then
  void overlap(const uint32_t* queries, float* m, float* l, float* o) {
    constexpr int L = kLanes<float>;
    for (long n = 0; n < kMaxVecs; ++n) {
      float* mine = waiting->s == both[0] ? both[1] : both[0];
      for (long j = 0; j < kTileKeys; j += kSpan) {
        multiply_keys<kSums>(k + j * steps * kSquare, queries + n * steps * kSquareWords, steps, mine + j * L, 4 * L);
        if (waiting->s) exponentials(j);
      }
      if (waiting->s) finish();
      open(mine, max_of_keys(mine) * scale, m + n * L, l + n * L, o + n * L);
    }
  }
  void settle() {
    if (!waiting->s) return;
    for (long j = 0; j < kTileKeys; j += kSpan) exponentials(j);
    finish();
  }

 private:
  // four chains, or each max would wait for the one before
  static Vec<float> max_of_keys(const float* s) {
    constexpr int L = kLanes<float>, kChains = 4;
    Vec<float> top[kChains];
    ATTN_UNROLL
    for (int n = 0; n < kChains; ++n) top[n] = -infinity<float>();
    for (long j = 0; j < kTileKeys; j += kChains) {
      ATTN_UNROLL
      for (int n = 0; n < kChains; ++n) top[n] = max_keep<float>(load(s + (j + n) * L), top[n]);
    }
    return max_keep<float>(max_keep<float>(top[0], top[1]), max_keep<float>(top[2], top[3]));
  }

  void exponentials(long key) {
    const auto run = waiting->far ? split_exponentials<true> : split_exponentials<false>;
    run(*waiting, scale, key, weights);
  }

  // the running max takes in `top`, the max of the tile's scores
  void open(float* s, Vec<float> top, float* m, float* l, float* o) {
    const Vec<float> before = load(m), now = max_keep<float>(top, before);
    const Vec<float> shift = select<float>(now == -infinity<float>(), Vec<float>{}, now);
    store(m, now);
    const bool far = _mm512_cmp_ps_mask((__m512)abs_of<float>(shift), _mm512_set1_ps(0x1p20f), _CMP_GE_OQ);
    *waiting = {s, l, o, shift, exp_of<float>(before - shift), Vec<float>{}, far};
  }

  void finish() {
    constexpr long W = kBlock<float>;
    rescale(waiting->alpha, waiting->o, W);
    add({0, kTileKeys, false}, waiting->o, W);
    store(waiting->l, fma<float>(load(waiting->l), waiting->alpha, waiting->sum));
    waiting->s = nullptr;
  }

  // O += V^T (hi + lo); O has `width` lanes, of which this is one vector
  void add(Range range, float* o, long width) const {
    const long begin = range.begin / kDepth, end = (range.end + kDepth - 1) / kDepth;
    for (long g = 0; g < value_groups; g += kSums) {
      const auto some = [&](auto n) {
        multiply_values<n.value>(v + g * kKeySteps * kSquareWords, weights, begin, end, o + g * kSquare * width, 4 * width);
      };
      const long left = value_groups - g;
      left >= 4 ? some(Number<4>{}) : left == 3 ? some(Number<3>{}) : left == 2 ? some(Number<2>{}) : some(Number<1>{});
    }
    if (any_wild) add_wild(range, o, width);
  }

  // infinities and NaN of the values
  void take_out() {
    uint16_t* values = reinterpret_cast<uint16_t*>(v);
    for (long x = 0; x < 2 * value_groups * kKeySteps * kSquareWords; ++x) {
      const bool out = (values[x] & kMagnitude) >= kInfinite;
      wild_values[x] = out ? values[x] : 0;
      if (out) values[x] = 0;
    }
  }
  void add_wild(Range range, float* o, long width) const {
    for (long x = 0; x < 2 * value_groups * kKeySteps * kSquareWords; ++x) {
      if (!wild_values[x]) continue;
      const long square = x / (2 * kSquareWords), row = x / kDepth % kSquare;
      const long key = square % kKeySteps * kDepth + x % kDepth, channel = square / kKeySteps * kSquare + row;
      if (key < range.begin || key >= range.end) continue;
      const float value = load_one(reinterpret_cast<const bf16*>(wild_values + x));
      const long at = pair_at(key);
      const Vec<float> weight = weight_of(weights.hi + at, key) + weight_of(weights.lo + at, key);
      store(o + channel * width, fma<float>(weight, splat<float>(value), load(o + channel * width)));
    }
  }
  static Vec<float> weight_of(const uint32_t* pair, long key) {
    UVec words;
    std::memcpy(&words, pair, sizeof words);
    return (Vec<float>)(key % 2 ? words & 0xffff0000u : words << 16);
  }

  // a row and zeros up to `padded`, a multiple of kDepth: itself or a copy; null is a row of zeros. Its numbers are looked at
  const uint16_t* checked_row(const bf16* from, long stride, long n, long padded, uint16_t* copy) {
    const uint16_t* row = reinterpret_cast<const uint16_t*>(from);
    if (!from || stride != sizeof(bf16) || n != padded) {
      const long have = from ? n : 0;
      if (stride == sizeof(bf16) && from)
        std::memcpy(copy, from, size_t(n) * sizeof(bf16));
      else
        for (long x = 0; x < have; ++x) copy[x] = read<uint16_t>(reinterpret_cast<const char*>(from) + x * stride);
      std::memset(copy + have, 0, size_t(padded - have) * sizeof(bf16));
      row = copy;
    }
    for (long x = 0; x < padded; x += kDepth) {
      Halves here;
      std::memcpy(&here, row + x, sizeof here);
      bad |= unfit(here);
      not_finite |= wild(here);
    }
    return row;
  }

  void load_keys(const bf16* const* krow, long stride, long D, long keys) {
    for (long j = 0; j < kTileKeys; ++j) {
      const uint16_t* row = checked_row(j < keys ? krow[j] : nullptr, stride, D, steps * kDepth, rows);
      uint32_t* to = k + j / kSquare * steps * kSquareWords + j % kSquare * kSquare;
      for (long step = 0; step < steps; ++step)
        std::memcpy(to + step * kSquareWords, row + step * kDepth, kDepth * sizeof(uint16_t));
    }
  }

  // two keys a pair, four pairs a time
  void load_values(const bf16* const* vrow, long stride, long Dv, long keys) {
    const long padded = round_up(value_groups * kSquare, kDepth);
    for (long j = 0; j < kTileKeys; j += 8) {
      const uint16_t* row[8];
      for (long u = 0; u < 8; ++u)
        row[u] = checked_row(j + u < keys ? vrow[j + u] : nullptr, stride, Dv, padded, rows + u * padded);
      for (long g = 0; g < value_groups; ++g) {
        float words[4][kSquare];
        const float* quad[4] = {words[0], words[1], words[2], words[3]};
        for (long u = 0; u < 4; ++u) {
          const UVec low = (UVec)widen_bf16(*(const HalfVec*)(row[2 * u] + g * kSquare));
          const UVec high = (UVec)widen_bf16(*(const HalfVec*)(row[2 * u + 1] + g * kSquare));
          store(words[u], (Vec<float>)(low >> 16 | high));
        }
        uint32_t* to = v + (g * kKeySteps + j / kDepth) * kSquareWords + j % kDepth / 2;
        interleave4(quad, kSquare, reinterpret_cast<float*>(to), kSquare);
      }
    }
  }

  // weights of one vector of lanes; keys of the last steps that are not in the range weigh nothing
  void split(long width, Range range, const float* p) const {
    for (long j = range.begin / kDepth * kDepth; j < round_up(range.end, kDepth); j += 2) {
      const bool in = j >= range.begin && j < range.end;  // both ends are multiples of kPanel
      const float* at = p + j * width;
      const long to = pair_at(j);
      split_pair(in ? load(at) : Vec<float>{}, in ? load(at + width) : Vec<float>{}, weights.hi + to, weights.lo + to);
    }
  }

  // most tiles leave the max where it was: times one, which changes no bit, is left out
  void rescale(Vec<float> alpha, float* o, long width) const {
    if (!_mm512_cmp_ps_mask((__m512)alpha, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ)) return;
    for (long x = 0; x < value_groups * kSquare; ++x) store(o + x * width, load(o + x * width) * alpha);
  }
};

}  // namespace attn::ATTN_TARGET
