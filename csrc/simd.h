// Vector types of one SIMD target: width, arithmetic that GCC's vector extensions lack, exp2, tanh.
//
// The same source is compiled once per target (CMakeLists.txt passes the flags and ATTN_TARGET); the width follows
// from what the compiler says it may use. Vector extensions carry loads, stores, arithmetic, compares and selects on
// every target; only fused multiply-add, max and the half conversions need a name per target. Contraction is off for
// the whole build (-ffp-contract=off), so that a * b + c means the same in every instantiation of a template: bit
// identity between the one-pass and the two-pass backward rests on that.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define ATTN_INLINE inline __attribute__((always_inline))
#define ATTN_UNROLL _Pragma("GCC unroll 32")

// keeps a vector in a register, where the compiler would rather load it anew in each instruction that uses it
#if defined(__aarch64__)
#define ATTN_IN_REGISTER(x) asm("" : "+w"(x))
#elif defined(__AVX512F__)
#define ATTN_IN_REGISTER(x) asm("" : "+v"(x))
#else
#define ATTN_IN_REGISTER(x) asm("" : "+x"(x))
#endif

namespace attn::ATTN_TARGET {

#if defined(__AVX512F__)
inline constexpr int kBytes = 64, kMaxVecs = 3, kPanel = 8;  // 24 accumulators + 3 operands of 32 registers
#elif defined(__AVX2__)
inline constexpr int kBytes = 32, kMaxVecs = 3, kPanel = 4;  // 12 accumulators + 3 operands + 1 broadcast = 16
#elif defined(__aarch64__)
inline constexpr int kBytes = 16, kMaxVecs = 4, kPanel = 4;  // 16 accumulators of 32 registers, fmla by lane
#else
inline constexpr int kBytes = 16, kMaxVecs = 2, kPanel = 4;  // no fma: a product needs a register of its own
#endif

template <class T>
struct Types;
template <>
struct Types<float> {
  using Int = int32_t;
  typedef float Vec __attribute__((vector_size(kBytes), may_alias));
  typedef float VecU __attribute__((vector_size(kBytes), aligned(1), may_alias));
  typedef int32_t IVec __attribute__((vector_size(kBytes), may_alias));
  typedef uint32_t Wrap __attribute__((vector_size(kBytes), may_alias));
};
template <>
struct Types<double> {
  using Int = int64_t;
  typedef double Vec __attribute__((vector_size(kBytes), may_alias));
  typedef double VecU __attribute__((vector_size(kBytes), aligned(1), may_alias));
  typedef int64_t IVec __attribute__((vector_size(kBytes), may_alias));
  typedef uint64_t Wrap __attribute__((vector_size(kBytes), may_alias));
};
template <class T>
using Vec = typename Types<T>::Vec;
template <class T>
using VecU = typename Types<T>::VecU;
template <class T>
using IVec = typename Types<T>::IVec;
template <class T>
using Wrap = typename Types<T>::Wrap;  // integers whose sums may wrap around
template <class T>
using Int = typename Types<T>::Int;

template <class T>
inline constexpr int kLanes = kBytes / int(sizeof(T));

template <class T>
ATTN_INLINE Vec<T> load(const T* p) {
  return *reinterpret_cast<const VecU<T>*>(p);
}
template <class T>
ATTN_INLINE void store(T* p, Vec<T> x) {
  *reinterpret_cast<VecU<T>*>(p) = x;
}
template <class T>
ATTN_INLINE IVec<T> load_int(const Int<T>* p) {
  IVec<T> x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
template <class T>
ATTN_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};  // x - (+0) keeps the sign of a negative zero, x + (+0) does not
}

// a compile-time number as a value
template <int N>
struct Number {
  static constexpr int value = N;
};

inline constexpr int kLine = 64;  // bytes of a cache line

ATTN_INLINE constexpr long min_of(long a, long b) { return a < b ? a : b; }
ATTN_INLINE constexpr long max_of(long a, long b) { return a > b ? a : b; }
ATTN_INLINE constexpr long round_up(long n, long unit) { return (n + unit - 1) / unit * unit; }

// a * b + c; one rounding where the target has the instruction
template <class T>
ATTN_INLINE Vec<T> fma(Vec<T> a, Vec<T> b, Vec<T> c) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4)
    return (Vec<T>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  else
    return (Vec<T>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4)
    return (Vec<T>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  else
    return (Vec<T>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__aarch64__)
  if constexpr (sizeof(T) == 4)
    return (Vec<T>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
  else
    return (Vec<T>)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
  return a * b + c;
#endif
}

// the larger of a and b, and b where a is NaN: a NaN score never becomes the running max, it reaches the row through p
template <class T>
ATTN_INLINE Vec<T> max_keep(Vec<T> a, Vec<T> b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4)
    return (Vec<T>)_mm512_max_ps((__m512)a, (__m512)b);
  else
    return (Vec<T>)_mm512_max_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4)
    return (Vec<T>)_mm256_max_ps((__m256)a, (__m256)b);
  else
    return (Vec<T>)_mm256_max_pd((__m256d)a, (__m256d)b);
#elif defined(__SSE2__)
  if constexpr (sizeof(T) == 4)
    return (Vec<T>)_mm_max_ps((__m128)a, (__m128)b);
  else
    return (Vec<T>)_mm_max_pd((__m128d)a, (__m128d)b);
#else
  return a > b ? a : b;
#endif
}

template <class T>
ATTN_INLINE Vec<T> select(IVec<T> mask, Vec<T> yes, Vec<T> no) {
  return mask ? yes : no;
}
template <class T>
ATTN_INLINE Vec<T> zero_unless(IVec<T> mask, Vec<T> x) {
  return (Vec<T>)((IVec<T>)x & mask);
}
template <class T>
ATTN_INLINE Vec<T> abs_of(Vec<T> x) {
  return (Vec<T>)((IVec<T>)x & ((Int<T>(1) << (8 * sizeof(T) - 1)) ^ Int<T>(-1)));
}

template <class T>
struct Exp2;
// degree 6 on [-1/2, 1/2], minimax in relative error (1.9e-9 before rounding); the first coefficient is exactly 1, so
// that 2^0 is 1 and a row of equal logits stays exact
template <>
struct Exp2<float> {
  static constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  static constexpr float kTiny = kShift - 125.0f;  // from 2^-125.5 down the result is given as 0
  static constexpr int kMantissa = 23;
  static constexpr float kPoly[] = {1.0f,           0.693147206f, 0.240226469f, 0.0555032878f,
                                    0.00961848896f, 0.00133999312f, 0.000153458122f};
};
// degree 11: relative error 3.1e-18 before rounding
template <>
struct Exp2<double> {
  static constexpr double kShift = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kTiny = kShift - 1021.0;
  static constexpr int kMantissa = 52;
  static constexpr double kPoly[] = {
      1.0, 0.6931471805599453305, 0.2402265069591015621, 0.05550410866481992148, 0.009618129107588335083,
      0.001333355814678995032, 1.540353046251461303e-4, 1.525273348996080460e-5, 1.321543308959462904e-6,
      1.017819803332852766e-7, 7.074105626245659371e-9, 4.435280944610336161e-10};
};

// x[n] = 2^(x[n] * factor) for exponents below 128 (fp64: 1024): at most 2 ulp for factor 1, 0 below 2^-125.5 (fp64:
// 2^-1021.5) and at -inf, NaN stays NaN. The factor (log2 e for the softmax) costs nothing, being part of two fused
// operations, and a logit of any size fp32 can hold never meets it alone.
// The vectors go through each stage together: a chain of this length, one vector after the other, would fill the
// scheduler with waiting instructions.
template <class T, int N, class E = Exp2<T>>
ATTN_INLINE void exp2_each(Vec<T> (&x)[N], T factor) {
  constexpr int kDegree = int(sizeof(E::kPoly) / sizeof(T)) - 1;
  const Vec<T> by = splat<T>(factor), shift = splat<T>(E::kShift);
  Vec<T> t[N], y[N];
  ATTN_UNROLL
  for (int n = 0; n < N; ++n) t[n] = fma<T>(x[n], by, shift);
  ATTN_UNROLL
  for (int n = 0; n < N; ++n) x[n] = fma<T>(x[n], by, shift - t[n]);
  ATTN_UNROLL
  for (int n = 0; n < N; ++n) y[n] = fma<T>(splat<T>(E::kPoly[kDegree]), x[n], splat<T>(E::kPoly[kDegree - 1]));
  ATTN_UNROLL
  for (int i = kDegree - 2; i >= 0; --i) {
    ATTN_UNROLL
    for (int n = 0; n < N; ++n) y[n] = fma<T>(y[n], x[n], splat<T>(E::kPoly[i]));
  }
  ATTN_UNROLL
  for (int n = 0; n < N; ++n) {
    // not below, which is true for NaN
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)  // the compiler would make a vector of the mask
      x[n] = (Vec<T>)_mm512_maskz_add_epi32(_mm512_cmp_ps_mask((__m512)t[n], (__m512)splat<T>(E::kTiny), _CMP_NLT_UQ),
                                            (__m512i)y[n], (__m512i)((Wrap<T>)t[n] << E::kMantissa));
    else
#endif
      x[n] = (Vec<T>)(((Wrap<T>)y[n] + ((Wrap<T>)t[n] << E::kMantissa)) & ~(Wrap<T>)(t[n] < E::kTiny));
  }
}
template <class T>
ATTN_INLINE Vec<T> exp2(Vec<T> x) {
  Vec<T> one[1] = {x};
  exp2_each<T, 1>(one, T(1));
  return one[0];
}

template <class T>
inline constexpr T kLog2e = T(1.442695040888963407359924681);  // 1 / ln 2

// e^x
template <class T>
ATTN_INLINE Vec<T> exp_of(Vec<T> x) {
  Vec<T> one[1] = {x};
  exp2_each<T, 1>(one, kLog2e<T>);
  return one[0];
}

}  // namespace attn::ATTN_TARGET
