// What every kernel of this folder is given, by value. arguments.py reads this file and packs the bytes from it.
//
// Invariants: pointers and strides first, then 32-bit numbers, so that the struct has no holes; an axis that a tensor
//   does not have, or is broadcast over, has stride 0; strides are in elements.
// Shapes: axes b, h, m (query), n (key), d (column); kinds is one byte per tile of the mask (SKIP, EDGE, FULL); lse, delta and dlse are [B, H, M], packed [H, Tq].
#pragma once
#include "device.h"

struct Args {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;
  float* parts;
  const void* bias;
  const u8* keep;
  const u8* kinds;
  const float* slopes;
  const void* sink;
  const i32* bounds;
  const i64* rng;
  const i32* cu_q;
  const i32* cu_k;
  const i32* lengths;
  const i32* table;
  const void* dout;
  float* delta;
  const float* dlse;
  void* dq;
  void* dk;
  void* dv;
  float* dbias;
  i64 q_b, q_h, q_m, q_d;
  i64 k_b, k_h, k_n, k_d;
  i64 v_b, v_h, v_n, v_d;
  i64 out_b, out_h, out_m, out_d;
  i64 dout_b, dout_h, dout_m, dout_d;
  i64 dq_b, dq_h, dq_m, dq_d;
  i64 dk_b, dk_h, dk_n, dk_d;
  i64 dv_b, dv_h, dv_n, dv_d;
  i64 bias_b, bias_h, bias_m, bias_n;
  i64 keep_b, keep_h, keep_m, keep_n;
  i64 kinds_b, kinds_h, kinds_m;
  i64 slopes_b, slopes_h;
  i64 sink_h;
  i64 bounds_b, bounds_m;
  i64 table_b;
  i64 lse_b, lse_h;
  i64 dlse_b, dlse_h, dlse_m;
  i32 M, N, B, H, Hkv, G;
  i32 left, right, top_left;
  i32 tiles, splits, first_group;
  i32 bias_B, bias_H, bias_M, bias_N;
  u32 threshold;
  i32 drop_all;
  float scale, cap, inverse_cap, inverse_keep;
};
