#include "blocks_impl.h"

namespace attn::ATTN_TARGET {
template struct Blocks<double>;
}  // namespace attn::ATTN_TARGET
