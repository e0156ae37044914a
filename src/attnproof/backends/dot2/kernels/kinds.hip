// Computes: what a boolean mask says about each whole tile: SKIP (sees nothing), FULL (sees everything) or EDGE.
// Grid: one workgroup per (sequence, head, tile of queries, tile of keys); broadcast axes of the mask have one entry.
// Shapes: kinds [kinds B, kinds H, m tiles, n tiles] bytes; bias_B and bias_H hold the first two, splits the n tiles.
// Invariants: entries past the end of the mask are not looked at; a tile is judged by its mask alone.
// Mirror: backends/triton/kernels/summary.py
#include "places.h"

KERNEL(THREADS, 1) void attn_kinds(Args a) {
  __shared__ float seen[2][kRows];
  const int t = thread_index(), y = t / kLanes;
  const u32 at = u32(a.first_group) + u32(group_index());
  const int n0 = at % u32(a.splits) * BLOCK_N, m0 = at / u32(a.splits) % u32(a.tiles) * BLOCK_M;
  const u32 plane = at / u32(a.splits) / u32(a.tiles);
  const u8* keep = a.keep + plane / u32(a.bias_H) * a.keep_b + plane % u32(a.bias_H) * a.keep_h;
  bool some = false, every = true;
  for (int pair = t; pair < BLOCK_M * BLOCK_N; pair += THREADS) {
    const int i = m0 + pair / BLOCK_N, j = n0 + pair % BLOCK_N;
    if (i >= a.M || j >= a.N) continue;
    const bool sees = keep[i * a.keep_m + j * a.keep_n] != 0;
    some = some || sees;
    every = every && sees;
  }
  const float seeing = row_max(some ? 1.0f : 0.0f), hidden = row_max(every ? 0.0f : 1.0f);
  if (t % kLanes == 0) {
    seen[0][y] = seeing;
    seen[1][y] = hidden;
  }
  barrier();
  if (t != 0) return;
  float sees_some = 0.0f, hides_some = 0.0f;
  for (int n = 0; n < kRows; ++n) {
    sees_some = larger(sees_some, seen[0][n]);
    hides_some = larger(hides_some, seen[1][n]);
  }
  ((u8*)a.parts)[at] = sees_some == 0.0f ? SKIP : hides_some == 0.0f ? FULL : EDGE;
}
