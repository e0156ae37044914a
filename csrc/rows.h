// Where rows live: dense, packed, cached or paged; the head map; and what each lane of a row tile may see.
//
// A row tile is a run of (query, head-of-the-group) pairs of one key/value head, query-major: lane r of the tile is
// query (first + r) / G and head hk * G + (first + r) % G. Keys packed once serve every head of the group, and lanes
// that stand together see almost the same keys.
#pragma once

#include "args.h"
#include "pack.h"

namespace attn::ATTN_TARGET {

inline constexpr int kTileKeys = 128;  // keys of a tile: boundaries are multiples of it, so results do not depend on
                                       // how rows are grouped
inline constexpr int kMaxRows = 768;   // a multiple of every block width
inline constexpr int kChunk = 4;       // backward: blocks whose p and dS are kept for dV and dK
inline constexpr int kGroupTiles = 2;  // backward: key tiles of one dK and dV item
// keys between two value panels: not a power of two, so that panels do not fall on the same cache sets
inline constexpr int kPanelKeys = kTileKeys + 4;
inline constexpr int kWords = kTileKeys / 32;

template <class T>
inline constexpr int kBlock = kMaxVecs * kLanes<T>;
template <class T>
inline constexpr int kMaxBlocks = kMaxRows / kBlock<T> + 1;

// one sequence of the batch
struct Sequence {
  long b, M, N;
  long q0, k0;  // packed: first token
  bool packed;
};

inline Sequence sequence_of(const Args& a, long b) {
  if (a.rows == RowKind::packed) {
    const long q0 = a.cu_q[b], k0 = a.cu_k[b];
    return {b, a.cu_q[b + 1] - q0, a.cu_k[b + 1] - k0, q0, k0, true};
  }
  const long N = a.lengths ? min_of(a.lengths[b], a.N) : a.N;
  return {b, a.M, N, 0, 0, false};
}

template <class T>
ATTN_INLINE T* step(T* p, long bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<char*>(p) + bytes);
}
template <class T>
ATTN_INLINE const T* step(const T* p, long bytes) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(p) + bytes);
}
// a value that may stand anywhere
template <class T>
ATTN_INLINE T read(const char* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// row (head, i) of a dense or packed view; distances in bytes
template <class In>
struct RowsOf {
  In* base;
  long head, row, element;
  ATTN_INLINE In* at(long h, long i) const { return step(base, h * head + i * row); }
};

template <class In>
inline RowsOf<In> rows_of(const View& v, const Sequence& seq, long first) {
  In* data = reinterpret_cast<In*>(v.data);
  if (seq.packed) return {step(data, first * v.s[1]), long(v.s[0]), long(v.s[1]), long(v.s[2])};
  return {step(data, seq.b * v.s[0]), long(v.s[1]), long(v.s[2]), long(v.s[3])};
}

inline long lse_index(const Args& a, const Sequence& seq, long h, long i) {
  return seq.packed ? h * a.total_q + seq.q0 + i : (seq.b * a.H + h) * a.M + i;
}

// pointers to keys [first, first + count) of one key/value head
template <class In>
inline void key_rows(const Args& a, const View& v, const Sequence& seq, long hk, long first, long count,
                     const In** rows) {
  if (a.rows == RowKind::paged) {
    const In* pool = reinterpret_cast<const In*>(v.data);
    const char* table = a.block_table.data + seq.b * a.block_table.s[0];
    for (long j = 0; j < count; ++j) {
      const long at = first + j, page = read<int32_t>(table + at / a.page * a.block_table.s[1]);
      rows[j] = step(pool, page * v.s[0] + hk * v.s[1] + at % a.page * v.s[2]);
    }
    return;
  }
  const RowsOf<In> all = rows_of<In>(v, seq, seq.k0);
  const In* row = all.at(hk, first);
  for (long j = 0; j < count; ++j) rows[j] = step(row, j * all.row);
}

// distance of neighbouring channels in bytes
ATTN_INLINE long element_stride(const Args& a, const View& v) { return v.s[a.rows == RowKind::packed ? 2 : 3]; }

// up to kMaxVecs vectors of lanes that are computed together
struct Block {
  int first, lanes, vecs;
  int32_t lo, hi;            // some lane sees some key of [lo, hi)
  int32_t full_lo, full_hi;  // every lane sees every key of [full_lo, full_hi); empty where a lane is dead
};

template <class T>
struct Lanes {
  long count, blocks;
  long key_lo, key_hi;  // union over the tile
  Int<T> pos[kMaxRows];  // query position on the key axis, bottom-right aligned
  T slope[kMaxRows];
  int32_t lo[kMaxRows], hi[kMaxRows], query[kMaxRows], head[kMaxRows];
  const char *bias[kMaxRows], *keep[kMaxRows];
  Block block[kMaxBlocks<T>];
};

// half-open interval of keys that query i sees: band, corner, explicit bounds, valid length
inline void visible_keys(const Args& a, const Sequence& seq, long i, int32_t* lo, int32_t* hi) {
  const long pos = i + seq.N - seq.M;
  long first = a.left >= kUnbounded ? 0 : max_of(0, pos - a.left);
  long last = a.right >= kUnbounded ? seq.N : min_of(seq.N, pos + a.right + 1);
  if (a.top_left) last = min_of(last, i + 1);
  if (a.bounds.data) {
    const char* at = a.bounds.data;
    at += seq.packed ? (seq.q0 + i) * a.bounds.s[0] : seq.b * a.bounds.s[0] + i * a.bounds.s[1];
    first = max_of(first, read<int32_t>(at));
    last = min_of(last, read<int32_t>(at + a.bounds.s[seq.packed ? 1 : 2]));
  }
  const bool dead = first >= last;
  *lo = dead ? 0 : int32_t(first);
  *hi = dead ? 0 : int32_t(last);
}

template <class T>
inline void close_block(Lanes<T>& t, Block& block) {
  block.lo = block.full_lo = block.full_hi = block.hi = 0;
  for (int r = block.first; r < block.first + block.lanes; ++r) {
    const bool dead = t.lo[r] >= t.hi[r], opening = r == block.first;
    if (!dead) {
      block.lo = block.hi == 0 ? t.lo[r] : int32_t(min_of(block.lo, t.lo[r]));
      block.hi = int32_t(max_of(block.hi, t.hi[r]));
    }
    block.full_lo = opening ? t.lo[r] : int32_t(max_of(block.full_lo, t.lo[r]));
    block.full_hi = opening ? t.hi[r] : int32_t(min_of(block.full_hi, t.hi[r]));
  }
  // the tail block takes only the vectors that it needs, in units of four lanes (the packers work in fours)
  constexpr int L = kLanes<T>;
  block.vecs = int(round_up(round_up(block.lanes, 4), L)) / L;
}

// fills the tile of `count` rows from row `first` of (sequence, key/value head); with `only` the rows of that one head
template <class T>
inline void fill_lanes(const Args& a, const Sequence& seq, long hk, long first, long count, Lanes<T>& t,
                       long only = -1) {
  const long G = only < 0 ? a.H / a.Hkv : 1;
  t.count = count;
  t.blocks = 0;
  for (long r = 0; r < count; ++r) {
    const long i = (first + r) / G, h = only < 0 ? hk * G + (first + r) % G : only;
    t.query[r] = int32_t(i);
    t.head[r] = int32_t(h);
    t.pos[r] = Int<T>(i + seq.N - seq.M);
    visible_keys(a, seq, i, &t.lo[r], &t.hi[r]);
    if (a.slopes.data)
      t.slope[r] = read<T>(a.slopes.data + seq.b * a.slopes.s[0] + h * a.slopes.s[1]);
    if (a.bias.data)
      t.bias[r] = a.bias.data + seq.b * a.bias.s[0] + h * a.bias.s[1] + i * a.bias.s[2];
    if (a.keep.data) t.keep[r] = a.keep.data + seq.b * a.keep.s[0] + h * a.keep.s[1] + i * a.keep.s[2];
  }
  t.key_lo = seq.N;
  t.key_hi = 0;
  for (long r = 0; r < count; r += kBlock<T>) {
    Block& block = t.block[t.blocks++];
    block.first = int(r);
    block.lanes = int(min_of(kBlock<T>, count - r));
    close_block(t, block);
    for (long u = r + block.lanes; u < r + block.vecs * kLanes<T>; ++u) {  // padding lanes see nothing
      t.lo[u] = t.hi[u] = t.query[u] = t.head[u] = 0;
      t.pos[u] = 0;
      t.slope[u] = 0;
      t.bias[u] = t.keep[u] = nullptr;
    }
    if (block.hi > block.lo) {
      t.key_lo = min_of(t.key_lo, block.lo);
      t.key_hi = max_of(t.key_hi, block.hi);
    }
  }
}

// what a block does with a tile of keys [t0, t0 + count)
struct Range {
  long begin, end;  // keys of the tile that are computed, multiples of kPanel; empty: skip
  bool masked;
};

inline Range range_of(const Block& block, long t0, long count, bool keep) {
  const long lo = max_of(block.lo, t0), hi = min_of(block.hi, t0 + count);
  if (lo >= hi) return {0, 0, false};
  const long begin = (lo - t0) / kPanel * kPanel, end = round_up(hi - t0, kPanel);
  return {begin, end, keep || block.full_lo > t0 + begin || block.full_hi < t0 + end};
}

// thirty-two keys of one row of the keep predicate as bits
inline uint32_t keep_bits(const uint8_t* p, long stride, long count) {
  uint32_t bits = 0;
  if (stride == 1 && count == 32) {
    for (int w = 0; w < 4; ++w) {
      uint64_t x;
      std::memcpy(&x, p + 8 * w, 8);
      bits |= uint32_t((x * 0x0102040810204080ull) >> 56) << (8 * w);  // torch stores a bool as 0 or 1
    }
    return bits;
  }
  for (long j = 0; j < count; ++j) bits |= uint32_t(p[j * stride] != 0) << j;
  return bits;
}

// bits[word][lane]: does the lane see key t0 + 32 * word + bit?
template <class T>
inline void mask_bits(const Args& a, const Lanes<T>& t, const Block& block, long t0, Range range, long keys,
                      Int<T>* bits) {
  const int width = block.vecs * kLanes<T>;
  for (int r = 0; r < width; ++r) {
    const long lo = t.lo[block.first + r] - t0, hi = t.hi[block.first + r] - t0;
    for (long w = range.begin / 32; w * 32 < range.end; ++w) {
      const long from = max_of(lo - w * 32, 0), to = min_of(hi - w * 32, 32);
      uint32_t word = 0;
      if (from < to) {
        word = uint32_t((uint64_t(1) << to) - (uint64_t(1) << from));
        if (a.keep.data)
          word &= keep_bits(reinterpret_cast<const uint8_t*>(t.keep[block.first + r]) + (t0 + w * 32) * a.keep.s[3],
                            a.keep.s[3], min_of(32, keys - w * 32));
      }
      bits[w * width + r] = Int<T>(int32_t(word));
    }
  }
}

}  // namespace attn::ATTN_TARGET
