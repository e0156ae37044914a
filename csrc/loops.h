// The loops over tiles, one set per storage type (loops_f32.cpp and its siblings).
#pragma once

#include "pack.h"
#include "plan.h"

namespace attn::ATTN_TARGET {

template <class In>
struct Loops {
  static size_t forward_scratch(const Args& a, const Plan& plan);
  static size_t partial_bytes(const Args& a, const Plan& plan);
  static void forward(const Args& a, const Plan& plan, const Item& item, char* scratch, char* partial);
  static void merge(const Args& a, const Plan& plan, const Item& item, char* scratch, const char* partials);
};

extern template struct Loops<float>;
extern template struct Loops<double>;
extern template struct Loops<bf16>;
extern template struct Loops<f16>;

}  // namespace attn::ATTN_TARGET
