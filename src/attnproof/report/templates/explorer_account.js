// The live account. Mirror: ledger/explore.py, function for function; a test compares both on random settings.
"use strict";

const KIB = 1024, MIB = 1024 * 1024;

// settings: n, d, heads, size (bytes of an element), causal, sram (KiB), bandwidth (GB/s), products (TFLOP/s),
// exps (1e12 a second), l2 (MiB)
function tile(s) {
  const elements = Math.floor((s.sram * KIB) / s.size);
  const blockK = Math.max(1, Math.ceil(elements / (4 * s.d)));
  return [Math.min(blockK, s.d, s.n), Math.min(blockK, s.n)];
}

// key tiles that query `first` sees whole; a ragged last tile counts when its real keys are seen
function wholeTiles(first, n, blockK) {
  return first + 1 >= n ? Math.ceil(n / blockK) : Math.floor((first + 1) / blockK);
}

function visits(n, blockQ, blockK, causal) {
  const tilesQ = Math.ceil(n / blockQ), tilesK = Math.ceil(n / blockK);
  let visited = 0, edge = 0, keyRows = 0, queryRows = 0;
  for (let row = 0; row < tilesQ; row++) {
    const first = row * blockQ, last = Math.min((row + 1) * blockQ, n);
    const stop = causal ? Math.ceil(last / blockK) : tilesK;
    const whole = causal ? wholeTiles(first, n, blockK) : tilesK;
    visited += stop;
    edge += stop - Math.min(whole, stop);
    keyRows += Math.min(stop * blockK, n);
  }
  for (let column = 0; column < tilesK; column++) {
    const firstRow = causal ? Math.floor((column * blockK) / blockQ) : 0;
    queryRows += n - Math.min(firstRow * blockQ, n);
  }
  return { tiles_q: tilesQ, tiles_k: tilesK, visited, edge, key_rows: keyRows, query_rows: queryRows };
}

function account(s) {
  const [blockQ, blockK] = tile(s);
  const seen = visits(s.n, blockQ, blockK, s.causal);
  const square = s.n * s.n, row = s.n * s.d;
  const pairs = s.heads * (s.causal ? (s.n * (s.n + 1)) / 2 : square);
  const flops = 4 * s.d * pairs;
  const naive = s.heads * s.size * (4 * row + 4 * square);
  const keysOuter = s.heads * s.size * (2 * row + (3 * s.d + 4) * seen.query_rows);
  const queriesOuter = s.heads * (s.size * (2 * row + 2 * s.d * seen.key_rows) + 4 * s.n);
  const once = s.heads * (4 * row * s.size + 4 * s.n);
  const executed = s.heads * seen.visited * blockQ * blockK;
  const memory = s.bandwidth * 1e9;
  const times = [once / memory, (4 * s.d * executed) / (s.products * 1e12), executed / (s.exps * 1e12)];
  const tiled = Math.max(...times);
  const workingSet = s.heads * s.size * (4 * row + 2 * square);
  const linear = 6 * s.heads * row * s.size;
  return {
    block_q: blockQ,
    block_k: blockK,
    ...seen,
    skipped_share: 1 - seen.visited / (seen.tiles_q * seen.tiles_k),
    pairs,
    flops,
    naive_bytes: naive,
    keys_outer_bytes: keysOuter,
    queries_outer_bytes: queriesOuter,
    once_bytes: once,
    naive_over_keys_outer: naive / keysOuter,
    naive_intensity: flops / naive,
    keys_outer_intensity: flops / keysOuter,
    once_intensity: flops / once,
    balance: (s.products * 1e12) / memory,
    seconds_naive: Math.max(naive / memory, (4 * s.d * s.heads * square) / (s.products * 1e12)),
    seconds_memory: times[0],
    seconds_products: times[1],
    seconds_exps: times[2],
    seconds_tiled: tiled,
    limit: times.indexOf(tiled),
    kept_linear: linear,
    kept_eager: linear + 3 * s.heads * square * s.size,
    kept_ours: 5 * s.heads * row * s.size + 4 * s.heads * s.n,
    working_set: workingSet,
    fits_l2: workingSet <= s.l2 * MIB ? 1 : 0,
  };
}
