// The tile steps: load (memory to registers), stage (registers to LDS), dot (LDS to registers), store.
//
// Shapes: a row tile is [rows, kWidth] elements, its rows 16 bytes further apart than they are long; a pair tile is
//   [rows / kPair, kWidth] dwords; weights are [rows, n] of Element::Weight. Thread (x, y) of 16 by kRows holds rows
//   y * kHeight + i and columns x + 16 * j of a product of two row tiles, and columns `column(x, e)` of an accumulator.
// Invariants: a row past the end of its sequence and a column past the head dim are zeros in LDS.
// Mirror: csrc/pack.h, backends/triton/kernels/pieces.py
#pragma once
#include "elements.h"

constexpr int row_stride(int width) { return width * Element::kBytes / 4 + 4; }  // dwords
constexpr int pair_stride(int width) { return width + 4; }
constexpr int weight_stride(int n) { return n * Element::kWeightBytes / 4 + 4; }
constexpr int row_tile(int rows, int width) { return rows * row_stride(width); }
constexpr int pair_tile(int rows, int width) { return rows / Element::kPair * pair_stride(width); }
constexpr int larger_tile(int a, int b) { return a > b ? a : b; }

// rows of one head of one sequence, a stride apart
struct StridedRows {
  const Stored* base;
  i64 row_stride, column_stride;
  METHOD const Stored* at(int row) const { return base + row * row_stride; }
};

// rows of a pool of pages, through one row of the block table
struct PagedRows {
  const Stored* base;
  i64 row_stride, column_stride, page_stride;
  const i32* table;
  METHOD const Stored* at(int row) const {
    return base + table[row / PAGE] * page_stride + row % PAGE * row_stride;
  }
};

// rows that are (query, head of the group) pairs
struct GroupedRows {
  const Stored* base;
  i64 row_stride, column_stride, head_stride;
  int group;
  METHOD const Stored* at(int row) const {
    return base + row / group * row_stride + row % group * head_stride;
  }
};

// 16 bytes of a row from `column` on; zeros past the head dim
template <int kHead>
INLINE u32x4 load_chunk(const Stored* row, int column, i64 column_stride) {
#if WIDE
  return *(const u32x4*)(row + column);
#else
  Stored x[kChunk] __attribute__((aligned(16)));
  UNROLL
  for (int e = 0; e < kChunk; ++e) x[e] = column + e < kHead ? row[(column + e) * column_stride] : Stored(0);
  return *(const u32x4*)x;
#endif
}

template <int kCount>
struct Chunks {
  u32x4 x[kCount];
};

// Which chunks of a tile a thread moves: chunk t, t + THREADS, ...
template <int kTileRows, int kWidth, int kHead>
struct RowMover {
  static constexpr int kAcross = kWidth / kChunk, kTotal = kTileRows * kAcross;
  static constexpr int kEach = (kTotal + THREADS - 1) / THREADS;
  typedef Chunks<kEach> Loaded;

  template <class Source>
  static METHOD void load(Loaded& to, const Source& from, int first, int end, int t) {
    UNROLL
    for (int n = 0; n < kEach; ++n) {
      const int at = t + n * THREADS, row = first + at / kAcross, column = at % kAcross * kChunk;
      const bool inside = row < end && (kTotal % THREADS == 0 || at < kTotal) && (kHead == kWidth || column < kHead);
      to.x[n] = u32x4{0, 0, 0, 0};
      if (inside) to.x[n] = load_chunk<kHead>(from.at(row), column, from.column_stride);
    }
  }

  static METHOD void stage(u32* tile, const Loaded& from, int t) {
    UNROLL
    for (int n = 0; n < kEach; ++n) {
      const int at = t + n * THREADS, row = at / kAcross, column = at % kAcross;
      if (kTotal % THREADS == 0 || at < kTotal)
        *(u32x4*)(tile + row * row_stride(kWidth) + column * 4) = Element::staged(from.x[n]);
    }
  }
};

// The same for pair tiles: a thread moves the same chunk of kPair neighbouring rows and interleaves them.
template <int kTileRows, int kWidth, int kHead>
struct PairMover {
  static constexpr int kPair = Element::kPair;
  static constexpr int kAcross = kWidth / kChunk, kTotal = kTileRows / kPair * kAcross;
  static constexpr int kEach = (kTotal + THREADS - 1) / THREADS;
  typedef Chunks<kEach * kPair> Loaded;

  template <class Source>
  static METHOD void load(Loaded& to, const Source& from, int first, int end, int t) {
    UNROLL
    for (int n = 0; n < kEach * kPair; ++n) {
      const int at = t + n / kPair * THREADS, column = at % kAcross * kChunk;
      const int row = first + at / kAcross * kPair + n % kPair;
      const bool inside = row < end && (kTotal % THREADS == 0 || at < kTotal) && (kHead == kWidth || column < kHead);
      to.x[n] = u32x4{0, 0, 0, 0};
      if (inside) to.x[n] = load_chunk<kHead>(from.at(row), column, from.column_stride);
    }
  }

  static METHOD void stage(u32* tile, const Loaded& from, int t) {
    UNROLL
    for (int n = 0; n < kEach; ++n) {
      const int at = t + n * THREADS, row = at / kAcross, column = at % kAcross * kChunk;
      if (kTotal % THREADS != 0 && at >= kTotal) continue;
      u32* to = tile + row * pair_stride(kWidth) + column;
      if constexpr (kPair == 1) {
        *(u32x4*)to = from.x[n];
      } else {
        const u32x4 even = Element::staged(from.x[2 * n]), odd = Element::staged(from.x[2 * n + 1]);
        *(u32x4*)to = interleave(even[0], odd[0], even[1], odd[1]);
        *(u32x4*)(to + 4) = interleave(even[2], odd[2], even[3], odd[3]);
      }
    }
  }

  // four columns of two rows: low halves of both, then high halves
  static METHOD u32x4 interleave(u32 even0, u32 odd0, u32 even1, u32 odd1) {
    return u32x4{permute<0x05040100>(odd0, even0), permute<0x07060302>(odd0, even0),
                 permute<0x05040100>(odd1, even1), permute<0x07060302>(odd1, even1)};
  }
};

template <int kHeight, int kBreadth>
INLINE void clear(float (&x)[kHeight][kBreadth]) {
  UNROLL
  for (int i = 0; i < kHeight; ++i) {
    UNROLL
    for (int j = 0; j < kBreadth; ++j) x[i][j] = 0.0f;
  }
}

// s = a b^T over kWidth columns of two row tiles
template <int kWidth, int kHeight, int kBreadth>
INLINE void dot_rows(float (&s)[kHeight][kBreadth], const u32* a, const u32* b, int x, int y) {
  clear(s);
#pragma unroll 2
  for (int d = 0; d < kWidth * Element::kBytes / 4; d += 4) {
    u32x4 rows[kHeight], columns[kBreadth];
    UNROLL
    for (int i = 0; i < kHeight; ++i) rows[i] = *(const u32x4*)(a + (y * kHeight + i) * row_stride(kWidth) + d);
    UNROLL
    for (int j = 0; j < kBreadth; ++j) columns[j] = *(const u32x4*)(b + (x + kLanes * j) * row_stride(kWidth) + d);
    UNROLL
    for (int c = 0; c < 4; ++c) {
      UNROLL
      for (int i = 0; i < kHeight; ++i) {
        UNROLL
        for (int j = 0; j < kBreadth; ++j) s[i][j] = Element::dot(rows[i][c], columns[j][c], s[i][j]);
      }
    }
  }
}

// Columns of an accumulator that a thread owns: fours of each 64, then two of a 32, then one of a 16.
template <int kWidth>
struct Columns {
  static constexpr int kEach = kWidth / kLanes, kFours = kWidth / 64;
  static constexpr bool kTwo = kWidth % 64 >= 32, kOne = kWidth % 32 >= 16;
  static constexpr int kTwoAt = kFours * 64, kOneAt = kTwoAt + (kTwo ? 32 : 0);
  static METHOD int column(int x, int e) {
    if (e < kFours * 4) return e / 4 * 64 + x * 4 + e % 4;
    if (kTwo && e < kFours * 4 + 2) return kTwoAt + x * 2 + e % 2;
    return kOneAt + x;
  }
};

// acc += weights x, over the kCount rows of a pair tile
template <int kWidth, int kCount, int kHeight>
INLINE void dot_pairs(float (&acc)[kHeight][kWidth / kLanes], const u32* weights, const u32* x_tile, int x, int y) {
  typedef Columns<kWidth> Own;
  constexpr int kPerRun = 16 / Element::kWeightBytes / Element::kPair;  // pair rows of a 16-byte run of weights
#pragma unroll 1
  for (int n = 0; n < kCount / Element::kPair; n += kPerRun) {
    u32x4 p[kHeight];
    UNROLL
    for (int i = 0; i < kHeight; ++i)
      p[i] = *(const u32x4*)(weights + (y * kHeight + i) * weight_stride(kCount) + n / kPerRun * 4);
    UNROLL
    for (int c = 0; c < kPerRun; ++c) {
      const u32* row = x_tile + (n + c) * pair_stride(kWidth);
      UNROLL
      for (int g = 0; g < Own::kFours; ++g) {
        const u32x4 four = *(const u32x4*)(row + g * 64 + x * 4);
        UNROLL
        for (int i = 0; i < kHeight; ++i) {
          UNROLL
          for (int e = 0; e < 4; ++e) acc[i][g * 4 + e] = Element::weigh(p[i], c, four[e], acc[i][g * 4 + e]);
        }
      }
      if constexpr (Own::kTwo) {
        const u32x2 two = *(const u32x2*)(row + Own::kTwoAt + x * 2);
        UNROLL
        for (int i = 0; i < kHeight; ++i) {
          UNROLL
          for (int e = 0; e < 2; ++e) {
            float& to = acc[i][Own::kFours * 4 + e];
            to = Element::weigh(p[i], c, two[e], to);
          }
        }
      }
      if constexpr (Own::kOne) {
        const u32 one = row[Own::kOneAt + x];
        UNROLL
        for (int i = 0; i < kHeight; ++i) {
          float& to = acc[i][Own::kEach - 1];
          to = Element::weigh(p[i], c, one, to);
        }
      }
    }
  }
}

// the kBreadth weights of one row that a thread holds
template <int kCount, int kBreadth>
INLINE void put_weights(u32* weights, int row, int x, const float (&p)[kBreadth]) {
  Element::Weight* to = (Element::Weight*)(weights + row * weight_stride(kCount)) + x;
  UNROLL
  for (int j = 0; j < kBreadth; ++j) to[j * kLanes] = Element::weight(p[j]);
}

// one row of an accumulator times `factor`, to a row of `kHead` columns in memory
template <int kWidth, int kHead>
INLINE void store_row(Stored* to, i64 column_stride, const float (&acc)[kWidth / kLanes], float factor, int x) {
  typedef Columns<kWidth> Own;
#if WIDE
  UNROLL
  for (int g = 0; g < Own::kFours; ++g) {
    Stored four[4] __attribute__((aligned(4 * Element::kBytes)));
    UNROLL
    for (int e = 0; e < 4; ++e) four[e] = Element::narrow(acc[g * 4 + e] * factor);
    typedef u32 Words __attribute__((ext_vector_type(Element::kBytes)));
    if (kHead == kWidth || g * 64 + x * 4 < kHead) *(Words*)(to + g * 64 + x * 4) = *(const Words*)four;
  }
  constexpr int kFirst = Own::kFours * 4;
#else
  constexpr int kFirst = 0;
#endif
  UNROLL
  for (int e = kFirst; e < Own::kEach; ++e) {
    const int column = Own::column(x, e);
    if (kHead == kWidth || column < kHead) to[column * column_stride] = Element::narrow(acc[e] * factor);
  }
}
