// Computes: dq = scale sum ds k of one tile of queries, and with SLOPES the tile's part of the ALiBi slope gradient.
// Grid: one workgroup per (sequence, head, tile of queries).
// Shapes: q and dout tiles [BLOCK_M, .] stay in LDS; keys, values, then keys as pairs pass through one buffer.
// Invariants: after each tile dq = sum ds k over the keys seen; nothing is added by two workgroups.
// Mirror: backends/streaming.py, queries outer
#include "gradients.h"

constexpr int kHeight = BLOCK_M / kRows, kBreadth = BLOCK_N / kLanes;
typedef RowMover<BLOCK_M, kD, HEAD_D> QueryMover;
typedef RowMover<BLOCK_M, kDv, HEAD_DV> OutMover;
typedef RowMover<BLOCK_N, kD, HEAD_D> KeyMover;
typedef RowMover<BLOCK_N, kDv, HEAD_DV> ValueMover;
typedef PairMover<BLOCK_N, kD, HEAD_D> KeyPairMover;

// scores and gradients of a tile: ds to LDS, the slope's share added up
template <bool kTest>
INLINE void differentiate(const Args& given, const Sequence& s, const Band& band, int h, int first,
                          const float (&raw)[kHeight][kBreadth], const float (&dp)[kHeight][kBreadth], float& slope,
                          u32* weights, int n0, int x, int y) {
  UNROLL
  for (int i = 0; i < kHeight; ++i) {
    const Args& a = reloaded(given);
    const Query query = query_of(a, s, h, first + y * kHeight + i);
    const Saved row = saved_of(a, s, h, query.i);
    float ds[kBreadth];
    UNROLL
    for (int j = 0; j < kBreadth; ++j) {
      const int key = n0 + x + kLanes * j;
      const PairGradient g = pair_gradient<kTest>(a, s, band, query, row, key, raw[i][j], dp[i][j]);
      ds[j] = g.ds;
#if SLOPES
      slope -= g.d_logit * __builtin_fabsf(float(query.i + s.offset() - key));
#endif
    }
    put_weights<BLOCK_N>(weights, y * kHeight + i, x, ds);
  }
}

KERNEL(THREADS, WAVES) void attn_dq(Args a) {
  __shared__ __attribute__((aligned(16))) u32 q_tile[row_tile(BLOCK_M, kD)];
  __shared__ __attribute__((aligned(16))) u32 dout_tile[row_tile(BLOCK_M, kDv)];
  __shared__ __attribute__((aligned(16))) u32 x_tile[larger_tile(
      pair_tile(BLOCK_N, kD), larger_tile(row_tile(BLOCK_N, kD), row_tile(BLOCK_N, kDv)))];
  __shared__ __attribute__((aligned(16))) u32 weights[BLOCK_M * weight_stride(BLOCK_N)];
  const int t = thread_index(), x = t % kLanes, y = t / kLanes;
  const u32 at = u32(a.first_group) + u32(group_index()), plane = at / u32(a.tiles);
  const int turn = at % u32(a.tiles), tile = BANDED ? a.tiles - 1 - turn : turn;
  const int h = plane % u32(a.H), kv = h / a.G, first = tile * BLOCK_M;
  const Sequence s = sequence_of(a, plane / u32(a.H));
  if (first >= s.rows) {
#if SLOPES
    if (t == 0) a.parts[i64(plane) * a.tiles + tile] = 0.0f;
#endif
    return;
  }
  const int last = least(first + BLOCK_M, s.rows) - 1;
  const Band band = band_of(a, s);
  Interval keys = key_interval(band, s, first, last);
  narrow(keys, a, s, first, last);
  {
    QueryMover::Loaded loaded;
    QueryMover::load(loaded, query_rows(a, s, h), first, s.rows, t);
    QueryMover::stage(q_tile, loaded, t);
  }
  {
    OutMover::Loaded loaded;
    OutMover::load(loaded, dout_rows(a, s, h), first, s.rows, t);
    OutMover::stage(dout_tile, loaded, t);
  }
  float acc[kHeight][kD / kLanes], slope = 0.0f;
  clear(acc);
  const StridedRows from_k = key_rows(a, s, kv), from_v = value_rows(a, s, kv);

  for (int n0 = keys.low / BLOCK_N * BLOCK_N; n0 < keys.high; n0 += BLOCK_N) {
    const int kind = mask_kind(reloaded(a), s.b, h, tile, n0 / BLOCK_N);
    if (kind == SKIP) continue;
    float raw[kHeight][kBreadth], dp[kHeight][kBreadth];
    KeyMover::Loaded k;
    KeyMover::load(k, from_k, n0, s.keys, t);
    barrier();  // everyone is done with the tile before
    KeyMover::stage(x_tile, k, t);
    barrier();
    ValueMover::Loaded v;
    ValueMover::load(v, from_v, n0, s.keys, t);
    dot_rows<kD>(raw, q_tile, x_tile, x, y);
    barrier();
    ValueMover::stage(x_tile, v, t);
    barrier();
    dot_rows<kDv>(dp, dout_tile, x_tile, x, y);
    if (kind == FULL && keys.full(n0, BLOCK_N) && first + BLOCK_M <= s.rows)
      differentiate<false>(a, s, band, h, first, raw, dp, slope, weights, n0, x, y);
    else
      differentiate<true>(a, s, band, h, first, raw, dp, slope, weights, n0, x, y);
    KeyPairMover::Loaded pairs;
    KeyPairMover::load(pairs, from_k, n0, s.keys, t);
    barrier();
    KeyPairMover::stage(x_tile, pairs, t);
    barrier();
    dot_pairs<kD, BLOCK_N>(acc, weights, x_tile, x, y);
  }

  UNROLL
  for (int i = 0; i < kHeight; ++i) {
    const int row = first + y * kHeight + i;
    if (row >= s.rows) continue;
    Stored* to = (Stored*)a.dq + s.b * a.dq_b + h * a.dq_h + (s.q_row + row) * a.dq_m;
    store_row<kD, HEAD_D>(to, a.dq_d, acc[i], a.scale, x);
  }
#if SLOPES
  // rows of lanes first, then the rows in order
  float* sums = (float*)weights;
  slope = row_sum(slope);
  barrier();
  if (x == 0) sums[y] = slope;
  barrier();
  if (t == 0) {
    for (int n = 1; n < kRows; ++n) slope += sums[n];
    a.parts[i64(plane) * a.tiles + tile] = slope;
  }
#endif
}
