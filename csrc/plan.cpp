#include "plan.h"

#include <algorithm>

namespace attn {

namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// row tiles for each thread, so that the last ones do not leave threads idle
constexpr int64_t kTilesPerThread = 8;
// keys are split where there are fewer row tiles than this
constexpr int64_t kFewTiles = 32;
// backward: elements of a row tile in each of its five forms
constexpr int64_t kTileElements = 48 * 1024;
// forward: of the queries and sums of a row tile. Each row tile packs every key and value anew, so tiles are large
constexpr int64_t kRowElements = 192 * 1024;

int64_t sequence_at(const std::vector<int64_t>& starts, int64_t index) {
  return std::upper_bound(starts.begin(), starts.end(), index) - starts.begin() - 1;
}

int64_t splits_of(const Plan& plan, int64_t keys) {
  return plan.split_keys ? std::max<int64_t>(1, ceil_div(keys, plan.split_keys)) : 1;
}

int64_t count_tiles(const Args& args, int64_t rows) {
  int64_t tiles = 0;
  for (int64_t b = 0; b < args.B; ++b)
    tiles += args.Hkv * ceil_div(queries_of(args, b) * (args.H / args.Hkv), rows);
  return tiles;
}

// Keys are packed once per row tile, so tall tiles pay; a row's bits do not depend on its tile, so threads may decide
int64_t rows_of_tile(const Args& args, const Shape& shape, int threads) {
  const int64_t held = kRowElements / std::max<int64_t>(args.D + args.Dv, 1) / shape.block * shape.block;
  int64_t rows = std::clamp(held, shape.block, shape.max_rows);
  while (rows > 4 * shape.block && count_tiles(args, rows) < kTilesPerThread * threads)
    rows = std::max(shape.block, rows / 2 / shape.block * shape.block);
  // tiles of one sequence as even as whole blocks allow
  const int64_t total = args.M * (args.H / args.Hkv);
  if (args.rows != RowKind::packed && total > 0)
    rows = std::min(rows, ceil_div(ceil_div(total, ceil_div(total, rows)), shape.block) * shape.block);
  return rows;
}

// keys are split where there are few row tiles: decoding, mostly. Splits change bits: threads have no say here
int64_t keys_of_split(const Args& args, const Shape& shape) {
  const bool cache = args.rows == RowKind::cached || args.rows == RowKind::paged;
  if (cache && args.num_splits > 0) {
    if (args.num_splits == 1) return 0;
    int64_t longest = 0;
    for (int64_t b = 0; b < args.B; ++b) longest = std::max(longest, keys_of(args, b));
    return std::max<int64_t>(1, ceil_div(ceil_div(longest, args.num_splits), shape.tile_keys)) * shape.tile_keys;
  }
  constexpr int64_t kFewest = 1024;  // keys of a split: below it the merge costs more than it spreads
  const int64_t tiles = count_tiles(args, 4 * shape.block);
  if (tiles == 0 || tiles >= kFewTiles) return 0;
  const int64_t keys = ceil_div(ceil_div(args.N, 2 * kFewTiles / tiles), shape.tile_keys) * shape.tile_keys;
  return std::max(kFewest, keys) < args.N ? std::max(kFewest, keys) : 0;
}

// The last row tiles are cut, one for each thread: a thread that is done helps with what is left. Each piece packs its keys
// anew, so not all are cut
void cut_the_last(Plan& plan, const Shape& shape, int threads) {
  constexpr int64_t kPieces = 4;
  plan.whole = plan.items;
  plan.pieces = std::min(kPieces, plan.rows / shape.block);
  if (threads < 2 || plan.items < threads || plan.max_splits > 1 || plan.pieces < 2) return;
  plan.whole = plan.items - threads;
  plan.items = plan.whole + threads * plan.pieces;
}

Item cut(Item item, const Plan& plan, const Shape& shape, int64_t piece) {
  const int64_t rows = ceil_div(ceil_div(item.rows, shape.block), plan.pieces) * shape.block;
  const int64_t before = std::min(item.rows, piece * rows);
  item.first += before;
  item.rows = std::min(rows, item.rows - before);
  return item;
}

}  // namespace

int64_t queries_of(const Args& args, int64_t b) {
  return args.rows == RowKind::packed ? args.cu_q[b + 1] - args.cu_q[b] : args.M;
}

int64_t keys_of(const Args& args, int64_t b) {
  if (args.rows == RowKind::packed) return args.cu_k[b + 1] - args.cu_k[b];
  return args.lengths ? std::min<int64_t>(args.lengths[b], args.N) : args.N;
}

Plan plan_forward(const Args& args, const Shape& shape, int threads) {
  Plan plan;
  plan.first_item.assign(size_t(args.B) + 1, 0);
  plan.first_slot.assign(size_t(args.B) + 1, 0);
  if (args.H == 0) return plan;
  plan.rows = rows_of_tile(args, shape, threads);
  plan.split_keys = keys_of_split(args, shape);
  for (int64_t b = 0; b < args.B; ++b) {
    const int64_t tiles = args.Hkv * ceil_div(queries_of(args, b) * (args.H / args.Hkv), plan.rows);
    const int64_t splits = splits_of(plan, keys_of(args, b));
    plan.max_splits = std::max(plan.max_splits, splits);
    plan.first_slot[size_t(b) + 1] = plan.first_slot[size_t(b)] + tiles;
    plan.first_item[size_t(b) + 1] = plan.first_item[size_t(b)] + tiles * splits;
  }
  plan.items = plan.first_item.back();
  plan.slots = plan.first_slot.back();
  cut_the_last(plan, shape, threads);
  return plan;
}

namespace {

Item whole_item(const Args& args, const Plan& plan, int64_t index) {
  const int64_t b = sequence_at(plan.first_item, index);
  const int64_t keys = keys_of(args, b), total = queries_of(args, b) * (args.H / args.Hkv);
  const int64_t splits = splits_of(plan, keys), tiles = ceil_div(total, plan.rows);
  const int64_t within = index - plan.first_item[size_t(b)];
  Item item{};
  item.b = b;
  item.split = within % splits;
  item.splits = splits;
  item.hk = within / splits / tiles;
  // the last rows of a causal call see most keys: start with them, end with the short ones
  const int64_t tile = tiles - 1 - within / splits % tiles;
  item.first = tile * plan.rows;
  item.rows = std::min(plan.rows, total - item.first);
  item.key_begin = plan.split_keys ? item.split * plan.split_keys : 0;
  item.key_end = plan.split_keys ? std::min(keys, item.key_begin + plan.split_keys) : keys;
  item.slot = plan.first_slot[size_t(b)] + item.hk * tiles + tile;
  return item;
}

}  // namespace

Item item_at(const Args& args, const Plan& plan, const Shape& shape, int64_t index) {
  if (index >= plan.whole) {
    const int64_t piece = (index - plan.whole) % plan.pieces;
    return cut(whole_item(args, plan, plan.whole + (index - plan.whole) / plan.pieces), plan, shape, piece);
  }
  return whole_item(args, plan, index);
}

BackwardPlan plan_backward(const Args& args, const Shape& shape) {
  BackwardPlan plan;
  const int64_t width = std::max<int64_t>({args.D, args.Dv, 1}), chunk = shape.chunk_rows;
  plan.rows = std::clamp(kTileElements / width / chunk * chunk, chunk, shape.max_rows / chunk * chunk);
  plan.group_keys = shape.group_keys;
  plan.first_rows.assign(size_t(args.B) + 1, 0);
  plan.first_keys.assign(size_t(args.B) + 1, 0);
  for (int64_t b = 0; b < args.B; ++b) {
    const int64_t rows = queries_of(args, b) * (args.Hkv ? args.H / args.Hkv : 0);
    plan.first_rows[size_t(b) + 1] = plan.first_rows[size_t(b)] + args.Hkv * ceil_div(rows, plan.rows);
    plan.first_keys[size_t(b) + 1] = plan.first_keys[size_t(b)] + args.Hkv * ceil_div(keys_of(args, b), plan.group_keys);
  }
  return plan;
}

BackwardItem row_item(const Args& args, const BackwardPlan& plan, int64_t index) {
  const int64_t b = sequence_at(plan.first_rows, index), within = index - plan.first_rows[size_t(b)];
  const int64_t total = queries_of(args, b) * (args.H / args.Hkv), tiles = ceil_div(total, plan.rows);
  const int64_t hk = within / tiles, tile = tiles - 1 - within % tiles;
  return {b, hk, tile * plan.rows, std::min(plan.rows, total - tile * plan.rows), 0, keys_of(args, b),
          plan.first_rows[size_t(b)] + hk * tiles + tile};
}

BackwardItem key_item(const Args& args, const BackwardPlan& plan, int64_t index) {
  const int64_t b = sequence_at(plan.first_keys, index), within = index - plan.first_keys[size_t(b)];
  const int64_t groups = ceil_div(keys_of(args, b), plan.group_keys), begin = within % groups * plan.group_keys;
  return {b, within / groups, 0, 0, begin, std::min(begin + plan.group_keys, keys_of(args, b)), 0};
}

BackwardItem head_item(const Args& args, const BackwardPlan& plan, int64_t index) {
  const int64_t b = index / args.Hkv, hk = index % args.Hkv;
  const int64_t tiles = ceil_div(queries_of(args, b) * (args.H / args.Hkv), plan.rows);
  return {b, hk, 0, 0, 0, keys_of(args, b), plan.first_rows[size_t(b)] + hk * tiles};
}

namespace {

// an axis of dbias of length 1 is one piece, any other is cut into tiles
int64_t pieces(int64_t axis, int64_t tile) { return axis == 1 ? 1 : ceil_div(axis, tile); }

}  // namespace

int64_t bias_items(const Args& args, const BackwardPlan& plan, const Shape& shape) {
  const int64_t* axes = args.bias_shape;
  return axes[0] * axes[1] * pieces(axes[2], plan.rows) * pieces(axes[3], shape.tile_keys);
}

BiasItem bias_item(const Args& args, const BackwardPlan& plan, const Shape& shape, int64_t index) {
  const int64_t* axes = args.bias_shape;
  const int64_t keys = pieces(axes[3], shape.tile_keys), rows = pieces(axes[2], plan.rows);
  const int64_t key = index % keys, row = index / keys % rows, h = index / keys / rows % axes[1];
  const int64_t b = index / keys / rows / axes[1];
  BiasItem item{};
  item.out_b = b;
  item.out_h = h;
  item.b0 = axes[0] == 1 ? 0 : b;
  item.b1 = axes[0] == 1 ? args.B : b + 1;
  item.h0 = axes[1] == 1 ? 0 : h;
  item.h1 = axes[1] == 1 ? args.H : h + 1;
  item.row0 = axes[2] == 1 ? 0 : row * plan.rows;
  item.row1 = axes[2] == 1 ? args.M : std::min(args.M, item.row0 + plan.rows);
  item.key0 = axes[3] == 1 ? 0 : key * shape.tile_keys;
  item.key1 = axes[3] == 1 ? args.N : std::min(args.N, item.key0 + shape.tile_keys);
  return item;
}

bool one_pass_pays(const Args& args, int threads) {
  // the threads' loads after each takes the next head, as the pool hands them out
  std::vector<double> loads(size_t(std::max(threads, 1)), 0.0);
  double total = 0;
  for (int64_t b = 0; b < args.B; ++b) {
    const double cost = double(queries_of(args, b)) * double(keys_of(args, b));
    for (int64_t hk = 0; hk < args.Hkv; ++hk) {
      auto least = std::min_element(loads.begin(), loads.end());
      *least += cost;
      total += cost;
    }
  }
  return *std::max_element(loads.begin(), loads.end()) * 5 <= total / double(loads.size()) * 7;
}

}  // namespace attn
