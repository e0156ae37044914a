// Computes: the gradient of a bias, summed over the axes that it is broadcast along.
// Grid: one workgroup per (sequence, head, tile of queries, tile of keys) of the caller's bias; broadcast axes are walked.
// Shapes: dbias [bias_B, bias_H, bias_M, bias_N] fp32, contiguous; a size is 1 where the axis is broadcast.
// Invariants: every element is written by one workgroup, which adds in a fixed order.
// Mirror: backends/triton/kernels/gradients.py
#include "gradients.h"

constexpr int kHeight = BLOCK_M / kRows, kBreadth = BLOCK_N / kLanes;
typedef RowMover<BLOCK_M, kD, HEAD_D> QueryMover;
typedef RowMover<BLOCK_M, kDv, HEAD_DV> OutMover;
typedef RowMover<BLOCK_N, kD, HEAD_D> KeyMover;
typedef RowMover<BLOCK_N, kDv, HEAD_DV> ValueMover;

struct Buffers {
  u32 *rows, *columns;
};

// acc += the gradient of the logits of one tile of one head
INLINE void add_tile(const Args& given, float (&acc)[kHeight][kBreadth], const Buffers& lds, const Sequence& s, int h,
                     int m0, int n0, int t) {
  const int x = t % kLanes, y = t / kLanes;
  float raw[kHeight][kBreadth], dp[kHeight][kBreadth];
  {
    const Args& a = reloaded(given);
    QueryMover::Loaded q;
    KeyMover::Loaded k;
    QueryMover::load(q, query_rows(a, s, h), m0, s.rows, t);
    KeyMover::load(k, key_rows(a, s, h / a.G), n0, s.keys, t);
    barrier();  // everyone is done with the tile before
    QueryMover::stage(lds.rows, q, t);
    KeyMover::stage(lds.columns, k, t);
  }
  barrier();
  dot_rows<kD>(raw, lds.rows, lds.columns, x, y);
  {
    const Args& a = reloaded(given);
    OutMover::Loaded dout;
    ValueMover::Loaded v;
    OutMover::load(dout, dout_rows(a, s, h), m0, s.rows, t);
    ValueMover::load(v, value_rows(a, s, h / a.G), n0, s.keys, t);
    barrier();
    OutMover::stage(lds.rows, dout, t);
    ValueMover::stage(lds.columns, v, t);
  }
  barrier();
  dot_rows<kDv>(dp, lds.rows, lds.columns, x, y);
  UNROLL
  for (int i = 0; i < kHeight; ++i) {
    const Args& a = reloaded(given);
    const Query query = query_of(a, s, h, m0 + y * kHeight + i);
    const Saved row = saved_of(a, s, h, query.i);
    UNROLL
    for (int j = 0; j < kBreadth; ++j)
      acc[i][j] +=
          pair_gradient<true>(a, s, band_of(a, s), query, row, n0 + x + kLanes * j, raw[i][j], dp[i][j]).d_logit;
  }
}

// the tile's sums, over its rows or columns too where the bias has one for all
INLINE void store_tile(const Args& a, const float* sums, i64 plane, int m0, int n0, int t) {
  constexpr int kM = SUM_M ? 1 : BLOCK_M, kN = SUM_N ? 1 : BLOCK_N;
  for (int at = t; at < kM * kN; at += THREADS) {
    const int i = at / kN, j = at % kN;
    if (!SUM_M && m0 + i >= a.M) continue;
    if (!SUM_N && n0 + j >= a.N) continue;
    float sum = 0.0f;
    for (int m = SUM_M ? 0 : i; m < (SUM_M ? BLOCK_M : i + 1); ++m) {
      for (int n = SUM_N ? 0 : j; n < (SUM_N ? BLOCK_N : j + 1); ++n) sum += sums[m * BLOCK_N + n];
    }
    const i64 row = SUM_M ? 0 : m0 + i, column = SUM_N ? 0 : n0 + j;
    a.dbias[(plane * a.bias_M + row) * a.bias_N + column] = sum;
  }
}

KERNEL(THREADS, WAVES) void attn_dbias(Args a) {
  constexpr int kWidest = kD > kDv ? kD : kDv;
  __shared__ __attribute__((aligned(16))) u32 rows[row_tile(BLOCK_M, kWidest)];
  __shared__ __attribute__((aligned(16))) u32 columns[row_tile(BLOCK_N, kWidest)];
  __shared__ float sums[BLOCK_M * BLOCK_N];
  const int t = thread_index(), x = t % kLanes, y = t / kLanes;
  const int m_tiles = (a.M + BLOCK_M - 1) / BLOCK_M, n_tiles = (a.N + BLOCK_N - 1) / BLOCK_N;
  const u32 own_m = SUM_M ? 1 : m_tiles, own_n = SUM_N ? 1 : n_tiles;
  const u32 at = u32(a.first_group) + u32(group_index());
  const int n_first = at % own_n, m_first = at / own_n % own_m, plane = at / own_n / own_m;
  const int h_first = plane % a.bias_H, b_first = plane / a.bias_H;
  const int b_end = a.bias_B == 1 ? a.B : b_first + 1, h_end = a.bias_H == 1 ? a.H : h_first + 1;
  const int m_end = SUM_M ? m_tiles : m_first + 1, n_end = SUM_N ? n_tiles : n_first + 1;
  float acc[kHeight][kBreadth];
  clear(acc);
  for (int b = b_first; b < b_end; ++b) {
    const Sequence s = sequence_of(reloaded(a), b);
    for (int h = h_first; h < h_end; ++h) {
      for (int m0 = m_first * BLOCK_M; m0 < least(m_end * BLOCK_M, s.rows); m0 += BLOCK_M) {
        for (int n0 = n_first * BLOCK_N; n0 < least(n_end * BLOCK_N, s.keys); n0 += BLOCK_N)
          add_tile(a, acc, Buffers{rows, columns}, s, h, m0, n0, t);
      }
    }
  }
  UNROLL
  for (int i = 0; i < kHeight; ++i) {
    UNROLL
    for (int j = 0; j < kBreadth; ++j) sums[(y * kHeight + i) * BLOCK_N + x + kLanes * j] = acc[i][j];
  }
  barrier();
  store_tile(a, sums, plane, m_first * BLOCK_M, n_first * BLOCK_N, t);
}
