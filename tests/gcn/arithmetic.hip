// What clang makes of plain arithmetic for gfx906: long sequences (division, square root, 64-bit products, loops with
// diverging lanes) whose result NumPy knows. One work item per element, n of them per array.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef _Float16 f16;
#define KERNEL extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(256, 256))) void
#define ITEM __builtin_amdgcn_workitem_id_x()

KERNEL integers(const int* a, const int* b, i64* out, int n) {
  const int t = ITEM, x = a[t], y = b[t];
  const u32 u = x, v = y;
  out[t] = x / y;
  out[n + t] = x % 13;
  out[2 * n + t] = u / v;
  out[3 * n + t] = (i64)x * y;
  out[4 * n + t] = (u64)u * v >> 32;
  out[5 * n + t] = ((i64)x << 20) / y;
  out[6 * n + t] = (u << 7 | u >> 25) + __builtin_bswap32(v);
  out[7 * n + t] = (u > v ? u - v : 0) + __builtin_popcount(u) * 3 + __builtin_clz(v | 1) - __builtin_ctz(u | 2);
  out[8 * n + t] = ((i64)x * y) >> (y & 63);
}
KERNEL floats(const float* a, const float* b, float* out, int n) {
  const int t = ITEM;
  const float x = a[t], y = b[t];
  out[t] = x / y;
  out[n + t] = __builtin_sqrtf(x);
  out[2 * n + t] = __builtin_roundf(y);
  out[3 * n + t] = __builtin_fminf(x, y) + __builtin_fmaxf(x, y) * 0.5f;
  out[4 * n + t] = (float)(i64)(y * 1e10f);
}
KERNEL halves(const f16* a, const f16* b, f16* out, int n) {
  const int t = ITEM;
  const f16 x = a[t], y = b[t];
  out[t] = x / y;
  out[n + t] = __builtin_sqrtf16(x);
  out[2 * n + t] = __builtin_fmaf16(x, y, x);
  out[3 * n + t] = x * y - y;
}
// Philox4x32-10 of counter (item, 0, 3, 4)
KERNEL philox(u32* out, u32 k0, u32 k1) {
  u32 c0 = ITEM, c1 = 0, c2 = 3, c3 = 4;
  for (int round = 0; round < 10; round++) {
    const u64 p0 = (u64)0xD2511F53 * c0, p1 = (u64)0xCD9E8D57 * c2;
    c0 = (u32)(p1 >> 32) ^ c1 ^ k0;
    c2 = (u32)(p0 >> 32) ^ c3 ^ k1;
    c1 = (u32)p1;
    c3 = (u32)p0;
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  u32* mine = out + 4 * ITEM;
  mine[0] = c0;
  mine[1] = c1;
  mine[2] = c2;
  mine[3] = c3;
}
// steps of the Collatz rule until 1, at most `limit`
KERNEL collatz(const int* a, int* out, int limit) {
  int x = a[ITEM], steps = 0;
  while (x != 1 && steps < limit) {
    if (x & 1)
      x = 3 * x + 1;
    else
      x /= 2;
    steps++;
  }
  out[ITEM] = steps;
}
