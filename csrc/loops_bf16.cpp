#include "loops_impl.h"

namespace attn::ATTN_TARGET {
template struct Loops<bf16>;
}  // namespace attn::ATTN_TARGET
