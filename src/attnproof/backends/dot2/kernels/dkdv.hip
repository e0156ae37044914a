// Computes: dk = scale sum ds^T q and dv = sum dropout(p)^T dout of one tile of keys, over all query heads of its group.
// Grid: one workgroup per (sequence, key head, tile of keys).
// Shapes: k and v tiles [BLOCK_N, .] stay in LDS; q, dout, then both as pairs pass through one buffer; a thread's rows are
//   keys and its columns queries, so every product is the transpose of that in dq.hip.
// Invariants: after each tile dk and dv hold the sums over the queries seen; nothing is added by two workgroups.
// Mirror: backends/streaming.py, keys outer
#include "gradients.h"

constexpr int kHeight = BLOCK_N / kRows, kBreadth = BLOCK_M / kLanes;
typedef RowMover<BLOCK_N, kD, HEAD_D> KeyMover;
typedef RowMover<BLOCK_N, kDv, HEAD_DV> ValueMover;
typedef RowMover<BLOCK_M, kD, HEAD_D> QueryMover;
typedef RowMover<BLOCK_M, kDv, HEAD_DV> OutMover;
typedef PairMover<BLOCK_M, kD, HEAD_D> QueryPairMover;
typedef PairMover<BLOCK_M, kDv, HEAD_DV> OutPairMover;

// raw products and dp in, dropped p and ds out
template <bool kTest>
INLINE void differentiate(const Args& given, const Sequence& s, const Band& band, int h, int first,
                          float (&p)[kHeight][kBreadth], float (&ds)[kHeight][kBreadth], int m0, int x, int y) {
  UNROLL
  for (int j = 0; j < kBreadth; ++j) {
    const Args& a = reloaded(given);
    const Query query = query_of(a, s, h, m0 + x + kLanes * j);
    const Saved row = saved_of(a, s, h, query.i);
    UNROLL
    for (int i = 0; i < kHeight; ++i) {
      const int key = first + y * kHeight + i;
      const PairGradient g = pair_gradient<kTest>(a, s, band, query, row, key, p[i][j], ds[i][j]);
      p[i][j] = g.p;
      ds[i][j] = g.ds;
    }
  }
}

INLINE void put_tile(u32* weights, const float (&w)[kHeight][kBreadth], int x, int y) {
  UNROLL
  for (int i = 0; i < kHeight; ++i) put_weights<BLOCK_M>(weights, y * kHeight + i, x, w[i]);
}

KERNEL(THREADS, WAVES) void attn_dkdv(Args a) {
  __shared__ __attribute__((aligned(16))) u32 k_tile[row_tile(BLOCK_N, kD)];
  __shared__ __attribute__((aligned(16))) u32 v_tile[row_tile(BLOCK_N, kDv)];
  constexpr int kWidest = kD > kDv ? kD : kDv;
  __shared__
      __attribute__((aligned(16))) u32 x_tile[larger_tile(row_tile(BLOCK_M, kWidest), pair_tile(BLOCK_M, kWidest))];
  __shared__ __attribute__((aligned(16))) u32 weights[BLOCK_N * weight_stride(BLOCK_M)];
  const int t = thread_index(), x = t % kLanes, y = t / kLanes;
  const u32 at = u32(a.first_group) + u32(group_index()), plane = at / u32(a.tiles);
  const int tile = at % u32(a.tiles), kv = plane % u32(a.Hkv), first = tile * BLOCK_N;
  const Sequence s = sequence_of(a, plane / u32(a.Hkv));
  if (first >= s.keys) return;
  const int last = least(first + BLOCK_N, s.keys) - 1;
  const Band band = band_of(a, s);
  const Interval rows = query_interval(band, s, first, last);
  {
    KeyMover::Loaded loaded;
    KeyMover::load(loaded, key_rows(a, s, kv), first, s.keys, t);
    KeyMover::stage(k_tile, loaded, t);
  }
  {
    ValueMover::Loaded loaded;
    ValueMover::load(loaded, value_rows(a, s, kv), first, s.keys, t);
    ValueMover::stage(v_tile, loaded, t);
  }
  float dk[kHeight][kD / kLanes], dv[kHeight][kDv / kLanes];
  clear(dk);
  clear(dv);

  for (int h = kv * a.G; h < (kv + 1) * a.G; ++h) {
    const StridedRows from_q = query_rows(a, s, h), from_dout = dout_rows(a, s, h);
    for (int m0 = rows.low / BLOCK_M * BLOCK_M; m0 < rows.high; m0 += BLOCK_M) {
      const int kind = BOUNDS ? least(mask_kind(reloaded(a), s.b, h, m0 / BLOCK_M, tile), EDGE)
                              : mask_kind(reloaded(a), s.b, h, m0 / BLOCK_M, tile);
      if (kind == SKIP) continue;
      float p[kHeight][kBreadth], ds[kHeight][kBreadth];
      QueryMover::Loaded q;
      QueryMover::load(q, from_q, m0, s.rows, t);
      barrier();  // everyone is done with the tile before
      QueryMover::stage(x_tile, q, t);
      barrier();
      OutMover::Loaded dout;
      OutMover::load(dout, from_dout, m0, s.rows, t);
      dot_rows<kD>(p, k_tile, x_tile, x, y);
      barrier();
      OutMover::stage(x_tile, dout, t);
      barrier();
      dot_rows<kDv>(ds, v_tile, x_tile, x, y);
      if (kind == FULL && rows.full(m0, BLOCK_M) && first + BLOCK_N <= s.keys)
        differentiate<false>(a, s, band, h, first, p, ds, m0, x, y);
      else
        differentiate<true>(a, s, band, h, first, p, ds, m0, x, y);
      put_tile(weights, p, x, y);
      OutPairMover::Loaded dout_pairs;
      OutPairMover::load(dout_pairs, from_dout, m0, s.rows, t);
      barrier();
      OutPairMover::stage(x_tile, dout_pairs, t);
      barrier();
      dot_pairs<kDv, BLOCK_M>(dv, weights, x_tile, x, y);
      QueryPairMover::Loaded q_pairs;
      QueryPairMover::load(q_pairs, from_q, m0, s.rows, t);
      barrier();  // everyone is done with p and dout
      put_tile(weights, ds, x, y);
      QueryPairMover::stage(x_tile, q_pairs, t);
      barrier();
      dot_pairs<kD, BLOCK_M>(dk, weights, x_tile, x, y);
    }
  }

  UNROLL
  for (int i = 0; i < kHeight; ++i) {
    const int row = first + y * kHeight + i;
    if (row >= s.keys) continue;
    Stored* to_k = (Stored*)a.dk + s.b * a.dk_b + kv * a.dk_h + (s.k_row + row) * a.dk_n;
    Stored* to_v = (Stored*)a.dv + s.b * a.dv_b + kv * a.dv_h + (s.k_row + row) * a.dv_n;
    store_row<kD, HEAD_D>(to_k, a.dk_d, dk[i], a.scale, x);
    store_row<kDv, HEAD_DV>(to_v, a.dv_d, dv[i], DROPOUT ? a.inverse_keep : 1.0f, x);
  }
}
