// Which SIMD target runs, chosen once: the widest that both the machine and the build have, or the one asked for.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace attn {

struct Choice {
  const Kernels* kernels = nullptr;
  std::string why;
};

// targets of this build that this machine can run, widest first
std::vector<const Kernels*> usable_kernels();

// `wanted` empty: the widest. Throws std::invalid_argument for a name that cannot run here
Choice choose_kernels(const std::string& wanted);

}  // namespace attn
