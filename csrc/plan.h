// How a call is cut into work items. A plan is a function of the problem alone, never of the number of threads, so that
// any number of threads computes the same bits.
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
  std::vector<int64_t> first_item, first_slot;  // per sequence
};

// what a plan needs to know of a SIMD target
struct Shape {
  int64_t block;      // lanes of a full block
  int64_t max_rows;
  int64_t tile_keys;
};

Plan plan_forward(const Args& args, const Shape& shape);
Item item_at(const Args& args, const Plan& plan, int64_t index);
int64_t queries_of(const Args& args, int64_t b);
int64_t keys_of(const Args& args, int64_t b);

}  // namespace attn
