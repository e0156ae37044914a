// The target `amx`: that of avx512, with the forward products of bf16 in AMX. Compiled with the flags of avx512 and those
// of AMX, which the compiler uses nowhere of its own accord, so that the two targets share every other function.
#include "amx.h"
#include "forward.h"
#include "kernels.h"

namespace attn::ATTN_TARGET {

namespace {

// decoding reads each byte once, and memory is its limit
bool served(const Args& a) { return a.dtype == Dtype::bf16 && !use_narrow<bf16>(a); }

using InAmx = Forward<bf16, Amx>;

size_t forward_scratch(const Args& a, const Plan& plan) {
  if (!served(a)) return avx512_kernels()->forward_scratch(a, plan);
  Arena arena{nullptr};
  InAmx measure(a, plan, arena);
  return arena.used;
}

size_t partial_bytes(const Args& a, const Plan& plan) {
  return served(a) ? InAmx::partial_bytes(a, plan) : avx512_kernels()->partial_bytes(a, plan);
}

void forward(const Args& a, const Plan& plan, const Item& item, char* scratch, char* partial) {
  if (!served(a)) return avx512_kernels()->forward(a, plan, item, scratch, partial);
  const SquareRegisters registers;
  Arena arena{scratch};
  InAmx(a, plan, arena).run(item, partial);
}

void merge(const Args& a, const Plan& plan, const Item& item, char* scratch, const char* partials) {
  if (!served(a)) return avx512_kernels()->merge(a, plan, item, scratch, partials);
  Arena arena{scratch};
  InAmx(a, plan, arena).merge(item, partials, long(InAmx::partial_bytes(a, plan)));
}

Kernels table() {
  Kernels kernels = *avx512_kernels();
  kernels.name = "amx";
  kernels.forward_scratch = forward_scratch;
  kernels.partial_bytes = partial_bytes;
  kernels.forward = forward;
  kernels.merge = merge;
  return kernels;
}

}  // namespace

}  // namespace attn::ATTN_TARGET

namespace attn {

const Kernels* amx_kernels() {
  static const Kernels kernels = ATTN_TARGET::table();
  return &kernels;
}

}  // namespace attn
