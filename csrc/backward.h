// Backward of one work item. Three kinds of item share one inner step (`pair`):
//
//   queries  a row tile against all its keys: dQ, and the sums for the ALiBi slopes
//   keys     a group of key tiles against all rows that see them: dK and dV
//   both     all rows of one key/value head against all keys: dQ, dK and dV in one pass, 5 products instead of 7
//
// Computes: S^T = K Q^T, dP^T = V dO^T, p and dS (gradient.h), dQ^T += K^T dS^T, dV += P^T dO, dK += dS^T Q.
// Shapes: per block as in forward.h; dK and dV [key][channel padded to vectors].
// Invariants: row tiles start at multiples of plan.rows, chunks of kChunk blocks within them, key tiles at multiples of
//   kTileKeys; sums run over rows and over keys in rising order. So one pass and two passes give the same bits, and no
//   two items write the same memory: there are no atomics.
// Mirror: backends/streaming.py, backward.
#pragma once

#include "plan.h"
#include "tile.h"

namespace attn::ATTN_TARGET {

struct Wanted {
  bool dq, dk, dv, slopes, raw;
  bool any_key() const { return dk || dv; }
  bool ds() const { return dq || dk || slopes || raw; }
};

template <class In>
struct Backward {
  using T = Acc<In>;
  static constexpr int L = kLanes<T>, W = kBlock<T>;

  const Args& a;
  const BackwardPlan& plan;
  Wanted want;
  ScoreKinds kinds;
  long Dp, Dvp;    // channels padded to whole vectors
  long Dg;         // channels padded to panels
  TileInputs<In> inputs;
  Lanes<T>* lanes;
  T *qt, *dot, *qrow, *dorow, *dqt, *lse, *delta, *slope_sum;  // row side
  T *kp, *vp, *kv, *dk, *dv;                                  // key side
  T *s, *dp, *rowbuf, *result;
  const In **krow, **vrow;

  Backward(const Args& args, const BackwardPlan& p, Wanted w, Arena& arena) : a(args), plan(p), want(w) {
    kinds = score_kinds(a);
    Dp = round_up(a.D, L);
    Dvp = round_up(a.Dv, L);
    Dg = round_up(a.D, kPanel);
    const long R = plan.rows, group = kGroupTiles * kTileKeys;
    lanes = arena.take<Lanes<T>>(1);
    qt = arena.take<T>(R * a.D);
    dot = arena.take<T>(R * a.Dv);
    qrow = arena.take<T>(want.dk ? R * Dp : 0);
    dorow = arena.take<T>(want.dv ? R * Dvp : 0);
    dqt = arena.take<T>(want.dq ? R * Dg : 0);
    lse = arena.take<T>(R);
    delta = arena.take<T>(R);
    slope_sum = arena.take<T>(R);
    kp = arena.take<T>(group * a.D);
    vp = arena.take<T>(group * a.Dv);
    kv = arena.take<T>(want.dq ? kPanelKeys * Dg : 0);
    dk = arena.take<T>(want.dk ? group * Dp : 0);
    dv = arena.take<T>(want.dv ? group * Dvp : 0);
    s = arena.take<T>(kChunk * kTileKeys * W);
    dp = arena.take<T>(kChunk * kTileKeys * W);
    rowbuf = arena.take<T>(4 * max_of(max_of(Dp, Dvp), kTileKeys));
    result = arena.take<T>(W * Dg);
    inputs.allocate(a, arena, rowbuf);
    krow = arena.take<const In*>(kTileKeys);
    vrow = arena.take<const In*>(kTileKeys);
  }

  // dQ of one row tile, and its share of the slopes' gradient
  void queries(const BackwardItem& item) {
    const Sequence seq = sequence_of(a, item.b);
    load_rows(seq, item.hk, item.first, item.rows);
    for (long t0 = lanes->key_lo / kTileKeys * kTileKeys; t0 < lanes->key_hi; t0 += kTileKeys) {
      load_keys(seq, item.hk, t0, 0);
      pair(seq, t0, 0, nullptr, 0, nullptr, 0);
    }
    store_queries(seq, item);
  }

  // dK and dV of one group of key tiles
  void keys(const BackwardItem& item) {
    const Sequence seq = sequence_of(a, item.b);
    const long end = min_of(item.key_end, seq.N), total = seq.M * (a.H / a.Hkv);
    if (want.dk) std::memset(dk, 0, size_t(kGroupTiles * kTileKeys * Dp) * sizeof(T));
    if (want.dv) std::memset(dv, 0, size_t(kGroupTiles * kTileKeys * Dvp) * sizeof(T));
    for (long t0 = item.key_begin; t0 < end; t0 += kTileKeys) load_keys(seq, item.hk, t0, t0 - item.key_begin);
    for (long first = 0; first < total; first += plan.rows) {
      const long rows = min_of(plan.rows, total - first);
      if (!may_see(seq, first, rows, item.key_begin, end)) continue;
      if (!load_rows(seq, item.hk, first, rows, item.key_begin, end)) continue;
      for (long t0 = item.key_begin; t0 < end; t0 += kTileKeys) {
        const long at = t0 - item.key_begin;
        pair(seq, t0, at, want.dk ? dk + at * Dp : nullptr, Dp, want.dv ? dv + at * Dvp : nullptr, Dvp);
      }
    }
    if (want.dk) store_keys(a.dk, seq, item, end, dk, a.D, Dp);
    if (want.dv) store_keys(a.dv, seq, item, end, dv, a.Dv, Dvp);
  }

  // everything of one key/value head; dK and dV are summed where they stay. `stop` is asked between row tiles
  template <class Stop>
  void both(const BackwardItem& item, Stop&& stop) {
    const Sequence seq = sequence_of(a, item.b);
    const RowsOf<T> dks = rows_of<T>(a.dk, seq, seq.k0), dvs = rows_of<T>(a.dv, seq, seq.k0);
    for (long j = 0; j < seq.N; ++j) {
      std::memset(dks.at(item.hk, j), 0, size_t(a.D) * sizeof(T));
      std::memset(dvs.at(item.hk, j), 0, size_t(a.Dv) * sizeof(T));
    }
    const long total = seq.M * (a.H / a.Hkv);
    BackwardItem tile = item;
    for (tile.first = 0; tile.first < total && !stop(); tile.first += plan.rows, ++tile.slot) {
      tile.rows = min_of(plan.rows, total - tile.first);
      load_rows(seq, item.hk, tile.first, tile.rows);
      for (long t0 = lanes->key_lo / kTileKeys * kTileKeys; t0 < lanes->key_hi; t0 += kTileKeys) {
        load_keys(seq, item.hk, t0, 0);
        // the last tile may have fewer keys than a panel: its sums pass through scratch
        const bool whole = t0 + kTileKeys <= seq.N;
        T *to_k = whole ? dks.at(item.hk, t0) : dk, *to_v = whole ? dvs.at(item.hk, t0) : dv;
        const long ldk = whole ? dks.row / long(sizeof(T)) : Dp, ldv = whole ? dvs.row / long(sizeof(T)) : Dvp;
        if (!whole) copy_rows(dks, item.hk, t0, seq.N, dk, Dp, true), copy_rows(dvs, item.hk, t0, seq.N, dv, Dvp, true);
        pair(seq, t0, 0, to_k, ldk, to_v, ldv);
        if (!whole) copy_rows(dks, item.hk, t0, seq.N, dk, Dp, false), copy_rows(dvs, item.hk, t0, seq.N, dv, Dvp, false);
      }
      store_queries(seq, tile);
    }
  }

  // one tile of dbias: rows of one head, summed over the batches and heads that share it
  void bias(const BiasItem& item, T* sums, double* totals) {
    std::memset(sums, 0, size_t(plan.rows * kTileKeys) * sizeof(T));
    for (long b = item.b0; b < item.b1; ++b) {
      const Sequence seq = sequence_of(a, b);
      for (long h = item.h0; h < item.h1; ++h)
        for (long first = item.row0; first < min_of(item.row1, seq.M); first += plan.rows)
          bias_rows(seq, h, first, min_of(plan.rows, min_of(item.row1, seq.M) - first), item, sums);
    }
    store_bias(item, sums, totals);
  }

 private:
  // false where no row sees a key of [from, to): nothing was loaded then
  bool load_rows(const Sequence& seq, long hk, long first, long count, long from = 0, long to = INT32_MAX,
                 long only = -1) {
    fill_lanes(a, seq, hk, first, count, *lanes, only);
    if (lanes->key_lo >= to || lanes->key_hi <= from || lanes->key_lo >= lanes->key_hi) {
      if (want.dq) std::memset(dqt, 0, size_t(plan.rows * Dg) * sizeof(T));
      if (want.slopes) std::memset(slope_sum, 0, size_t(plan.rows) * sizeof(T));
      return false;
    }
    load_statistics(seq);
    const RowsOf<const In> q = rows_of<const In>(a.q, seq, seq.q0), dout = rows_of<const In>(a.dout, seq, seq.q0);
    for (long k = 0; k < lanes->blocks; ++k) {
      const Block& block = lanes->block[k];
      const In *qs[kBlock<T>], *dos[kBlock<T>];
      for (int r = 0; r < block.lanes; ++r) {
        const long at = block.first + r, h = lanes->head[at], i = lanes->query[at];
        // a dead row takes part in nothing, whatever its gradient holds
        const bool dead = lse[at] == T(__builtin_inf());
        qs[r] = dead ? nullptr : q.at(h, i);
        dos[r] = dead ? nullptr : dout.at(h, i);
      }
      load_side(block, qs, q.element, a.D, qt + block.first * a.D, want.dk ? qrow : nullptr, T(a.scale));
      load_side(block, dos, dout.element, a.Dv, dot + block.first * a.Dv, want.dv ? dorow : nullptr, T(1));
      const long width = block.vecs * L;
            for (long x = 0; x < a.D * width; x += L) {
        T* at = qt + block.first * a.D + x;
        store(at, load(at) * T(a.scale));
      }
    }
    if (want.dq) std::memset(dqt, 0, size_t(plan.rows * Dg) * sizeof(T));
    if (want.slopes) std::memset(slope_sum, 0, size_t(plan.rows) * sizeof(T));
    return true;
  }

  // rows transposed for the products over channels and, where wanted, scaled and cut into channel panels for the products
  // over rows
  void load_side(const Block& block, const In* const* rows, long stride, long n, T* transposed, T* panels, T scale) {
    const long width = block.vecs * L, padded = round_up(n, L);
    interleave(rows, block.lanes, stride, n, transposed, width, rowbuf);
    for (long r = round_up(block.lanes, 4); r < width; ++r)
      for (long x = 0; x < n; ++x) transposed[x * width + r] = 0;
    if (!panels) return;
    std::memset(rowbuf, 0, size_t(padded) * sizeof(T));
    for (long r = 0; r < block.lanes; ++r) {
      if (rows[r])
        widen_row(rows[r], stride, n, rowbuf);
      else
        std::memset(rowbuf, 0, size_t(n) * sizeof(T));
      for (long v = 0, take; v * L < padded; v += take) {
        take = panel_vecs(padded / L - v);
        T* to = panels + v * L * plan.rows + (block.first + r) * take * L;
        for (long u = 0; u < take; ++u) store(to + u * L, load(rowbuf + (v + u) * L) * scale);
      }
    }
  }

  // lse, +inf for dead and padding lanes, so that p is 0 there
  void load_statistics(const Sequence& seq) {
    const T *lses = reinterpret_cast<const T*>(a.lse), *deltas = reinterpret_cast<const T*>(plan.delta);
    for (long k = 0; k < lanes->blocks; ++k) {
      const Block& block = lanes->block[k];
      for (long r = block.first; r < block.first + block.vecs * L; ++r) {
        lse[r] = T(__builtin_inf());
        delta[r] = 0;
        if (r >= block.first + block.lanes || lanes->lo[r] >= lanes->hi[r]) continue;
        const long at = lse_index(a, seq, lanes->head[r], lanes->query[r]);
        if (lses[at] == -T(__builtin_inf())) continue;
        lse[r] = lses[at];
        delta[r] = deltas[at];
      }
    }
  }

  void load_keys(const Sequence& seq, long hk, long t0, long at) {
    const long count = min_of(kTileKeys, seq.N - t0);
    key_rows(a, a.k, seq, hk, t0, count, krow);
    pack_keys(krow, count, element_stride(a, a.k), a.D, kp + at * a.D, rowbuf);
    if (want.dq) pack_values(krow, count, element_stride(a, a.k), a.D, kPanelKeys, kv, rowbuf);
    if (!want.ds()) return;
    key_rows(a, a.v, seq, hk, t0, count, vrow);
    pack_keys(vrow, count, element_stride(a, a.v), a.Dv, vp + at * a.Dv, rowbuf);
  }

  // the rows in scratch against one key tile, whose panels start `at` keys into kp and vp
  void pair(const Sequence& seq, long t0, long at, T* to_k, long ldk, T* to_v, long ldv) {
    const long keys = min_of(kTileKeys, seq.N - t0);
    for (long first = 0; first < lanes->blocks; first += kChunk) {
      const long last = min_of(first + kChunk, lanes->blocks);
      Range all{kTileKeys, 0, false};
      for (long k = first; k < last; ++k) {
        const Range range = range_of(lanes->block[k], t0, kTileKeys, a.keep.data != nullptr);
        if (range.begin >= range.end) continue;
        all.begin = min_of(all.begin, range.begin);
        all.end = max_of(all.end, range.end);
        step(seq, lanes->block[k], k - first, t0, keys, at, range);
      }
      if (all.begin >= all.end || !want.any_key()) continue;
      OuterBlock<T> blocks[kChunk];
      for (long k = first; k < last; ++k) clear_outside(lanes->block[k], k - first, t0, all);
      if (want.dv) {
        describe(first, last, s, blocks);
        Blocks<T>::outer(blocks, last - first, all, dorow, plan.rows, Dvp, to_v, ldv);
      }
      if (want.dk) {
        describe(first, last, dp, blocks);
        Blocks<T>::outer(blocks, last - first, all, qrow, plan.rows, Dp, to_k, ldk);
      }
    }
  }

  void describe(long first, long last, const T* tiles, OuterBlock<T>* blocks) const {
    for (long k = first; k < last; ++k) {
      const Block& block = lanes->block[k];
      blocks[k - first] = {tiles + (k - first) * kTileKeys * W, block.vecs * L, block.lanes, block.first};
    }
  }

  // p and dS of keys that this block does not see, but another one of its chunk does, are 0
  void clear_outside(const Block& block, long slot, long t0, Range all) {
    const Range mine = range_of(block, t0, kTileKeys, a.keep.data != nullptr);
    const long width = block.vecs * L, end = max_of(mine.end, mine.begin);
    const Range parts[2] = {{all.begin, mine.begin < end ? mine.begin : all.end, false}, {end, all.end, false}};
    for (const Range& part : parts) {
      if (part.begin >= part.end) continue;
      const size_t bytes = size_t((part.end - part.begin) * width) * sizeof(T);
      std::memset(s + slot * kTileKeys * W + part.begin * width, 0, bytes);
      std::memset(dp + slot * kTileKeys * W + part.begin * width, 0, bytes);
    }
  }

  void step(const Sequence& seq, const Block& block, long slot, long t0, long keys, long at, Range range) {
    T *ss = s + slot * kTileKeys * W, *ps = dp + slot * kTileKeys * W;
    Blocks<T>::scores(block.vecs, {kp + at * a.D, 0}, a.D, qt + block.first * a.D, range, ss);
    if (want.ds()) Blocks<T>::scores(block.vecs, {vp + at * a.Dv, 0}, a.Dv, dot + block.first * a.Dv, range, ps);
    const Prepared<T> in = inputs.prepare(a, seq, *lanes, block, t0, keys, range);
    const GradientTile<T> tile{ss,
                               ps,
                               range.begin,
                               range.end,
                               in.bits,
                               in.factor,
                               lse + block.first,
                               delta + block.first,
                               want.slopes ? slope_sum + block.first : nullptr,
                               want.raw,
                               in.scores};
    Blocks<T>::gradient(block.vecs, kinds, tile);
    if (want.dq) Blocks<T>::add(block.vecs, kv, Dg, range, ps, dqt + block.first * Dg);
  }

  void store_queries(const Sequence& seq, const BackwardItem& item) {
    if (want.slopes) store_slopes(item);
    if (!want.dq) return;
    const RowsOf<In> rows = rows_of<In>(a.dq, seq, seq.q0);
    for (long k = 0; k < lanes->blocks; ++k) {
      const Block& block = lanes->block[k];
      const long width = block.vecs * L;
      const T* from = dqt + block.first * Dg;
      for (long x = 0; x < Dg; x += 4) {
        const T* quad[4] = {from + x * width, from + (x + 1) * width, from + (x + 2) * width, from + (x + 3) * width};
        interleave4(quad, block.lanes, result + x, Dg);
      }
      for (int r = 0; r < block.lanes; ++r) {
        T* row = result + r * Dg;
        for (long x = 0; x < Dg; ++x) row[x] *= T(a.scale);
        narrow_row(row, a.D, rows.at(lanes->head[block.first + r], lanes->query[block.first + r]), rows.element);
      }
    }
  }

  // one sum per head of the group, kept apart per row tile and joined in order by the caller
  void store_slopes(const BackwardItem& item) const {
    const long G = a.H / a.Hkv;
    double* out = plan.slope_sums + item.slot * G;
    for (long g = 0; g < G; ++g) out[g] = 0;
    for (long r = 0; r < lanes->count; ++r) out[lanes->head[r] - item.hk * G] += double(slope_sum[r]);
  }

  void store_keys(const View& view, const Sequence& seq, const BackwardItem& item, long end, const T* from, long n,
                  long ld) const {
    const RowsOf<In> rows = rows_of<In>(view, seq, seq.k0);
    for (long j = item.key_begin; j < end; ++j)
      narrow_row(from + (j - item.key_begin) * ld, n, rows.at(item.hk, j), rows.element);
  }

  static void copy_rows(const RowsOf<T>& rows, long hk, long t0, long end, T* scratch, long ld, bool in) {
    for (long j = t0; j < t0 + kTileKeys; ++j) {
      T* at = scratch + (j - t0) * ld;
      if (in && j >= end)
        std::memset(at, 0, size_t(ld) * sizeof(T));
      else if (in)
        std::memcpy(at, rows.at(hk, j), size_t(ld) * sizeof(T));
      else if (j < end)
        std::memcpy(rows.at(hk, j), at, size_t(ld) * sizeof(T));
    }
  }

  // cheap test before rows are loaded: could any of them see a key of [from, to)? Explicit bounds are not looked at
  bool may_see(const Sequence& seq, long first, long count, long from, long to) const {
    const long G = a.H / a.Hkv, top = first / G, bottom = (first + count - 1) / G, shift = seq.N - seq.M;
    if (a.right < kUnbounded && bottom + shift + a.right < from) return false;
    if (a.top_left && bottom < from) return false;
    return a.left >= kUnbounded || top + shift - a.left < to;
  }

  void bias_rows(const Sequence& seq, long h, long first, long count, const BiasItem& item, T* sums) {
    const long hk = h / (a.H / a.Hkv), end = min_of(item.key1, seq.N);
    if (!load_rows(seq, hk, first, count, item.key0, end, h)) return;
    for (long t0 = item.key0; t0 < end; t0 += kTileKeys) {
      load_keys(seq, hk, t0, 0);
      for (long k = 0; k < lanes->blocks; ++k) {
        const Block& block = lanes->block[k];
        const Range range = range_of(block, t0, kTileKeys, a.keep.data != nullptr);
        if (range.begin >= range.end) continue;
        step(seq, block, 0, t0, min_of(kTileKeys, seq.N - t0), 0, range);
        const long width = block.vecs * L;
        for (long j = range.begin; j < range.end; ++j)
          for (long r = 0; r < width; r += L) {
            T* to = sums + block.first * kTileKeys + j * W + r;
            store(to, load(to) + load(dp + j * width + r));
          }
      }
    }
  }

  // sums [block][key][lane], full blocks only -> dbias, over lanes and keys where the bias has one row or one column
  void store_bias(const BiasItem& item, const T* sums, double* totals) const {
    const bool one_row = a.bias_shape[2] == 1, one_key = a.bias_shape[3] == 1;
    const long rows = one_row ? 1 : min_of(plan.rows, item.row1 - item.row0);
    const long keys = one_key ? 1 : min_of(kTileKeys, item.key1 - item.key0);
    std::memset(totals, 0, size_t(rows * keys) * sizeof(double));
    for (long first = 0; first < plan.rows; first += W)
      for (long j = 0; j < kTileKeys; ++j)
        for (long r = 0; r < W; ++r) {
          const long row = one_row ? 0 : first + r, key = one_key ? 0 : j;
          if (row < rows && key < keys) totals[row * keys + key] += double(sums[first * kTileKeys + j * W + r]);
        }
    for (long r = 0; r < rows; ++r)
      for (long j = 0; j < keys; ++j) put_bias(item, r, j, totals[r * keys + j]);
  }

  void put_bias(const BiasItem& item, long r, long j, double x) const {
    const long at = ((item.out_b * a.bias_shape[1] + item.out_h) * a.bias_shape[2] + (a.bias_shape[2] == 1 ? 0 : item.row0 + r)) *
                        a.bias_shape[3] +
                    (a.bias_shape[3] == 1 ? 0 : item.key0 + j);
    if (a.bias_dtype == a.dtype)
      store_one(reinterpret_cast<In*>(a.dbias) + at, T(x));
    else
      reinterpret_cast<float*>(a.dbias)[at] = float(x);
  }
};

// delta = rowsum(dout * out) - dlse, 0 for dead rows, whose lse does not depend on anything
template <class In>
inline void delta_rows(const Args& a, const Sequence& seq, long h, long begin, long end, Acc<In>* deltas,
                       Acc<In>* scratch) {
  using T = Acc<In>;
  const RowsOf<const In> out = rows_of<const In>(a.out, seq, seq.q0), dout = rows_of<const In>(a.dout, seq, seq.q0);
  for (long i = begin; i < end; ++i) {
    const long at = lse_index(a, seq, h, i);
    deltas[at] = 0;
    if (reinterpret_cast<const T*>(a.lse)[at] == -T(__builtin_inf())) continue;
    const T* x = as_acc(out.at(h, i), out.element, a.Dv, scratch);
    const T* y = as_acc(dout.at(h, i), dout.element, a.Dv, scratch + a.Dv);
    Vec<T> lanes{};
    long c = 0;
    for (; c + kLanes<T> <= a.Dv; c += kLanes<T>) lanes = fma<T>(load(x + c), load(y + c), lanes);
    T sum = 0;
    for (int u = 0; u < kLanes<T>; ++u) sum += lanes[u];
    for (; c < a.Dv; ++c) sum += x[c] * y[c];
    if (a.dlse.data) {
      const long index = seq.packed ? h * a.dlse.s[0] + (seq.q0 + i) * a.dlse.s[1]
                                    : seq.b * a.dlse.s[0] + h * a.dlse.s[1] + i * a.dlse.s[2];
      sum -= read<T>(a.dlse.data + index);
    }
    deltas[at] = sum;
  }
}

// gradient of the sink of one head: its own dS, summed over rows; the sink has no value, so its dP is 0
template <class In>
inline double sink_sum(const Args& a, long h, const Acc<In>* deltas) {
  using T = Acc<In>;
  const double logit = double(sink_at<In>(a, h));
  double sum = 0;
  for (long b = 0; b < a.B; ++b) {
    const Sequence seq = sequence_of(a, b);
    for (long i = 0; i < seq.M; ++i) {
      const long at = lse_index(a, seq, h, i);
      const double lse = double(reinterpret_cast<const T*>(a.lse)[at]);
      if (lse != -__builtin_inf()) sum -= __builtin_exp(logit - lse) * double(deltas[at]);
    }
  }
  return sum;
}

}  // namespace attn::ATTN_TARGET
