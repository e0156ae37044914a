// Compile-time facts of one variant, given as -D; what is left out is off.
//
// Invariants: widths are padded to 16 columns, and the padding holds zeros in LDS and is never stored.
#pragma once

#ifndef DTYPE  // 0 fp16, 1 bf16 by fp32 FMA, 2 fp32, 3 bf16 narrowed to fp16
#define DTYPE 0
#endif
#ifndef HEAD_D
#define HEAD_D 128
#endif
#ifndef HEAD_DV
#define HEAD_DV HEAD_D
#endif
#ifndef BLOCK_M
#define BLOCK_M 64
#endif
#ifndef BLOCK_N
#define BLOCK_N 32
#endif
#ifndef THREADS
#define THREADS 256
#endif
#ifndef WAVES  // waves per SIMD that the register budget must allow
#define WAVES 2
#endif
#ifndef WIDE  // every row starts at a multiple of 16 bytes and its columns are contiguous
#define WIDE 1
#endif
#ifndef ROWS  // 0 dense, 1 packed, 2 cached, 3 paged
#define ROWS 0
#endif
#ifndef PAGE
#define PAGE 1
#endif
#ifndef GROUPED  // a tile's rows are (query, head of the group) pairs: decode
#define GROUPED 0
#endif
#ifndef SPLIT  // results are parts over keys, to be combined
#define SPLIT 0
#endif
#ifndef FOLD  // scores stay raw products, and the scale is in the exponent
#define FOLD 0
#endif
#ifndef BANDED
#define BANDED 0
#endif
#ifndef KEEP
#define KEEP 0
#endif
#ifndef BOUNDS
#define BOUNDS 0
#endif
#ifndef BIAS  // 0 none, 1 in the dtype of q, 2 fp32
#define BIAS 0
#endif
#ifndef ALIBI
#define ALIBI 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef SINK
#define SINK 0
#endif
#ifndef DROPOUT
#define DROPOUT 0
#endif
#ifndef DLSE  // the caller has a gradient of lse
#define DLSE 0
#endif
#ifndef SLOPES  // the gradient of the ALiBi slopes is wanted
#define SLOPES 0
#endif
#ifndef SUM_M  // the bias has one row, or one column, for all
#define SUM_M 0
#endif
#ifndef SUM_N
#define SUM_N 0
#endif

enum { DENSE = 0, PACKED = 1, CACHED = 2, PAGED = 3 };

constexpr int padded(int width) { return width <= 16 ? 16 : (width + 15) / 16 * 16; }

constexpr int kD = padded(HEAD_D), kDv = padded(HEAD_DV);
constexpr int kLanes = 16;               // threads along the columns of a score tile: one DPP row
constexpr int kRows = THREADS / kLanes;  // threads along its rows
