// Attention forward for one test: 8 query rows per workgroup of two waves, 32 keys per step, head dim 32.
// small_attention.s is what clang 19 makes of it (CodeObject.to_text); regenerate with
//   python tests/gcn/test_small_attention.py
typedef unsigned int u32;
typedef _Float16 f16;
typedef f16 half2 __attribute__((ext_vector_type(2)));
// read and written as other types than they were stored as
typedef u32 word1 __attribute__((may_alias));
typedef u32 u32x2 __attribute__((ext_vector_type(2))) __attribute__((may_alias));
typedef u32 u32x4 __attribute__((ext_vector_type(4))) __attribute__((may_alias));
#define DEVICE static __attribute__((device)) inline __attribute__((always_inline))
#define LDS __attribute__((shared)) __attribute__((aligned(16)))

enum { ROWS = 8, KEYS = 32, DIM = 32, PITCH = DIM + 8 };

struct Args {
  const f16 *q, *k, *v;
  f16 *out;
  float *lse;
  int M, N, causal;
  float scale_log2;
};

DEVICE float dot2(u32 a, u32 b, float c) {
  return __builtin_amdgcn_fdot2(__builtin_bit_cast(half2, a), __builtin_bit_cast(half2, b), c, false);
}
template <int CONTROL> DEVICE float across(float x) {
  return __builtin_bit_cast(float, __builtin_amdgcn_mov_dpp(__builtin_bit_cast(int, x), CONTROL, 15, 15, true));
}
// sum or maximum over the 16 lanes of a row: lane ^ 1, lane ^ 2, half mirror, mirror
template <class F> DEVICE float row_reduce(float x, F f) {
  x = f(x, across<0xB1>(x));
  x = f(x, across<0x4E>(x));
  x = f(x, across<0x141>(x));
  return f(x, across<0x140>(x));
}
DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(128, 128)))
void small_attention(Args a) {
  LDS f16 keys[KEYS * PITCH];
  LDS u32 pairs[KEYS / 2 * DIM];  // values of two neighbouring keys in one word
  LDS f16 weights[ROWS * PITCH];
  const int item = __builtin_amdgcn_workitem_id_x(), lane = item % 16, row = item / 16;
  const int i = __builtin_amdgcn_workgroup_id_x() * ROWS + row, head = __builtin_amdgcn_workgroup_id_y();
  const f16 *q = a.q + (long)head * a.M * DIM, *k = a.k + (long)head * a.N * DIM, *v = a.v + (long)head * a.N * DIM;

  u32x4 qs[4] = {};
  if (i < a.M)
    for (int c = 0; c < 4; c++) qs[c] = *(const u32x4*)(q + i * DIM + 8 * c);
  float m = -__builtin_inff(), l = 0, acc[2] = {0, 0};
  auto largest = [](float x, float y) { return __builtin_fmaxf(x, y); };
  auto sum = [](float x, float y) { return x + y; };

  for (int n0 = 0; n0 < a.N; n0 += KEYS) {
    barrier();
    {
      const int key = item / 4, at = item % 4 * 8;
      u32x4 word = {0, 0, 0, 0};
      if (n0 + key < a.N) word = *(const u32x4*)(k + (n0 + key) * DIM + at);
      *(u32x4*)(keys + key * PITCH + at) = word;
      const int pair = item / 8, d = item % 8 * 4;
      u32x2 even = {0, 0}, odd = {0, 0};
      if (n0 + 2 * pair < a.N) even = *(const u32x2*)(v + (n0 + 2 * pair) * DIM + d);
      if (n0 + 2 * pair + 1 < a.N) odd = *(const u32x2*)(v + (n0 + 2 * pair + 1) * DIM + d);
      for (int e = 0; e < 4; e++)
        pairs[pair * DIM + d + e] = __builtin_amdgcn_perm(odd[e / 2], even[e / 2], e % 2 ? 0x07060302 : 0x05040100);
    }
    barrier();
    float s[2];
    for (int g = 0; g < 2; g++) {
      const int j = n0 + lane + 16 * g;
      s[g] = 0;
      for (int c = 0; c < 4; c++) {
        const u32x4 word = *(const u32x4*)(keys + (lane + 16 * g) * PITCH + 8 * c);
        for (int e = 0; e < 4; e++) s[g] = dot2(qs[c][e], word[e], s[g]);
      }
      const bool seen = j < a.N && (!a.causal || j <= i + a.N - a.M);
      s[g] = seen ? s[g] * a.scale_log2 : -__builtin_inff();
    }
    const float top = largest(m, row_reduce(largest(s[0], s[1]), largest));
    const float origin = top == -__builtin_inff() ? 0 : top, alpha = __builtin_amdgcn_exp2f(m - origin);
    float p[2];
    for (int g = 0; g < 2; g++) {
      p[g] = __builtin_amdgcn_exp2f(s[g] - origin);
      weights[row * PITCH + lane + 16 * g] = (f16)p[g];
    }
    l = l * alpha + row_reduce(p[0] + p[1], sum);
    m = top;
    acc[0] *= alpha;
    acc[1] *= alpha;
    // a row of weights belongs to 16 lanes of one wave: no barrier
    for (int n = 0; n < KEYS / 2; n++) {
      const u32 weight = *(const word1*)(weights + row * PITCH + 2 * n);
      const u32x2 word = *(const u32x2*)(pairs + n * DIM + 2 * lane);
      acc[0] = dot2(weight, word[0], acc[0]);
      acc[1] = dot2(weight, word[1], acc[1]);
    }
  }
  if (i >= a.M) return;
  const float inverse = l > 0 ? __builtin_amdgcn_rcpf(l) : 0;
  const half2 two = {(f16)(acc[0] * inverse), (f16)(acc[1] * inverse)};
  *(half2*)(a.out + ((long)head * a.M + i) * DIM + 2 * lane) = two;
  if (lane == 0)
    a.lse[(long)head * a.M + i] = l > 0 ? (m + __builtin_amdgcn_logf(l)) * 0.69314718f : -__builtin_inff();
}
