#include "calls.h"

#include <algorithm>
#include <memory>
#include <vector>

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
  const Shape shape = kernels.shape(args.dtype);
  const Plan plan = plan_forward(args, shape, threads);
  if (plan.items == 0) return true;
  Partials partials{kernels.partial_bytes(args, plan), nullptr};
  const bool split = plan.max_splits > 1;
  if (split) partials.data.reset(new char[partials.bytes * size_t(plan.slots * plan.max_splits)]);
  Job job;
  job.items = plan.items;
  job.scratch = kernels.forward_scratch(args, plan);
  job.run = [&](int64_t index, char* scratch) {
    const Item item = item_at(args, plan, shape, index);
    if (item.rows == 0) return;
    char* partial = split && item.splits > 1 ? partials.at(item, plan.max_splits) : nullptr;
    kernels.forward(args, plan, item, scratch, partial);
  };
  if (!run_job(job, threads, interrupted)) return false;
  if (!split) return true;
  job.run = [&](int64_t index, char* scratch) {
    const Item item = item_at(args, plan, shape, index);
    if (item.split == 0 && item.splits > 1)
      kernels.merge(args, plan, item, scratch, partials.at(item, plan.max_splits));
  };
  return run_job(job, threads, interrupted);
}

namespace {

constexpr int64_t kDeltaRows = 1024;

struct BackwardCall {
  const Kernels& kernels;
  const Args& args;
  BackwardPlan& plan;
  Shape shape;
  int threads;
  const Interrupt& interrupted;

  bool job(int64_t items, size_t scratch, std::function<void(int64_t, char*)> run) const {
    return run_job({items, scratch, std::move(run)}, threads, interrupted);
  }

  bool delta() const {
    const int64_t parts = (args.M + kDeltaRows - 1) / kDeltaRows;
    const size_t scratch = 2 * size_t(args.Dv) * sizeof(double);
    return job(args.B * args.H * parts, scratch, [&, parts](int64_t index, char* memory) {
      const int64_t b = index / parts / args.H, begin = index % parts * kDeltaRows;
      const int64_t end = std::min(begin + kDeltaRows, queries_of(args, b));
      if (begin < end) kernels.delta(args, plan, b, index / parts % args.H, begin, end, memory);
    });
  }

  bool one_pass() const {
    // a head may take long: between its row tiles it looks whether the call was interrupted
    bool stop = false;
    const Interrupt watch = [&] {
      const bool now = interrupted();
      if (now) __atomic_store_n(&stop, true, __ATOMIC_RELAXED);
      return now;
    };
    const Job work{args.B * args.Hkv, kernels.backward_scratch(args, plan, Pass::both), [&](int64_t index, char* memory) {
                     kernels.backward_both(args, plan, head_item(args, plan, index), memory, &stop);
                   }};
    return run_job(work, threads, watch);
  }

  bool queries() const {
    return job(plan.row_items(), kernels.backward_scratch(args, plan, Pass::queries), [&](int64_t index, char* memory) {
      kernels.backward_queries(args, plan, row_item(args, plan, index), memory);
    });
  }

  bool keys() const {
    return job(plan.key_items(), kernels.backward_scratch(args, plan, Pass::keys), [&](int64_t index, char* memory) {
      kernels.backward_keys(args, plan, key_item(args, plan, index), memory);
    });
  }

  bool bias() const {
    return job(bias_items(args, plan, shape), kernels.backward_scratch(args, plan, Pass::bias),
               [&](int64_t index, char* memory) {
                 kernels.backward_bias(args, plan, bias_item(args, plan, shape, index), memory);
               });
  }

  bool sink() const {
    return job(args.H, 1, [&](int64_t h, char*) { kernels.sink(args, plan, h); });
  }

  // row tiles of a head are neighbours in slot order: their sums are joined in that order
  void slopes() const {
    const int64_t G = args.H / args.Hkv;
    for (int64_t b = 0; b < args.B; ++b) {
      const int64_t tiles = (plan.first_rows[size_t(b) + 1] - plan.first_rows[size_t(b)]) / args.Hkv;
      for (int64_t h = 0; h < args.H; ++h) {
        double sum = 0;
        for (int64_t tile = 0; tile < tiles; ++tile)
          sum += plan.slope_sums[(plan.first_rows[size_t(b)] + h / G * tiles + tile) * G + h % G];
        if (args.dtype == Dtype::f64)
          reinterpret_cast<double*>(args.dslopes)[b * args.H + h] = sum;
        else
          reinterpret_cast<float*>(args.dslopes)[b * args.H + h] = float(sum);
      }
    }
  }
};

}  // namespace

bool run_backward(const Kernels& kernels, const Args& args, int threads, const Interrupt& interrupted, BackwardWay way) {
  const Shape shape = kernels.shape(args.dtype);
  BackwardPlan plan = plan_backward(args, shape);
  const int64_t tokens = args.rows == RowKind::packed ? args.total_q : args.B * args.M;
  std::vector<double> delta(size_t(tokens * args.H) / (args.dtype == Dtype::f64 ? 1 : 2) + 1);
  std::vector<double> slope_sums(args.dslopes ? size_t(plan.row_items() * (args.H / std::max<int64_t>(args.Hkv, 1))) : 0);
  plan.delta = reinterpret_cast<char*>(delta.data());
  plan.slope_sums = slope_sums.data();
  const BackwardCall call{kernels, args, plan, shape, threads, interrupted};
  if (!call.delta()) return false;
  const bool can = kernels.can_sum_in_place(args);
  const bool one = can && (way == BackwardWay::one_pass || (way == BackwardWay::choose && one_pass_pays(args, threads)));
  if (one) {
    if (!call.one_pass()) return false;
  } else {
    if ((args.dq.data || args.dslopes) && !call.queries()) return false;
    if ((args.dk.data || args.dv.data) && !call.keys()) return false;
  }
  if (args.dslopes && args.H) call.slopes();
  if (args.dbias && !call.bias()) return false;
  return !args.dsink || call.sink();
}

}  // namespace attn
