// What happens inside one block of lanes and one tile of keys, for an accumulator type: products and softmax.
//
// These are the functions where the time goes. They know nothing of storage types, so they are compiled once for float
// and once for double (blocks_f32.cpp, blocks_f64.cpp) and shared by the loops over fp32, bf16 and fp16 rows.
#pragma once

#include "gradient.h"
#include "micro.h"

namespace attn::ATTN_TARGET {

// which scores a call has: selects one instantiation
struct ScoreKinds {
  bool softcap, alibi, bias;
  int index() const { return int(softcap) + 2 * int(alibi) + 4 * int(bias); }
  bool any() const { return softcap || alibi || bias; }
};

inline ScoreKinds score_kinds(const Args& a) { return {a.softcap != 0, a.slopes.data != nullptr, a.bias.data != nullptr}; }

// the keys of a whole tile: packed panels, or the rows themselves where they are plain numbers that lie close
template <class T>
struct KeySide {
  const T* data;
  long row;  // elements between rows; 0: panels
};

template <class T>
struct Blocks {
  // s[key][lane] = keys . b, for the keys of the range; b is [x][lane], n deep
  static void scores(int vecs, KeySide<T> keys, long n, const T* b, Range range, T* s);

  // the same for a whole tile and a block of full width, with the max of the scores joined to `top`; meanwhile the
  // exponentials of the block before, if one waits
  static void scores_beside(KeySide<T> keys, long n, const T* b, T* s, T* top, const Waiting<T>& before, T* sum);
  static void all_exponentials(Waiting<T>& waiting);

  // o[channel][lane] = o * alpha + values^T p; panels [channel group][key][kPanel] are kPanelKeys keys apart
  static void values(int vecs, const T* panels, long channels, Range range, const T* p, const T* alpha, T* o);

  // o[channel][lane] += values^T p
  static void add(int vecs, const T* panels, long channels, Range range, const T* p, T* o);

  // c[key][channel] += tile^T b over the rows of some blocks. b is cut into channel panels (panel_vecs) of `rows` rows,
  // [panel][row][channel of the panel]; channels are padded to whole vectors
  static void outer(const OuterBlock<T>* blocks, long count, Range range, const T* b, long rows, long channels, T* c,
                    long ldc);

  static void softmax(int vecs, ScoreKinds kinds, const SoftmaxTile<T>& tile);
  static void gradient(int vecs, ScoreKinds kinds, const GradientTile<T>& tile);
};

extern template struct Blocks<float>;
extern template struct Blocks<double>;

}  // namespace attn::ATTN_TARGET
