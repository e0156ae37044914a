#include "loops_impl.h"

namespace attn::ATTN_TARGET {
template struct Loops<f16>;
}  // namespace attn::ATTN_TARGET
