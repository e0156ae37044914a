// One SIMD target. CMakeLists.txt compiles this file once per target, with its flags and ATTN_TARGET set to its name.
// Nothing here may be a template or inline function of the standard library: the linker keeps one copy of those for
// all targets, and a baseline machine must not be given the AVX-512 one.
#include "kernels.h"

#include "loops.h"
#include "scores.h"

namespace attn::ATTN_TARGET {

namespace {

template <class F>
ATTN_INLINE auto with_dtype(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::f64:
      return f(double{});
    case Dtype::bf16:
      return f(bf16{});
    case Dtype::f16:
      return f(f16{});
    default:
      return f(float{});
  }
}

Shape shape(Dtype dtype) {
  const int64_t block = dtype == Dtype::f64 ? kBlock<double> : kBlock<float>;
  return {block, kMaxRows, kTileKeys, block * kChunk, kGroupTiles * kTileKeys};
}

size_t forward_scratch(const Args& a, const Plan& plan) {
  return with_dtype(a.dtype, [&](auto in) { return Loops<decltype(in)>::forward_scratch(a, plan); });
}
size_t partial_bytes(const Args& a, const Plan& plan) {
  return with_dtype(a.dtype, [&](auto in) { return Loops<decltype(in)>::partial_bytes(a, plan); });
}
void forward(const Args& a, const Plan& plan, const Item& item, char* scratch, char* partial) {
  with_dtype(a.dtype, [&](auto in) { Loops<decltype(in)>::forward(a, plan, item, scratch, partial); });
}
void merge(const Args& a, const Plan& plan, const Item& item, char* scratch, const char* partials) {
  with_dtype(a.dtype, [&](auto in) { Loops<decltype(in)>::merge(a, plan, item, scratch, partials); });
}

size_t backward_scratch(const Args& a, const BackwardPlan& plan, Pass pass) {
  return with_dtype(a.dtype, [&](auto in) { return Loops<decltype(in)>::backward_scratch(a, plan, pass); });
}
void backward_queries(const Args& a, const BackwardPlan& plan, const BackwardItem& item, char* scratch) {
  with_dtype(a.dtype, [&](auto in) { Loops<decltype(in)>::backward_queries(a, plan, item, scratch); });
}
void backward_keys(const Args& a, const BackwardPlan& plan, const BackwardItem& item, char* scratch) {
  with_dtype(a.dtype, [&](auto in) { Loops<decltype(in)>::backward_keys(a, plan, item, scratch); });
}
void backward_both(const Args& a, const BackwardPlan& plan, const BackwardItem& item, char* scratch, const bool* stop) {
  with_dtype(a.dtype, [&](auto in) { Loops<decltype(in)>::backward_both(a, plan, item, scratch, stop); });
}
void backward_bias(const Args& a, const BackwardPlan& plan, const BiasItem& item, char* scratch) {
  with_dtype(a.dtype, [&](auto in) { Loops<decltype(in)>::backward_bias(a, plan, item, scratch); });
}
bool can_sum_in_place(const Args& a) {
  return with_dtype(a.dtype, [&](auto in) { return Loops<decltype(in)>::can_sum_in_place(a); });
}
void delta(const Args& a, const BackwardPlan& plan, int64_t b, int64_t h, int64_t begin, int64_t end, char* scratch) {
  with_dtype(a.dtype, [&](auto in) { Loops<decltype(in)>::delta(a, plan, b, h, begin, end, scratch); });
}
void sink(const Args& a, const BackwardPlan& plan, int64_t h) {
  with_dtype(a.dtype, [&](auto in) { Loops<decltype(in)>::sink(a, plan, h); });
}

// y[i] = f(x[i]), for the tests of the polynomials
template <class T, class F>
ATTN_INLINE void map(const T* x, T* y, int64_t n, F&& f) {
  for (int64_t i = 0; i < n; i += kLanes<T>) {
    T buffer[kLanes<T>] = {};
    const size_t bytes = size_t(min_of(kLanes<T>, n - i)) * sizeof(T);
    std::memcpy(buffer, x + i, bytes);
    store(buffer, f(load(buffer)));
    std::memcpy(y + i, buffer, bytes);
  }
}
void exp2_f32(const float* x, float* y, int64_t n) {
  map(x, y, n, [](Vec<float> v) { return exp2<float>(v); });
}
void exp2_f64(const double* x, double* y, int64_t n) {
  map(x, y, n, [](Vec<double> v) { return exp2<double>(v); });
}
void tanh_f32(const float* x, float* y, int64_t n) {
  map(x, y, n, [](Vec<float> v) { return tanh_of(v); });
}

constexpr Kernels kKernels{
    ATTN_TARGET_NAME, kBytes, shape, forward_scratch, partial_bytes, forward, merge, backward_scratch,
    backward_queries, backward_keys, backward_both, backward_bias, can_sum_in_place, delta, sink, exp2_f32, exp2_f64,
    tanh_f32,
};

}  // namespace

}  // namespace attn::ATTN_TARGET

namespace attn {

const Kernels* ATTN_TARGET_GETTER() { return &ATTN_TARGET::kKernels; }

}  // namespace attn
