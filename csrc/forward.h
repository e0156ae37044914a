// Forward of one work item: a row tile of one key/value head against its keys (or one split of them).
//
// Computes: for tile in keys: pack k, v; for block of lanes: S^T = K Q^T, scores, keep, online softmax, O^T += V^T P^T;
//   at the end out = O / l and lse = m + ln l.
// Shapes: Q^T [block][D][lane], K panels [key group][D][kPanel], V panels [channel group][key][kPanel], S^T [key][lane],
//   O^T [block][channel][lane]; scratch is O(tile).
// Invariants: key tiles start at multiples of kTileKeys, so the bits of a row do not depend on the rows beside it; after
//   tile j l = sum(p) and O = sum(p v) relative to m.
// Mirror: backends/streaming.py, _queries_outer.
#pragma once

#include <type_traits>

#include "narrow.h"
#include "plan.h"
#include "tile.h"

namespace attn::ATTN_TARGET {

// products of the accumulator type; the other choice is a matrix unit (amx.h)
struct Wide {};

template <class In, class Unit = Wide>
struct Forward {
  using T = Acc<In>;
  static constexpr bool kUnit = !std::is_same_v<Unit, Wide>;
  const Args& a;
  const Plan& plan;
  long Dvp;
  ScoreKinds kinds;
  bool narrow;
  Lanes<T>* lanes;
  TileInputs<In> inputs;
  T *qt, *o, *m, *l, *alpha, *kp, *vp, *s, *other_s, *rowbuf, *result;
  const In **krow, **vrow, **next_k;
  bool plain;                     // no modifiers, no dropout: whole tiles of whole blocks overlap
  Waiting<T>* waiting;
  const Block* waiting_block = nullptr;
  Unit unit;
  bool wide_queries = false;      // are the queries there for wide products?

  Forward(const Args& args, const Plan& p, Arena& arena) : a(args), plan(p) {
    kinds = score_kinds(a);
    narrow = use_narrow<In>(a);
    Dvp = padded_channels(a);
    const long rows = plan.rows, W = kBlock<T>;
    lanes = arena.take<Lanes<T>>(1);
    qt = arena.take<T>(max_of(rows, kNarrowRows) * round_up(a.D, kPair));
    o = arena.take<T>(rows * Dvp);
    m = arena.take<T>(rows);
    l = arena.take<T>(rows);
    alpha = arena.take<T>(W);
    kp = arena.take<T>(narrow ? 0 : kTileKeys * a.D);
    vp = arena.take<T>(narrow ? 0 : kPanelKeys * Dvp);
    s = arena.take<T>(kTileKeys * W);
    plain = !narrow && !kinds.any() && a.dropout_p == 0;
    if constexpr (kUnit) {
      plain = plain && a.scale > 0;
      unit.allocate(a, rows, arena);
    }
    other_s = arena.take<T>(plain ? kTileKeys * W : 0);
    waiting = arena.take<Waiting<T>>(1);
    rowbuf = arena.take<T>(4 * max_of(max_of(a.D, Dvp), kTileKeys));
    result = arena.take<T>(max_of(W, kNarrowRows) * Dvp);
    inputs.allocate(a, arena, rowbuf);
    krow = arena.take<const In*>(3 * kTileKeys);  // one after the other, as `Ahead` reads them
    vrow = krow + kTileKeys;
    next_k = vrow + kTileKeys;
  }

  void run(const Item& item, char* partial) {
    const Sequence seq = sequence_of(a, item.b);
    fill_lanes(a, seq, item.hk, item.first, item.rows, *lanes);
    load_queries(seq);
    waiting->s = nullptr;
    if constexpr (kUnit) unit.start();
    start(item.split == 0 && !partial);
    const long begin = max_of(lanes->key_lo, item.key_begin), end = min_of(lanes->key_hi, item.key_end);
    for (long t0 = begin / kTileKeys * kTileKeys; t0 < end; t0 += kTileKeys) tile(seq, item.hk, t0);
    if (partial)
      save(partial);
    else
      finish(seq);
  }

  // joins the splits of one row tile, in order
  void merge(const Item& item, const char* partials, long bytes) {
    const Sequence seq = sequence_of(a, item.b);
    fill_lanes(a, seq, item.hk, item.first, item.rows, *lanes);
    start(true);
    for (long split = 0; split < item.splits; ++split) absorb(partials + split * bytes);
    finish(seq);
  }

  static size_t partial_bytes(const Args& a, const Plan& plan) {
    return size_t(plan.rows * (padded_channels(a) + 2)) * sizeof(T);
  }

 private:
  static long padded_channels(const Args& a) {
    if constexpr (kUnit) return round_up(a.Dv, 2 * kPanel);
    return round_up(a.Dv, use_narrow<In>(a) ? kPair : kPanel);
  }

  void load_queries(const Sequence& seq) {
    if constexpr (kUnit) {
      const RowsOf<const In> rows = rows_of<const In>(a.q, seq, seq.q0);
      for (long k = 0; k < lanes->blocks; ++k) {
        const Block& block = lanes->block[k];
        const In* row[kBlock<T>];
        for (int r = 0; r < block.lanes; ++r)
          row[r] = rows.at(lanes->head[block.first + r], lanes->query[block.first + r]);
        unit.load_queries(k, block, row, rows.element, a.D);
      }
    } else {
      load_wide_queries(seq);
    }
  }

  void load_wide_queries(const Sequence& seq) {
    wide_queries = true;
    const RowsOf<const In> rows = rows_of<const In>(a.q, seq, seq.q0);
    const T scale = T(a.scale);
    for (long k = 0; k < lanes->blocks; ++k) {
      const Block& block = lanes->block[k];
      const In* row[kBlock<T>];
      for (int r = 0; r < block.lanes; ++r)
        row[r] = rows.at(lanes->head[block.first + r], lanes->query[block.first + r]);
      if (narrow) {
        load_narrow(row, block.lanes, rows.element, a.D, scale, qt, rowbuf);
        continue;
      }
      T* out = qt + block.first * a.D;
      const long width = block.vecs * kLanes<T>;
      interleave(row, block.lanes, rows.element, a.D, out, width, rowbuf);
      for (long r = round_up(block.lanes, 4); r < width; r += 1)
        for (long x = 0; x < a.D; ++x) out[x * width + r] = 0;
      for (long x = 0; x < a.D * width; x += kLanes<T>) store(out + x, load(out + x) * scale);
    }
  }

  // the empty state, or the sink as a first logit without a value
  void start(bool with_sink) {
    std::memset(o, 0, size_t(plan.rows * Dvp) * sizeof(T));
    for (long r = 0; r < plan.rows; ++r) {
      m[r] = -T(__builtin_inf());
      l[r] = 0;
    }
    if (!a.sink.data || !with_sink) return;
    for (long r = 0; r < lanes->count; ++r) {
      const T logit = sink_at<In>(a, lanes->head[r]);
      if (logit == -T(__builtin_inf())) continue;
      m[r] = logit;
      l[r] = 1;
    }
  }

  void tile(const Sequence& seq, long hk, long t0) {
    const long keys = min_of(kTileKeys, seq.N - t0);
    key_rows(a, a.k, seq, hk, t0, keys, krow);
    key_rows(a, a.v, seq, hk, t0, keys, vrow);
    KeySide<T> side{kp, 0};
    bool tile_fits = false;  // are the products of this tile for the unit?
    if constexpr (kUnit) {
      tile_fits = unit.load_tile(krow, element_stride(a, a.k), a.D, vrow, element_stride(a, a.v), a.Dv, keys);
      if ((!tile_fits || unit.unfit_queries) && !wide_queries) load_wide_queries(seq);
    }
    if (narrow) {
      look_ahead(seq, hk, t0, keys);
    } else if (!tile_fits || wide_queries) {
      if (!rows_serve(keys, &side)) pack_keys(krow, keys, element_stride(a, a.k), a.D, kp, rowbuf);
      pack_values(vrow, keys, element_stride(a, a.v), a.Dv, kPanelKeys, vp, rowbuf);
    }
    const long ahead = narrow ? 0 : next_rows(seq, hk, t0 + kTileKeys);
    for (long k = 0; k < lanes->blocks; ++k) {
      prefetch(ahead * k / lanes->blocks, ahead * (k + 1) / lanes->blocks);
      const Block& block = lanes->block[k];
      const Range range = range_of(block, t0, kTileKeys, a.keep.data != nullptr);
      bool fits = false;
      if constexpr (kUnit) fits = tile_fits && unit.fit[k];
      const bool whole = plain && !range.masked && range.end - range.begin == kTileKeys && block.vecs == kMaxVecs;
      if (whole && fits == kUnit) {
        overlap(block, side);
      } else if (range.begin < range.end) {
        settle();
        step(seq, block, side, t0, keys, range, fits);
      }
    }
    settle();
  }

  // may the products read the keys where they are? A panel more than a few pages long would fall on few cache sets
  bool rows_serve(long keys, KeySide<T>* side) const {
    if constexpr (kIsHalf<In>) return false;
    constexpr long kElement = sizeof(T), kFar = 1024;  // bytes
    const long row = keys > 1 ? reinterpret_cast<const char*>(krow[1]) - reinterpret_cast<const char*>(krow[0]) : 0;
    if (a.rows == RowKind::paged || keys < kTileKeys || row <= 0 || row > kFar || row % kElement) return false;
    if (element_stride(a, a.k) != kElement || reinterpret_cast<uintptr_t>(krow[0]) % kElement) return false;
    *side = {reinterpret_cast<const T*>(krow[0]), row / kElement};
    return true;
  }

  // scores of this block beside the exponentials of the one that waits, which is finished then; this one waits next
  void overlap(const Block& block, KeySide<T> side) {
    if constexpr (kUnit)
      return unit.overlap(unit.queries(block.first), m + block.first, l + block.first, o + block.first * Dvp);
    T* mine = waiting->s == s ? other_s : s;
    T* top = alpha;
    std::memcpy(top, m + block.first, sizeof(T) * kBlock<T>);
    Blocks<T>::scores_beside(side, a.D, qt + block.first * a.D, mine, top, *waiting, waiting->sum);
    if (waiting->s) add_values();
    open_waiting<T>(*waiting, mine, top, m + block.first);
    waiting_block = &block;
  }

  void settle() {
    if constexpr (kUnit) return unit.settle();
    if (!waiting->s) return;
    Blocks<T>::all_exponentials(*waiting);
    add_values();
  }

  void add_values() {
    const Range all{0, kTileKeys, false};
    const long first = waiting_block->first;
    Blocks<T>::values(kMaxVecs, vp, Dvp, all, waiting->s, waiting->alpha, o + first * Dvp);
    close_waiting<T>(*waiting, l + first);
  }

  // the rows that `Ahead` reads; where there is none, any address will do: it is only prefetched
  void look_ahead(const Sequence& seq, long hk, long t0, long keys) {
    const long next = min_of(kTileKeys, min_of(lanes->key_hi, seq.N) - t0 - kTileKeys);
    if (next > 0) key_rows(a, a.k, seq, hk, t0 + kTileKeys, next, next_k);
    for (long j = max_of(next, 0); j < kTileKeys; ++j) next_k[j] = krow[0];
    for (long j = keys; j < kTileKeys; ++j) krow[j] = vrow[j] = krow[0];
  }

  // rows of the tile after this one; their number
  long next_rows(const Sequence& seq, long hk, long t0) {
    const long keys = min_of(kTileKeys, min_of(lanes->key_hi, seq.N) - t0);
    if (keys <= 0) return 0;
    key_rows(a, a.k, seq, hk, t0, keys, krow);
    key_rows(a, a.v, seq, hk, t0, keys, vrow);
    return keys;
  }

  // they travel to L2 while this tile is computed, a few with each block
  void prefetch(long begin, long end) const {
    for (long j = begin; j < end; ++j) {
      const char *k = reinterpret_cast<const char*>(krow[j]), *v = reinterpret_cast<const char*>(vrow[j]);
      for (long byte = 0; byte < a.D * long(sizeof(In)); byte += 64) __builtin_prefetch(k + byte, 0, 2);
      for (long byte = 0; byte < a.Dv * long(sizeof(In)); byte += 64) __builtin_prefetch(v + byte, 0, 2);
    }
  }

  void step(const Sequence& seq, const Block& block, KeySide<T> side, long t0, long keys, Range range, bool in_unit) {
    const T* q = qt + block.first * a.D;
    T* out = o + block.first * Dvp;
    if constexpr (kUnit)
      if (in_unit) {
        unit.scores(block.vecs, unit.queries(block.first), range, s);
        softmax(seq, block, t0, keys, range);
        return unit.values(block.vecs, range, s, alpha, out);
      }
    if (!narrow) {
      Blocks<T>::scores(block.vecs, side, a.D, q, range, s);
      softmax(seq, block, t0, keys, range);
      Blocks<T>::values(block.vecs, vp, kUnit ? round_up(a.Dv, kPanel) : Dvp, range, s, alpha, out);
      return;
    }
    const long valid = min_of(range.end, keys);
    scores_narrow<In>(block.vecs, krow, {krow, a.D, a.Dv}, valid, range, q, block.lanes, a.D, s);
    softmax(seq, block, t0, keys, range);
    values_narrow<In>(block.vecs, vrow, {vrow, a.Dv, a.D}, valid, range, s, block.lanes, a.Dv, alpha, result, out);
  }

  void softmax(const Sequence& seq, const Block& block, long t0, long keys, Range range) {
    const Prepared<T> in = inputs.prepare(a, seq, *lanes, block, t0, keys, range);
    const SoftmaxTile<T> t{s,        range.begin,     range.end,       in.bits, in.factor,
                           m + block.first, l + block.first, alpha, in.scores};
    Blocks<T>::softmax(block.vecs, kinds, t);
  }

  void finish(const Sequence& seq) {
    const RowsOf<In> rows = rows_of<In>(a.out, seq, seq.q0);
    T* lse = reinterpret_cast<T*>(a.lse);
    for (long k = 0; k < lanes->blocks; ++k) {
      const Block& block = lanes->block[k];
      const long width = block.vecs * kLanes<T>;
      const T* from = o + block.first * Dvp;
      for (long x = 0; x < Dvp && !narrow; x += 4) {
        const T* quad[4] = {from + x * width, from + (x + 1) * width, from + (x + 2) * width, from + (x + 3) * width};
        interleave4(quad, block.lanes, result + x, Dvp);
      }
      for (long r = 0; r < block.lanes && narrow; ++r)
        for (long x = 0; x < Dvp; ++x) result[r * Dvp + channel_at<In>(x)] = o[r * Dvp + x];
      for (int r = 0; r < block.lanes; ++r) {
        const long at = block.first + r, h = lanes->head[at], i = lanes->query[at];
        const bool dead = l[at] == 0;
        const T sum = dead ? T(1) : l[at];
        T* row = result + r * Dvp;
        for (long x = 0; x < Dvp; ++x) row[x] /= sum;
        narrow_row(row, a.Dv, rows.at(h, i), rows.element);
        lse[lse_index(a, seq, h, i)] = dead ? -T(__builtin_inf()) : T(m[at] + T(__builtin_log(l[at])));
      }
    }
  }

  void save(char* partial) const {
    T* to = reinterpret_cast<T*>(partial);
    std::memcpy(to, o, size_t(plan.rows * Dvp) * sizeof(T));
    std::memcpy(to + plan.rows * Dvp, m, size_t(plan.rows) * sizeof(T));
    std::memcpy(to + plan.rows * (Dvp + 1), l, size_t(plan.rows) * sizeof(T));
  }

  void absorb(const char* partial) {
    const T* from = reinterpret_cast<const T*>(partial);
    const T *m2 = from + plan.rows * Dvp, *l2 = m2 + plan.rows;
    T mine[kBlock<T>], other[kBlock<T>];  // factors per lane
    for (long k = 0; k < lanes->blocks; ++k) {
      const Block& block = lanes->block[k];
      const long width = block.vecs * kLanes<T>;
      for (long r = 0; r < width; r += kLanes<T>) {
        const long at = block.first + r;
        const Vec<T> a1 = load(m + at), a2 = load(m2 + at), top = max_keep<T>(a1, a2);
        const Vec<T> shift = select<T>(top == -infinity<T>(), Vec<T>{}, top);
        const Vec<T> x = exp_of<T>(a1 - shift), y = exp_of<T>(a2 - shift);
        store(m + at, top);
        store(l + at, fma<T>(load(l + at), x, load(l2 + at) * y));
        store(mine + r, x);
        store(other + r, y);
      }
      T* to = o + block.first * Dvp;
      const T* add = from + block.first * Dvp;
      for (long c = 0; c < width * Dvp; ++c) {
        const long r = narrow ? c / Dvp : c % width;
        to[c] = to[c] * mine[r] + add[c] * other[r];
      }
    }
  }
};

}  // namespace attn::ATTN_TARGET
