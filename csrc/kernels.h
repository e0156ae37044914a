// The table of functions that each SIMD target exports.
#pragma once

#include <cstddef>

#include "plan.h"

namespace attn {

enum class Pass : int { queries, keys, both, bias };

struct Kernels {
  const char* name;
  int vector_bytes;
  Shape (*shape)(Dtype);

  size_t (*forward_scratch)(const Args&, const Plan&);
  size_t (*partial_bytes)(const Args&, const Plan&);
  void (*forward)(const Args&, const Plan&, const Item&, char* scratch, char* partial);
  // partials of one row tile, `splits` in a row
  void (*merge)(const Args&, const Plan&, const Item&, char* scratch, const char* partials);

  // which gradients a pass makes
  size_t (*backward_scratch)(const Args&, const BackwardPlan&, Pass);
  void (*backward_queries)(const Args&, const BackwardPlan&, const BackwardItem&, char* scratch);
  void (*backward_keys)(const Args&, const BackwardPlan&, const BackwardItem&, char* scratch);
  void (*backward_both)(const Args&, const BackwardPlan&, const BackwardItem&, char* scratch, const bool* stop);
  void (*backward_bias)(const Args&, const BackwardPlan&, const BiasItem&, char* scratch);
  bool (*can_sum_in_place)(const Args&);
  // delta of rows [begin, end) of one head; the gradient of one head's sink
  void (*delta)(const Args&, const BackwardPlan&, int64_t b, int64_t h, int64_t begin, int64_t end, char* scratch);
  void (*sink)(const Args&, const BackwardPlan&, int64_t h);

  void (*exp2_f32)(const float*, float*, int64_t);
  void (*exp2_f64)(const double*, double*, int64_t);
  void (*tanh_f32)(const float*, float*, int64_t);
};

// null where the library was built without the target
const Kernels* baseline_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* amx_kernels();
const Kernels* neon_kernels();

}  // namespace attn
