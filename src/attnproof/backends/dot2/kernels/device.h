// The few primitives that the kernels need from a GPU; no vendor header, so that a run-time compiler is enough.
//
// Computes: nothing by itself. Everything below the kernels that differs between architectures stands here.
// Invariants: sums and maxima run inside rows of 16 lanes (DPP rows), so waves of 32 and of 64 lanes behave alike.
// Mirror: device_cuda.h gives the same names to a CUDA compiler.
#pragma once

#define INLINE static __device__ inline __attribute__((always_inline))
#define METHOD __device__ inline __attribute__((always_inline))
#define UNROLL _Pragma("unroll")

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;
typedef _Float16 f16;
typedef f16 f16x2 __attribute__((ext_vector_type(2)));
typedef u32 u32x2 __attribute__((ext_vector_type(2)));
typedef u32 u32x4 __attribute__((ext_vector_type(4)));

#if defined(__CUDA__)
#include "device_cuda.h"
#else

// a run-time compiler defines these words itself
#ifndef __device__
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#endif
#define KERNEL(threads, waves) \
  extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(threads, threads), amdgpu_waves_per_eu(waves)))

INLINE int thread_index() { return __builtin_amdgcn_workitem_id_x(); }
INLINE int group_index() { return __builtin_amdgcn_workgroup_id_x(); }

// every thread of the group has written LDS before, and may read it after
INLINE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

#if __has_builtin(__builtin_amdgcn_exp2f)
INLINE float exp2_of(float x) { return __builtin_amdgcn_exp2f(x); }
INLINE float log2_of(float x) { return __builtin_amdgcn_logf(x); }
#else  // compilers of ROCm 5
INLINE float exp2_of(float x) {
  float r;
  asm("v_exp_f32 %0, %1" : "=v"(r) : "v"(x));
  return r;
}
INLINE float log2_of(float x) {
  float r;
  asm("v_log_f32 %0, %1" : "=v"(r) : "v"(x));
  return r;
}
#endif
INLINE float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }

// bytes of the 8-byte number high:low, one selector byte per byte of the result
template <u32 kSelector>
INLINE u32 permute(u32 high, u32 low) {
  return __builtin_amdgcn_perm(high, low, kSelector);
}

template <int kControl>
INLINE float lane_move(float x) {
  return __builtin_bit_cast(
      float, __builtin_amdgcn_mov_dpp(__builtin_bit_cast(int, x), kControl, 0xf, 0xf, true));
}

// a.x * b.x + a.y * b.y + c with an fp32 sum
#if defined(__gfx803__) || defined(__gfx900__) || defined(__gfx902__) || defined(__gfx904__) || \
    defined(__gfx909__) || defined(__gfx90c__) || defined(__gfx1010__) || defined(__gfx1013__)
INLINE float dot2(u32 a, u32 b, float c) {
  const f16x2 x = __builtin_bit_cast(f16x2, a), y = __builtin_bit_cast(f16x2, b);
  return __builtin_fmaf(float(x.y), float(y.y), __builtin_fmaf(float(x.x), float(y.x), c));
}
#else
INLINE float dot2(u32 a, u32 b, float c) {
  return __builtin_amdgcn_fdot2(__builtin_bit_cast(f16x2, a), __builtin_bit_cast(f16x2, b), c, false);
}
#endif
#endif  // __CUDA__

constexpr float kLog2e = 1.4426950408889634f;  // 1 / ln 2
constexpr float kLn2 = 0.6931471805599453f;

// An input that every lane reads at the same place; nothing in the launch writes it, so the scalar unit may read it.
template <class T>
INLINE T uniform(const T* at) {
#if defined(__CUDA__)
  return *at;
#else
  return *(const __attribute__((address_space(4))) T*)at;
#endif
}

INLINE float infinity() { return __builtin_inff(); }
INLINE float as_float(u32 x) { return __builtin_bit_cast(float, x); }
INLINE u32 as_bits(float x) { return __builtin_bit_cast(u32, x); }
INLINE float larger(float a, float b) { return __builtin_fmaxf(a, b); }  // of a number and NaN, the number
INLINE int least(int a, int b) { return a < b ? a : b; }
INLINE int most(int a, int b) { return a > b ? a : b; }
INLINE u32 multiply_high(u32 a, u32 b) { return u32((u64(a) * b) >> 32); }

// butterflies of a row of 16 lanes: neighbours, pairs, halves of 8, halves of 16; every lane gets the result
INLINE float row_max(float x) {
  x = larger(x, lane_move<0xB1>(x));
  x = larger(x, lane_move<0x4E>(x));
  x = larger(x, lane_move<0x141>(x));
  return larger(x, lane_move<0x140>(x));
}
INLINE float row_sum(float x) {
  x += lane_move<0xB1>(x);
  x += lane_move<0x4E>(x);
  x += lane_move<0x141>(x);
  return x + lane_move<0x140>(x);
}
