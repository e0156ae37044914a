// One call: plan, items, threads. The only place where kernels, plan and pool meet.
#pragma once

#include "kernels.h"
#include "pool.h"

namespace attn {

// one pass and two give the same bits; tests force each
enum class BackwardWay : int { choose, one_pass, two_passes };

// false: interrupted, results are unfinished
bool run_forward(const Kernels& kernels, const Args& args, int threads, const Interrupt& interrupted);

bool run_backward(const Kernels& kernels, const Args& args, int threads, const Interrupt& interrupted, BackwardWay way);

}  // namespace attn
