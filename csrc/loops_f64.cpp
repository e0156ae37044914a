#include "loops_impl.h"

namespace attn::ATTN_TARGET {
template struct Loops<double>;
}  // namespace attn::ATTN_TARGET
