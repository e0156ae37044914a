// What a call hands to a kernel: sizes, switches and strided views. Plain data, no methods, shared by every SIMD target.
#pragma once

#include <cstdint>

namespace attn {

enum class Dtype : int { f32, f64, bf16, f16 };
enum class RowKind : int { dense, packed, cached, paged };

inline constexpr int64_t kUnbounded = int64_t(1) << 30;  // a window side at least this wide is no bound

// strides in bytes (a field of a record may have any); axes as in the canonical view of the tensor, 3-D views use s[0..2]
struct View {
  char* data = nullptr;
  int64_t s[4] = {0, 0, 0, 0};
};

struct Args {
  Dtype dtype = Dtype::f32, bias_dtype = Dtype::f32, sink_dtype = Dtype::f32;
  RowKind rows = RowKind::dense;
  int64_t B = 0, H = 0, Hkv = 0, M = 0, N = 0, D = 0, Dv = 0, page = 0;
  int64_t total_q = 0, total_k = 0;  // packed only: tokens of the buffers
  int64_t left = kUnbounded, right = kUnbounded;
  bool top_left = false;
  double scale = 1.0, softcap = 0.0, dropout_p = 0.0;
  uint64_t seed = 0, offset = 0;
  int64_t num_splits = 0;  // cached and paged: 0 lets the plan choose

  View q, k, v, bias, keep, slopes, sink, bounds, block_table;  // slopes in the dtype of lse
  const int32_t *cu_q = nullptr, *cu_k = nullptr, *lengths = nullptr;

  View out;              // forward: written; backward: read
  char* lse = nullptr;   // contiguous, fp32 or fp64
  View dout;
  View dlse;             // data null: none
  View dq, dk, dv;       // data null: not wanted
  char* dbias = nullptr; // contiguous, bias_shape, dtype of the bias
  int64_t bias_shape[4] = {1, 1, 1, 1};
  char* dslopes = nullptr;   // [B, H], dtype of lse
  char* dsink = nullptr;     // [H], dtype of lse
};

}  // namespace attn
