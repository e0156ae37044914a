// Definitions of loops.h; included by one source file per storage type.
#pragma once

#include "forward.h"
#include "loops.h"

namespace attn::ATTN_TARGET {

template <class In>
size_t Loops<In>::forward_scratch(const Args& a, const Plan& plan) {
  Arena arena{nullptr};
  Forward<In> measure(a, plan, arena);
  return arena.used;
}

template <class In>
size_t Loops<In>::partial_bytes(const Args& a, const Plan& plan) {
  return Forward<In>::partial_bytes(a, plan);
}

template <class In>
void Loops<In>::forward(const Args& a, const Plan& plan, const Item& item, char* scratch, char* partial) {
  Arena arena{scratch};
  Forward<In>(a, plan, arena).run(item, partial);
}

template <class In>
void Loops<In>::merge(const Args& a, const Plan& plan, const Item& item, char* scratch, const char* partials) {
  Arena arena{scratch};
  Forward<In>(a, plan, arena).merge(item, partials, long(Forward<In>::partial_bytes(a, plan)));
}

}  // namespace attn::ATTN_TARGET
