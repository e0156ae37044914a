// Computes: what a boolean mask says about each whole tile: SKIP (sees nothing), FULL (sees everything) or EDGE.
// Grid: one workgroup per (sequence, head, tile of queries, tile of keys); broadcast axes of the mask have one entry.
// Shapes: kinds [kinds B, kinds H, m tiles, n tiles] bytes; bias_B and bias_H hold the first two, splits the n tiles.
// Invariants: entries past the end of the mask are not looked at; a tile is judged by its mask alone.
// Mirror: backends/triton/kernels/summary.py
#include "places.h"

KERNEL(THREADS, 1) void attn_kinds(Args a) {
  __shared__ u32 seen[2];
  const int t = thread_index();
  const u32 at = u32(a.first_group) + u32(group_index());
  const int n0 = at % u32(a.splits) * BLOCK_N, m0 = at / u32(a.splits) % u32(a.tiles) * BLOCK_M;
  const u32 plane = at / u32(a.splits) / u32(a.tiles);
  const u8* keep = a.keep + plane / u32(a.bias_H) * a.keep_b + plane % u32(a.bias_H) * a.keep_h;
  if (t < 2) seen[t] = 0;
  barrier();
  bool some = false, every = true;
  for (int pair = t; pair < BLOCK_M * BLOCK_N; pair += THREADS) {
    const int i = m0 + pair / BLOCK_N, j = n0 + pair % BLOCK_N;
    if (i >= a.M || j >= a.N) continue;
    const bool sees = keep[i * a.keep_m + j * a.keep_n] != 0;
    some = some || sees;
    every = every && sees;
  }
  // every writer writes the same word
  if (some) seen[0] = 1;
  if (!every) seen[1] = 1;
  barrier();
  if (t == 0) ((u8*)a.parts)[at] = seen[0] == 0 ? SKIP : seen[1] == 0 ? FULL : EDGE;
}
