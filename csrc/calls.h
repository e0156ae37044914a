// One call: plan, items, threads. The only place where kernels, plan and pool meet.
#pragma once

#include "kernels.h"
#include "pool.h"

namespace attn {

// false: interrupted, results are unfinished
bool run_forward(const Kernels& kernels, const Args& args, int threads, const Interrupt& interrupted);

}  // namespace attn
