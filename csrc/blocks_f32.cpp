#include "blocks_impl.h"

namespace attn::ATTN_TARGET {
template struct Blocks<float>;
}  // namespace attn::ATTN_TARGET
