#include "calls.h"

#include <algorithm>
#include <memory>

namespace attn {

namespace {

// items of one row tile are neighbours; the first of each group, in the order of slots
struct Partials {
  size_t bytes;
  std::unique_ptr<char[]> data;
  char* at(const Item& item, int64_t max_splits) const {
    return data.get() + size_t(item.slot * max_splits + item.split) * bytes;
  }
};

}  // namespace

bool run_forward(const Kernels& kernels, const Args& args, int threads, const Interrupt& interrupted) {
  const Plan plan = plan_forward(args, kernels.shape(args.dtype));
  if (plan.items == 0) return true;
  Partials partials{kernels.partial_bytes(args, plan), nullptr};
  const bool split = plan.max_splits > 1;
  if (split) partials.data.reset(new char[partials.bytes * size_t(plan.slots * plan.max_splits)]);
  Job job;
  job.items = plan.items;
  job.scratch = kernels.forward_scratch(args, plan);
  job.run = [&](int64_t index, char* scratch) {
    const Item item = item_at(args, plan, index);
    char* partial = split && item.splits > 1 ? partials.at(item, plan.max_splits) : nullptr;
    kernels.forward(args, plan, item, scratch, partial);
  };
  if (!run_job(job, threads, interrupted)) return false;
  if (!split) return true;
  job.run = [&](int64_t index, char* scratch) {
    const Item item = item_at(args, plan, index);
    if (item.split == 0 && item.splits > 1)
      kernels.merge(args, plan, item, scratch, partials.at(item, plan.max_splits));
  };
  return run_job(job, threads, interrupted);
}

}  // namespace attn
