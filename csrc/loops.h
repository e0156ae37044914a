// The loops over tiles, one set per storage type (loops_f32.cpp and its siblings).
#pragma once

#include "kernels.h"
#include "pack.h"

namespace attn::ATTN_TARGET {

template <class In>
struct Loops {
  static size_t forward_scratch(const Args& a, const Plan& plan);
  static size_t partial_bytes(const Args& a, const Plan& plan);
  static void forward(const Args& a, const Plan& plan, const Item& item, char* scratch, char* partial);
  static void merge(const Args& a, const Plan& plan, const Item& item, char* scratch, const char* partials);

  static size_t backward_scratch(const Args& a, const BackwardPlan& plan, Pass pass);
  static void backward_queries(const Args& a, const BackwardPlan& plan, const BackwardItem& item, char* scratch);
  static void backward_keys(const Args& a, const BackwardPlan& plan, const BackwardItem& item, char* scratch);
  static void backward_both(const Args& a, const BackwardPlan& plan, const BackwardItem& item, char* scratch,
                            const bool* stop);
  static void backward_bias(const Args& a, const BackwardPlan& plan, const BiasItem& item, char* scratch);
  static bool can_sum_in_place(const Args& a);
  static void delta(const Args& a, const BackwardPlan& plan, int64_t b, int64_t h, int64_t begin, int64_t end, char* scratch);
  static void sink(const Args& a, const BackwardPlan& plan, int64_t h);
};

extern template struct Loops<float>;
extern template struct Loops<double>;
extern template struct Loops<bf16>;
extern template struct Loops<f16>;

}  // namespace attn::ATTN_TARGET
