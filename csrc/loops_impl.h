// Definitions of loops.h; included by one source file per storage type.
#pragma once

#include "backward.h"
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

inline Wanted wanted_of(const Args& a, Pass pass) {
  const bool row_side = pass == Pass::queries || pass == Pass::both, key_side = pass == Pass::keys || pass == Pass::both;
  return {row_side && a.dq.data, key_side && a.dk.data, key_side && a.dv.data, row_side && a.dslopes, pass == Pass::bias};
}

template <class In>
size_t Loops<In>::backward_scratch(const Args& a, const BackwardPlan& plan, Pass pass) {
  Arena arena{nullptr};
  Backward<In> measure(a, plan, wanted_of(a, pass), arena);
  if (pass == Pass::bias) {
    arena.take<Acc<In>>(plan.rows * kTileKeys);
    arena.take<double>(plan.rows * kTileKeys);
  }
  return arena.used;
}

template <class In>
void Loops<In>::backward_queries(const Args& a, const BackwardPlan& plan, const BackwardItem& item, char* scratch) {
  Arena arena{scratch};
  Backward<In>(a, plan, wanted_of(a, Pass::queries), arena).queries(item);
}

template <class In>
void Loops<In>::backward_keys(const Args& a, const BackwardPlan& plan, const BackwardItem& item, char* scratch) {
  Arena arena{scratch};
  Backward<In>(a, plan, wanted_of(a, Pass::keys), arena).keys(item);
}

template <class In>
void Loops<In>::backward_both(const Args& a, const BackwardPlan& plan, const BackwardItem& item, char* scratch,
                              const bool* stop) {
  if constexpr (!kIsHalf<In>) {
    Arena arena{scratch};
    Backward<In>(a, plan, wanted_of(a, Pass::both), arena).both(item, [stop] {
      return __atomic_load_n(stop, __ATOMIC_RELAXED);
    });
  }
}

template <class In>
void Loops<In>::backward_bias(const Args& a, const BackwardPlan& plan, const BiasItem& item, char* scratch) {
  Arena arena{scratch};
  Backward<In> backward(a, plan, wanted_of(a, Pass::bias), arena);
  Acc<In>* sums = arena.take<Acc<In>>(plan.rows * kTileKeys);
  double* totals = arena.take<double>(plan.rows * kTileKeys);
  backward.bias(item, sums, totals);
}

// dK and dV are sums over row tiles: where the gradient's own dtype and rows of whole vectors allow, they need no copy
template <class In>
bool Loops<In>::can_sum_in_place(const Args& a) {
  if (kIsHalf<In> || !a.dq.data || !a.dk.data || !a.dv.data) return false;
  const bool vectors = a.D % kLanes<Acc<In>> == 0 && a.Dv % kLanes<Acc<In>> == 0 && a.D > 0 && a.Dv > 0;
  constexpr long kElement = sizeof(In);
  return vectors && element_stride(a, a.dk) == kElement && element_stride(a, a.dv) == kElement;
}

template <class In>
void Loops<In>::delta(const Args& a, const BackwardPlan& plan, int64_t b, int64_t h, int64_t begin, int64_t end,
                      char* scratch) {
  delta_rows<In>(a, sequence_of(a, b), h, begin, end, reinterpret_cast<Acc<In>*>(plan.delta),
                 reinterpret_cast<Acc<In>*>(scratch));
}

template <class In>
void Loops<In>::sink(const Args& a, const BackwardPlan& plan, int64_t h) {
  reinterpret_cast<Acc<In>*>(a.dsink)[h] = Acc<In>(sink_sum<In>(a, h, reinterpret_cast<const Acc<In>*>(plan.delta)));
}

}  // namespace attn::ATTN_TARGET
