// The primitives of device.h in CUDA's words: the same kernels can then be run where a CUDA device is at hand.
// It says nothing about AMD code or speed; what it shows is the algorithm at full size.
#pragma once

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define KERNEL(threads, waves) extern "C" __global__ __attribute__((launch_bounds(threads)))

INLINE int thread_index() { return __nvvm_read_ptx_sreg_tid_x(); }
INLINE int group_index() { return __nvvm_read_ptx_sreg_ctaid_x(); }
INLINE void barrier() { __syncthreads(); }
INLINE float exp2_of(float x) { return __nvvm_ex2_approx_f(x); }
INLINE float log2_of(float x) { return __nvvm_lg2_approx_f(x); }
INLINE float reciprocal(float x) { return 1.0f / x; }

template <u32 kSelector>
INLINE u32 permute(u32 high, u32 low) {
  const u64 both = (u64(high) << 32) | low;
  u32 result = 0;
  UNROLL
  for (int byte = 0; byte < 4; ++byte)
    result |= u32((both >> (8 * ((kSelector >> (8 * byte)) & 7))) & 255) << (8 * byte);
  return result;
}

template <int kControl>
INLINE float lane_move(float x) {
  constexpr int kDistance = kControl == 0xB1 ? 1 : kControl == 0x4E ? 2 : kControl == 0x141 ? 7 : 15;
  return __builtin_bit_cast(
      float, __nvvm_shfl_sync_bfly_i32(-1, __builtin_bit_cast(int, x), kDistance, 31));
}

INLINE float dot2(u32 a, u32 b, float c) {
  const f16x2 x = __builtin_bit_cast(f16x2, a), y = __builtin_bit_cast(f16x2, b);
  return __builtin_fmaf(float(x.y), float(y.y), __builtin_fmaf(float(x.x), float(y.x), c));
}
