// Computes: out and lse of every query from its parts over keys: out = sum 2^(lse_s - top) out_s / total, the sink added.
// Grid: one row of 16 lanes per (sequence, head, query).
// Shapes: parts [B, H, M, splits, HEAD_DV + 1] fp32, each normalised, its lse last.
// Invariants: a part without keys has lse -inf and weight 0.
// Mirror: api.merge
#include "softmax.h"

KERNEL(THREADS, 1) void attn_combine(Args a) {
  const int t = thread_index(), x = t % kLanes, y = t / kLanes;
  const i64 row = (i64(a.first_group) + group_index()) * kRows + y;
  if (row >= i64(a.B) * a.H * a.M) return;
  const int i = row % a.M, h = row / a.M % a.H;
  const i64 b = row / a.M / a.H;
  const float* parts = a.parts + row * a.splits * (HEAD_DV + 1);
  float top = -infinity();
  for (int s = x; s < a.splits; s += kLanes) top = larger(top, parts[s * (HEAD_DV + 1) + HEAD_DV]);
  top = row_max(top);
  const float shift = top == -infinity() ? 0.0f : top;
  float total = 0.0f;
  for (int s = x; s < a.splits; s += kLanes)
    total += exp2_of((parts[s * (HEAD_DV + 1) + HEAD_DV] - shift) * kLog2e);
  const Finished done = finish(top, row_sum(total), load_sink(a, h));
  Stored* to = (Stored*)a.out + b * a.out_b + h * a.out_h + i * a.out_m;
  for (int column = x; column < HEAD_DV; column += kLanes) {
    float sum = 0.0f;
    for (int s = 0; s < a.splits; ++s) {
      const float* part = parts + s * (HEAD_DV + 1);
      sum += part[column] * exp2_of((part[HEAD_DV] - shift) * kLog2e);
    }
    to[column * a.out_d] = Element::narrow(done.dead ? 0.0f : sum * done.factor);
  }
  if (x == 0) a.lse[row] = done.lse;
}
