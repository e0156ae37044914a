#include "choose.h"

#include <stdexcept>

namespace attn {

std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
#ifdef ATTN_HAS_AVX512
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma"))
    found.push_back(avx512_kernels());
#endif
#ifdef ATTN_HAS_AVX2
  // every processor with AVX2 and FMA has the half conversions of F16C
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(avx2_kernels());
#endif
#ifdef ATTN_HAS_BASELINE
  found.push_back(baseline_kernels());
#endif
#elif defined(ATTN_HAS_NEON)
  found.push_back(neon_kernels());
#endif
  return found;
}

Choice choose_kernels(const std::string& wanted) {
  const auto usable = usable_kernels();
  std::string names;
  for (const Kernels* each : usable) names += (names.empty() ? "" : ", ") + std::string(each->name);
  if (usable.empty()) throw std::invalid_argument("ATTNPROOF_SIMD: this build has no target for this processor");
  if (wanted.empty()) return {usable.front(), "widest of those this processor and this build have: " + names};
  for (const Kernels* each : usable)
    if (wanted == each->name) return {each, "asked for by ATTNPROOF_SIMD; usable here: " + names};
  throw std::invalid_argument("ATTNPROOF_SIMD: expected one of " + names + " on this processor, got '" + wanted + "'");
}

}  // namespace attn
