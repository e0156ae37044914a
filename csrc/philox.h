// Philox4x32-10, one lane per query row: the keep decision of dropout as a pure function of (seed, offset, b, h, i, j).
//
// counter = (j >> 2, i, b * H + h, offset), key = (seed lo, seed hi); output word j & 3 decides key j, so one call of
// ten rounds serves four neighbouring keys of every lane. Reference: Salmon et al., "Parallel random numbers: as easy
// as 1, 2, 3", SC 2011.
#pragma once

#include "rows.h"

namespace attn::ATTN_TARGET {

ATTN_INLINE void multiply_wide(UVec a, uint32_t by, UVec* hi, UVec* lo) {
  *lo = a * by;
#if defined(__AVX512F__)
  const __m512i m = _mm512_set1_epi32(int(by)), x = (__m512i)a;
  const __m512i even = _mm512_srli_epi64(_mm512_mul_epu32(x, m), 32);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), m);
  *hi = (UVec)_mm512_mask_blend_epi32(0xaaaa, even, odd);
#elif defined(__AVX2__)
  const __m256i m = _mm256_set1_epi32(int(by)), x = (__m256i)a;
  const __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(x, m), 32);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), m);
  *hi = (UVec)_mm256_blend_epi32(even, odd, 0xaa);
#else
  for (int u = 0; u < kBytes / 4; ++u) (*hi)[u] = uint32_t((uint64_t(a[u]) * by) >> 32);
#endif
}

struct Philox {
  UVec word[4];
};

ATTN_INLINE Philox philox(UVec c0, UVec c1, UVec c2, UVec c3, uint32_t k0, uint32_t k1) {
  ATTN_UNROLL
  for (int round = 0; round < 10; ++round) {
    UVec hi0, lo0, hi1, lo1;
    multiply_wide(c0, 0xD2511F53u, &hi0, &lo0);
    multiply_wide(c2, 0xCD9E8D57u, &hi1, &lo1);
    c0 = hi1 ^ c1 ^ k0;
    c1 = lo1;
    c2 = hi0 ^ c3 ^ k1;
    c3 = lo0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

struct Dropout {
  uint32_t threshold, seed_lo, seed_hi, offset;
  double inverse;  // 1 / (1 - p); 0 for p = 1, where nothing is kept
};

inline Dropout dropout_of(const Args& a) {
  const double scaled = __builtin_rint(a.dropout_p * 4294967296.0);
  const uint32_t threshold = scaled >= 4294967295.0 ? 0xffffffffu : uint32_t(scaled);
  return {threshold, uint32_t(a.seed), uint32_t(a.seed >> 32), uint32_t(a.offset),
          a.dropout_p >= 1.0 ? 0.0 : 1.0 / (1.0 - a.dropout_p)};
}

// factor[key][lane] for keys [range.begin, range.end) of the tile at t0: 1 / (1 - p) where kept, else 0
template <class T>
inline void dropout_factors(const Args& a, const Dropout& drop, const Lanes<T>& t, const Block& block, long b, long t0,
                            Range range, T* factor) {
  constexpr int U = kBytes / 4;
  const int width = block.vecs * kLanes<T>;
  const T kept = T(drop.inverse);
  for (int r = 0; r < width; r += U) {
    const int lanes = int(min_of(U, width - r));
    UVec query{}, head{};
    for (int u = 0; u < lanes; ++u) {
      query[u] = uint32_t(t.query[block.first + r + u]);
      head[u] = uint32_t(b * a.H + t.head[block.first + r + u]);
    }
    for (long j = range.begin; j < range.end; j += 4) {
      const Philox random = philox(UVec{} + uint32_t((t0 + j) >> 2), query, head, UVec{} + drop.offset, drop.seed_lo,
                                   drop.seed_hi);
      for (int w = 0; w < 4; ++w) {
        const UVec keep = (UVec)(random.word[w] >= drop.threshold);
        T* out = factor + (j + w) * width + r;
        for (int u = 0; u < lanes; ++u) out[u] = keep[u] ? kept : T(0);
      }
    }
  }
}

}  // namespace attn::ATTN_TARGET
