// Computes: nothing of use; each kernel keeps one pipe busy for a.M rounds, so that its rate can be read off a clock.
// Grid: any number of workgroups of THREADS.
// Shapes: parts [groups * THREADS], one number per thread, so that no work can be left out; bench_read also q [a.N] dwords.
// Invariants: a round of bench_dot2 is 16 dot2, of bench_exp 8 exponentials, of bench_lds 8 reads of 16 bytes per thread.
// Mirror: doctor.py, which counts the same
#include "args.h"
#include "options.h"

INLINE i64 own_number(const Args&, int t) { return i64(group_index()) * THREADS + t; }

KERNEL(THREADS, 1) void bench_dot2(Args a) {
  const int t = thread_index();
  float sums[16];
  UNROLL
  for (int i = 0; i < 16; ++i) sums[i] = float(i);
  const u32 x = 0x3c003c00u + u32(t & 3), y = 0x2c002c00u + u32(t & 7);  // pairs near 1 and near 1 / 16
#pragma unroll 1
  for (int n = 0; n < a.M; ++n) {
    UNROLL
    for (int i = 0; i < 16; ++i) sums[i] = dot2(x, y, sums[i]);
  }
  float sum = 0.0f;
  UNROLL
  for (int i = 0; i < 16; ++i) sum += sums[i];
  a.parts[own_number(a, t)] = sum;
}

KERNEL(THREADS, 1) void bench_exp(Args a) {
  const int t = thread_index();
  float x[8];
  UNROLL
  for (int i = 0; i < 8; ++i) x[i] = float(t + i) * 0.001f;
#pragma unroll 1
  for (int n = 0; n < a.M; ++n) {
    UNROLL
    for (int i = 0; i < 8; ++i) x[i] = exp2_of(-x[i]);  // tends to 0.64
  }
  float sum = 0.0f;
  UNROLL
  for (int i = 0; i < 8; ++i) sum += x[i];
  a.parts[own_number(a, t)] = sum;
}

// Pattern 0: neighbours read neighbouring 16 bytes. Pattern 1: free of conflicts if a phase serves lanes 0-3 with 20-23,
// 4-7 with 16-19 and so on, as composable_kernel documents; twice as slow if it serves 8 neighbouring lanes.
KERNEL(THREADS, 1) void bench_lds(Args a) {
  __shared__ __attribute__((aligned(16))) u32 tile[4096];
  const int t = thread_index(), lane = t & 31;
  for (int n = t; n < 4096; n += THREADS) tile[n] = u32(n);
  barrier();
  const int linear = t * 4 & 1023, split = (lane >> 2) * 32 + (lane >> 4) * 16 + (lane & 3) * 4;
  const u32* from = tile + (a.N ? split : linear);
  u32x4 sum = {0, 0, 0, 0};
#pragma unroll 1
  for (int n = 0; n < a.M; ++n) {
    UNROLL
    for (int i = 0; i < 8; ++i) sum ^= *(const u32x4*)(from + ((n & 1) * 256 + i * 256));
  }
  a.parts[own_number(a, t)] = float(sum.x ^ sum.y ^ sum.z ^ sum.w);
}

KERNEL(THREADS, 1) void bench_read(Args a) {
  const int t = thread_index();
  const u32x4* from = (const u32x4*)a.q;
  u32x4 sum = {0, 0, 0, 0};
  for (i64 n = own_number(a, t); n < a.N / 4; n += i64(a.tiles) * THREADS) sum ^= from[n];
  a.parts[own_number(a, t)] = float(sum.x ^ sum.y ^ sum.z ^ sum.w);
}
