// Computes: delta = rowsum(out dout) - dlse of every query; and, by attn_dsink, -sum e^(sink - lse) delta of every head.
// Grid: attn_stats one row of 16 lanes per query; attn_dsink one workgroup per head.
// Shapes: out and dout as planes of M rows (packed: one plane per head); delta like lse; parts [H].
// Invariants: a dead row (lse -inf) has no gradient of lse and no weight for the sink; sums run in a fixed order.
// Mirror: backends/streaming.py
#include "softmax.h"

KERNEL(THREADS, 1) void attn_stats(Args a) {
  const int t = thread_index(), x = t % kLanes, y = t / kLanes;
  const i64 at = (i64(a.first_group) + group_index()) * kRows + y;
  if (at >= i64(a.B) * a.H * a.M) return;
  const i64 i = at % a.M, h = at / a.M % a.H, b = at / a.M / a.H;
  const Stored* out = (const Stored*)a.out + b * a.out_b + h * a.out_h + i * a.out_m;
  const Stored* dout = (const Stored*)a.dout + b * a.dout_b + h * a.dout_h + i * a.dout_m;
  float sum = 0.0f;
  for (int column = x; column < HEAD_DV; column += kLanes)
    sum += Element::wide(out[column * a.out_d]) * Element::wide(dout[column * a.dout_d]);
  sum = row_sum(sum);
  if (x != 0) return;
#if DLSE
  const float dlse = a.dlse[b * a.dlse_b + h * a.dlse_h + i * a.dlse_m];
  if (a.lse[at] != -infinity()) sum -= dlse;
#endif
  a.delta[at] = sum;
}

#if SINK
KERNEL(THREADS, 1) void attn_dsink(Args a) {
  __shared__ float sums[THREADS];
  const int t = thread_index(), h = a.first_group + group_index();
  const float sink = load_sink(a, h);
  float sum = 0.0f;
  for (i64 row = t; row < i64(a.B) * a.M; row += THREADS) {
    const i64 at = (row / a.M * a.H + h) * a.M + row % a.M;
    const float lse = a.lse[at];
    if (lse != -infinity()) sum -= exp2_of((sink - lse) * kLog2e) * a.delta[at];
  }
  sums[t] = sum;
  barrier();
  for (int step = THREADS / 2; step > 0; step /= 2) {
    if (t < step) sums[t] += sums[t + step];
    barrier();
  }
  if (t == 0) a.parts[h] = sums[0];
}
#endif
