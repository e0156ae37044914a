#include "loops_impl.h"

namespace attn::ATTN_TARGET {
template struct Loops<float>;
}  // namespace attn::ATTN_TARGET
