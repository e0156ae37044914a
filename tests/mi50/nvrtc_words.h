// What clang knows and NVRTC does not, in CUDA's words; stands in front of a kernel's text.
//
// Computes: nothing by itself: fp16 as a struct of its bits, clang's vectors as structs, clang's builtins as CUDA's own.
// Invariants: conversions round to nearest even; of a number and NaN the maximum is the number; exp2 and log2 are the
//   hardware's approximations, as on the AMD side.
// Mirror: kernels/device_cuda.h, whose names these are
#define __CUDA__ 1
#undef __global__
#undef __device__
#undef __shared__

struct TwinHalf {
  unsigned short bits;
  TwinHalf() = default;
  __attribute__((device)) explicit TwinHalf(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __attribute__((device)) explicit operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};
#define _Float16 TwinHalf

template <class T, int kCount>
struct TwinVector;

template <class T>
struct alignas(2 * sizeof(T)) TwinVector<T, 2> {
  T x, y;
  __attribute__((device)) T& operator[](int i) { return i == 0 ? x : y; }
  __attribute__((device)) const T& operator[](int i) const { return i == 0 ? x : y; }
};

template <class T>
struct alignas(4 * sizeof(T)) TwinVector<T, 4> {
  T x, y, z, w;
  __attribute__((device)) T& operator[](int i) { return i == 0 ? x : i == 1 ? y : i == 2 ? z : w; }
  __attribute__((device)) const T& operator[](int i) const { return i == 0 ? x : i == 1 ? y : i == 2 ? z : w; }
};

#define __builtin_fmaf fmaf
#define __builtin_fmaxf fmaxf
#define __builtin_fabsf fabsf
#define __builtin_inff() __int_as_float(0x7f800000)
#define __nvvm_read_ptx_sreg_tid_x() threadIdx.x
#define __nvvm_read_ptx_sreg_ctaid_x() blockIdx.x
#define __nvvm_ex2_approx_f(x) twin_exp2(x)
#define __nvvm_lg2_approx_f(x) twin_log2(x)
#define __nvvm_shfl_sync_bfly_i32(mask, x, distance, clamp) __shfl_xor_sync(mask, x, distance)

static __attribute__((device)) inline float twin_exp2(float x) {
  float r;
  asm("ex2.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
static __attribute__((device)) inline float twin_log2(float x) {
  float r;
  asm("lg2.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
