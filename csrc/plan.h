// How a call is cut into work items. What decides bits (where keys are split, where chunks of rows start) is a function of
// the problem alone; the number of threads only decides how many rows make an item.
#pragma once

#include <cstdint>
#include <vector>

#include "args.h"

namespace attn {

// one row tile of one key/value head, perhaps only some of its keys
struct Item {
  int64_t b, hk;
  int64_t first, rows;         // rows of the (query, head-of-group) space
  int64_t key_begin, key_end;  // keys of this split
  int64_t split, splits;
  int64_t slot;                // index of (b, hk, tile) among all, for partial results
};

struct Plan {
  int64_t rows = 0;        // rows of a tile
  int64_t split_keys = 0;  // 0: keys are not split
  int64_t items = 0, slots = 0;
  int64_t max_splits = 1;
  int64_t whole = 0, pieces = 1;  // the items from `whole` on are row tiles cut into so many pieces
  std::vector<int64_t> first_item, first_slot;  // per sequence, before any is cut
};

// what a plan needs to know of a SIMD target
struct Shape {
  int64_t block;      // lanes of a full block
  int64_t max_rows;
  int64_t tile_keys;
  int64_t chunk_rows;  // backward: rows whose p and dS are kept at a time
  int64_t group_keys;  // backward: keys of one dK and dV item
};

// rows [first, first + rows) of one key/value head, or keys [key_begin, key_end) of it, or all of both
struct BackwardItem {
  int64_t b, hk;
  int64_t first, rows;
  int64_t key_begin, key_end;
  int64_t slot;  // index of the row tile among all
};

// a tile of dbias and what is summed into it
struct BiasItem {
  int64_t out_b, out_h;
  int64_t b0, b1, h0, h1;
  int64_t row0, row1, key0, key1;
};

struct BackwardPlan {
  int64_t rows = 0;        // rows of a tile
  int64_t group_keys = 0;  // keys of a `keys` item
  std::vector<int64_t> first_rows, first_keys;  // per sequence: first row-tile item, first key-group item
  // work space of the call, filled before the first pass
  char* delta = nullptr;
  double* slope_sums = nullptr;  // [row tile][head of the group]
  int64_t row_items() const { return first_rows.back(); }
  int64_t key_items() const { return first_keys.back(); }
};

BackwardPlan plan_backward(const Args& args, const Shape& shape);
BackwardItem row_item(const Args& args, const BackwardPlan& plan, int64_t index);
BackwardItem key_item(const Args& args, const BackwardPlan& plan, int64_t index);
BackwardItem head_item(const Args& args, const BackwardPlan& plan, int64_t index);  // index = b * Hkv + hk
int64_t bias_items(const Args& args, const BackwardPlan& plan, const Shape& shape);
BiasItem bias_item(const Args& args, const BackwardPlan& plan, const Shape& shape, int64_t index);

// whether five products on `threads` threads, one key/value head at a time, beat seven that split freely
bool one_pass_pays(const Args& args, int threads);

Plan plan_forward(const Args& args, const Shape& shape, int threads);
// may have no rows
Item item_at(const Args& args, const Plan& plan, const Shape& shape, int64_t index);
int64_t queries_of(const Args& args, int64_t b);
int64_t keys_of(const Args& args, int64_t b);

}  // namespace attn
