// A small pool of threads for work items that are claimed from a counter.
//
// Why no OpenMP is linked: a torch wheel brings its own copy of the runtime, so another one would give two pools that spin
// against each other, and a child forked after a parallel region hangs. This pool sleeps when idle, is replaced in a forked
// child, and lets the caller look for signals between items. Where torch is loaded its threads run the items instead, if
// they can (team.h). Which thread runs an item never changes its result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace attn {

struct Job {
  int64_t items = 0;
  size_t scratch = 0;  // bytes each thread needs
  std::function<void(int64_t item, char* scratch)> run;
};

// called now and then on the calling thread; true stops the job
using Interrupt = std::function<bool()>;

// runs all items on up to `threads` threads (the caller is one of them); false if it was interrupted. An exception of an item
// ends the job and is thrown here
bool run_job(const Job& job, int threads, const Interrupt& interrupted);

}  // namespace attn
