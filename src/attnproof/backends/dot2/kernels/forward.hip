// Computes: out = softmax(logits) v and lse of one tile of queries, keys streamed past it; or one part over keys of it.
// Grid: one workgroup per (sequence, head, tile); grouped per (sequence, key head, tile, part).
// Shapes: q tile [BLOCK_M, kD]; key tile [BLOCK_N, kD], then its values as pairs in the same LDS; weights [BLOCK_M, BLOCK_N].
// Invariants: see softmax.h; tiles that no row sees are not visited, tiles that every row sees test nothing per element.
// Mirror: backends/streaming.py, backends/triton/kernels/forward.py
#include "softmax.h"

constexpr int kHeight = BLOCK_M / kRows, kBreadth = BLOCK_N / kLanes;
typedef RowMover<BLOCK_M, kD, HEAD_D> QueryMover;
typedef RowMover<BLOCK_N, kD, HEAD_D> KeyMover;
typedef PairMover<BLOCK_N, kDv, HEAD_DV> ValueMover;

// values are on their way while scores are computed, unless the mask's loads need the registers
constexpr bool kAhead = !KEEP && WIDE;

struct Job {
  int b, h, tile, part;  // h is a key head where rows are grouped
};

INLINE Job job_of(const Args& a) {
  u32 at = u32(a.first_group) + u32(group_index());
  Job job = {0, 0, 0, 0};
#if SPLIT
  job.part = at % u32(a.splits);
  at /= u32(a.splits);
#endif
  job.tile = at % u32(a.tiles);
  at /= u32(a.tiles);
  const u32 heads = GROUPED ? a.Hkv : a.H;
  job.h = at % heads;
  job.b = at / heads;
#if BANDED
  job.tile = a.tiles - 1 - job.tile;  // the tiles with most keys start first
#endif
  return job;
}

// the part of an interval that one of a.splits workgroups takes, in whole tiles
INLINE void cut(Interval& at, const Args& a, int part) {
#if SPLIT
  const int start = at.low / BLOCK_N, stop = (at.high + BLOCK_N - 1) / BLOCK_N;
  const int each = (most(stop - start, 0) + a.splits - 1) / a.splits;
  at.low = most(at.low, (start + part * each) * BLOCK_N);
  at.high = least(at.high, (start + (part + 1) * each) * BLOCK_N);
#endif
}

struct Tiles {
  u32 *q, *x, *weights;
};

// query and head of a row of the tile
struct Row {
  int i, h;
};

INLINE Row row_of(const Args& a, int head, int row) {
#if GROUPED
  return Row{row / a.G, head * a.G + row % a.G};
#else
  return Row{row, head};
#endif
}

// scores of a tile to probabilities in LDS; the accumulator follows the new maximum
template <bool kTest>
INLINE void weigh_tile(const Args& given, const Sequence& s, const Band& band, int head, int first,
                       float (&p)[kHeight][kBreadth], Softmax<kHeight>& state, float (&acc)[kHeight][kDv / kLanes],
                       u32* weights, int n0, int x, int y) {
  const float exponent = FOLD ? given.scale * kLog2e : kLog2e;
  UNROLL
  for (int i = 0; i < kHeight; ++i) {
    const Args& a = kHeavy ? reloaded(given) : given;
    const Row row = row_of(a, head, first + y * kHeight + i);
    const Query query = query_of(a, s, row.h, row.i);
    UNROLL
    for (int j = 0; j < kBreadth; ++j) {
      const int key = n0 + x + kLanes * j;
      p[i][j] = logit(a, s, query, key, p[i][j]).value;
      if (kTest) p[i][j] = visible(a, s, band, query, key) ? p[i][j] : -infinity();
    }
    const float alpha = state.step(i, p[i], exponent);
    UNROLL
    for (int e = 0; e < kDv / kLanes; ++e) acc[i][e] *= alpha;
#if DROPOUT
    const Stream stream = stream_of(a);
    UNROLL
    for (int j = 0; j < kBreadth; ++j)
      p[i][j] = survives(a, stream, query, n0 + x + kLanes * j) ? p[i][j] : 0.0f;
#endif
    put_weights<BLOCK_N>(weights, y * kHeight + i, x, p[i]);
  }
}

INLINE void store_part(const Args& a, const Sequence& s, const Row& r, int part, const float (&acc)[kDv / kLanes], float factor,
                       float lse, int x) {
  float* to = a.parts + (((i64(s.b) * a.H + r.h) * a.M + r.i) * a.splits + part) * (HEAD_DV + 1);
  UNROLL
  for (int e = 0; e < kDv / kLanes; ++e) {
    const int column = Columns<kDv>::column(x, e);
    if (column < HEAD_DV) to[column] = acc[e] * factor;
  }
  if (x == 0) to[HEAD_DV] = lse;
}

INLINE void store_out(const Args& a, const Sequence& s, const Row& r, const float (&acc)[kDv / kLanes], float factor,
                      float lse, int x) {
  const i64 row = s.q_row + r.i;
  Stored* to = (Stored*)a.out + s.b * a.out_b + r.h * a.out_h + row * a.out_m;
  store_row<kDv, HEAD_DV>(to, a.out_d, acc, factor, x);
  if (x == 0) a.lse[s.b * a.lse_b + r.h * a.lse_h + row] = lse;
}

KERNEL(THREADS, WAVES) void attn_forward(Args a) {
  __shared__ __attribute__((aligned(16))) u32 q_tile[row_tile(BLOCK_M, kD)];
  __shared__ __attribute__((aligned(16))) u32 x_tile[larger_tile(row_tile(BLOCK_N, kD), pair_tile(BLOCK_N, kDv))];
  __shared__ __attribute__((aligned(16))) u32 weights[BLOCK_M * weight_stride(BLOCK_N)];
  const int t = thread_index(), x = t % kLanes, y = t / kLanes;
  const Job job = job_of(a);
  const Sequence s = sequence_of(a, job.b);
  const int group = GROUPED ? a.G : 1, total = s.rows * group, first = job.tile * BLOCK_M;
  if (first >= total) return;
  const int last = least(first + BLOCK_M, total) - 1, kv = GROUPED ? job.h : job.h / a.G;
  const Band band = band_of(a, s);
  Interval keys = key_interval(band, s, first / group, last / group);
  narrow(keys, a, s, first / group, last / group);
  cut(keys, a, job.part);

  QueryMover::Loaded loaded;
#if GROUPED
  QueryMover::load(loaded, grouped_rows(a, s, kv), first, total, t);
#else
  QueryMover::load(loaded, query_rows(a, s, job.h), first, total, t);
#endif
  QueryMover::stage(q_tile, loaded, t);
  Softmax<kHeight> state;
  state.start();
  float acc[kHeight][kDv / kLanes];
  clear(acc);

  for (int n0 = keys.low / BLOCK_N * BLOCK_N; n0 < keys.high; n0 += BLOCK_N) {
    const int kind = mask_kind(kHeavy ? reloaded(a) : a, s.b, job.h, job.tile, n0 / BLOCK_N);
    if (kind == SKIP) continue;
    const Args& now = kHeavy || !WIDE ? reloaded(a) : a;
    const auto from_k = key_rows(now, s, kv);
    const auto from_v = value_rows(now, s, kv);
    KeyMover::Loaded k;
    KeyMover::load(k, from_k, n0, s.keys, t);
    barrier();  // everyone is done with the values of the tile before
    KeyMover::stage(x_tile, k, t);
    barrier();
    ValueMover::Loaded v;
    if (kAhead) ValueMover::load(v, from_v, n0, s.keys, t);
    float p[kHeight][kBreadth];
    dot_rows<kD>(p, q_tile, x_tile, x, y);
    if (kind == FULL && keys.full(n0, BLOCK_N))
      weigh_tile<false>(a, s, band, job.h, first, p, state, acc, weights, n0, x, y);
    else
      weigh_tile<true>(a, s, band, job.h, first, p, state, acc, weights, n0, x, y);
    if (!kAhead) ValueMover::load(v, from_v, n0, s.keys, t);
    barrier();  // everyone is done with the keys
    ValueMover::stage(x_tile, v, t);
    barrier();
    dot_pairs<kDv, BLOCK_N>(acc, weights, x_tile, x, y);
  }

  UNROLL
  for (int i = 0; i < kHeight; ++i) {
    const int at = first + y * kHeight + i;
    const Row row = row_of(a, job.h, at);
    const float sum = row_sum(state.l[i]);
    const float top = FOLD ? state.m[i] * a.scale : state.m[i];
    const Finished done = finish(top, sum, SPLIT ? -infinity() : load_sink(a, row.h));
    if (at >= total) continue;
    if (done.dead) {
      UNROLL
      for (int e = 0; e < kDv / kLanes; ++e) acc[i][e] = 0.0f;  // what was not seen may have been NaN
    }
    const float factor = DROPOUT ? done.factor * a.inverse_keep : done.factor;
#if SPLIT
    store_part(a, s, row, job.part, acc[i], factor, done.lse, x);
#else
    store_out(a, s, row, acc[i], factor, done.lse, x);
#endif
  }
}
