#include "plan.h"

#include <algorithm>

namespace attn {

namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// enough items that the last ones do not leave threads idle, on any machine that is likely to run this
constexpr int64_t kWantedItems = 64;
// a tile's queries and output stay in L2 beside the key tile: about 100 KiB each in fp32
constexpr int64_t kTileElements = 24 * 1024;

int64_t splits_of(const Plan& plan, int64_t keys) {
  return plan.split_keys ? std::max<int64_t>(1, ceil_div(keys, plan.split_keys)) : 1;
}

int64_t count_tiles(const Args& args, int64_t rows) {
  int64_t tiles = 0;
  for (int64_t b = 0; b < args.B; ++b)
    tiles += args.Hkv * ceil_div(queries_of(args, b) * (args.H / args.Hkv), rows);
  return tiles;
}

int64_t rows_of_tile(const Args& args, const Shape& shape) {
  const int64_t width = std::max<int64_t>({args.D, args.Dv, 1});
  int64_t rows = std::clamp(kTileElements / width / shape.block * shape.block, shape.block, shape.max_rows);
  while (rows > 4 * shape.block && count_tiles(args, rows) < kWantedItems / 2)
    rows = std::max(shape.block, rows / 2 / shape.block * shape.block);
  // tiles of one sequence as even as whole blocks allow
  const int64_t total = args.M * (args.H / args.Hkv);
  if (args.rows != RowKind::packed && total > 0)
    rows = std::min(rows, ceil_div(ceil_div(total, ceil_div(total, rows)), shape.block) * shape.block);
  return rows;
}

// keys are split where there are few row tiles: decoding, mostly
int64_t keys_of_split(const Args& args, const Shape& shape, int64_t tiles) {
  const bool cache = args.rows == RowKind::cached || args.rows == RowKind::paged;
  if (cache && args.num_splits > 0) {
    if (args.num_splits == 1) return 0;
    int64_t longest = 0;
    for (int64_t b = 0; b < args.B; ++b) longest = std::max(longest, keys_of(args, b));
    return std::max<int64_t>(1, ceil_div(ceil_div(longest, args.num_splits), shape.tile_keys)) * shape.tile_keys;
  }
  constexpr int64_t kFewest = 1024;  // keys of a split: below it the merge costs more than it spreads
  if (tiles == 0 || tiles >= kWantedItems / 2) return 0;
  const int64_t wanted = kWantedItems / tiles;
  const int64_t keys = std::max(kFewest, ceil_div(ceil_div(args.N, wanted), shape.tile_keys) * shape.tile_keys);
  return keys < args.N ? keys : 0;
}

}  // namespace

int64_t queries_of(const Args& args, int64_t b) {
  return args.rows == RowKind::packed ? args.cu_q[b + 1] - args.cu_q[b] : args.M;
}

int64_t keys_of(const Args& args, int64_t b) {
  if (args.rows == RowKind::packed) return args.cu_k[b + 1] - args.cu_k[b];
  return args.lengths ? std::min<int64_t>(args.lengths[b], args.N) : args.N;
}

Plan plan_forward(const Args& args, const Shape& shape) {
  Plan plan;
  plan.first_item.assign(size_t(args.B) + 1, 0);
  plan.first_slot.assign(size_t(args.B) + 1, 0);
  if (args.H == 0) return plan;
  plan.rows = rows_of_tile(args, shape);
  plan.split_keys = keys_of_split(args, shape, count_tiles(args, plan.rows));
  for (int64_t b = 0; b < args.B; ++b) {
    const int64_t tiles = args.Hkv * ceil_div(queries_of(args, b) * (args.H / args.Hkv), plan.rows);
    const int64_t splits = splits_of(plan, keys_of(args, b));
    plan.max_splits = std::max(plan.max_splits, splits);
    plan.first_slot[size_t(b) + 1] = plan.first_slot[size_t(b)] + tiles;
    plan.first_item[size_t(b) + 1] = plan.first_item[size_t(b)] + tiles * splits;
  }
  plan.items = plan.first_item.back();
  plan.slots = plan.first_slot.back();
  return plan;
}

Item item_at(const Args& args, const Plan& plan, int64_t index) {
  const auto& starts = plan.first_item;
  const int64_t b = std::upper_bound(starts.begin(), starts.end(), index) - starts.begin() - 1;
  const int64_t keys = keys_of(args, b), total = queries_of(args, b) * (args.H / args.Hkv);
  const int64_t splits = splits_of(plan, keys), tiles = ceil_div(total, plan.rows);
  const int64_t within = index - starts[size_t(b)];
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

}  // namespace attn
