// The table of functions that each SIMD target exports.
#pragma once

#include <cstddef>

#include "plan.h"

namespace attn {

struct Kernels {
  const char* name;
  int vector_bytes;
  Shape (*shape)(Dtype);

  size_t (*forward_scratch)(const Args&, const Plan&);
  size_t (*partial_bytes)(const Args&, const Plan&);
  void (*forward)(const Args&, const Plan&, const Item&, char* scratch, char* partial);
  // partials of one row tile, `splits` in a row
  void (*merge)(const Args&, const Plan&, const Item&, char* scratch, const char* partials);

  void (*exp2_f32)(const float*, float*, int64_t);
  void (*exp2_f64)(const double*, double*, int64_t);
  void (*tanh_f32)(const float*, float*, int64_t);
};

// null where the library was built without the target
const Kernels* baseline_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* neon_kernels();

}  // namespace attn
