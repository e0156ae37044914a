#include "choose.h"

#include <stdexcept>

#if defined(ATTN_HAS_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace attn {

#if defined(ATTN_HAS_AMX)
namespace {

// tiles and their products of bf16 in the processor; their state in the system, which a process has to ask for
bool amx_is_usable() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kStates = 3u << 17;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kBf16 | kTile)) != (kBf16 | kTile)) return false;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return (low & kStates) == kStates && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace
#endif

std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
#ifdef ATTN_HAS_AVX512
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma")) {
#ifdef ATTN_HAS_AMX
    if (amx_is_usable()) found.push_back(amx_kernels());
#endif
    found.push_back(avx512_kernels());
  }
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
