#include "pool.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "team.h"

namespace attn {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSignalPeriod = std::chrono::milliseconds(20);
constexpr size_t kAlign = 64, kHugePage = size_t(2) << 20;

class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  char* at_least(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      // whole huge pages where the system has them: a tile's scratch spans more pages than the first TLB holds
      const size_t unit = bytes >= kHugePage / 4 ? kHugePage : kAlign, rounded = (bytes + unit - 1) / unit * unit;
      data_ = static_cast<char*>(std::aligned_alloc(unit, rounded));
      if (!data_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
      if (unit == kHugePage) madvise(data_, rounded, MADV_HUGEPAGE);
#endif
      size_ = bytes;
    }
    return data_;
  }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

// The caller's floating-point environment while a worker runs its items: torch may have told the caller, and only the
// caller, to flush denormals, and a result shall not depend on who computes it
class SameEnvironment {
 public:
  explicit SameEnvironment(const std::fenv_t& callers) {
    std::fegetenv(&own_);
    std::fesetenv(&callers);
  }
  SameEnvironment(const SameEnvironment&) = delete;
  SameEnvironment& operator=(const SameEnvironment&) = delete;
  ~SameEnvironment() { std::fesetenv(&own_); }

 private:
  std::fenv_t own_;
};

// state of one job; workers hold it by shared_ptr, so a late worker never sees a dead one
struct Running {
  explicit Running(const Job& j) : job(j) { std::fegetenv(&environment); }
  Job job;
  std::fenv_t environment;
  std::atomic<int64_t> next{0};
  std::atomic<int> seats{0};   // own pool: workers that may still join; team: those that have joined
  std::atomic<int> active{0};  // workers inside
  std::atomic<bool> stop{false};
  std::atomic<bool> failed{false};
  std::exception_ptr error;  // of the first item that failed, set before the worker leaves

  bool step(char* scratch) {
    if (stop.load(std::memory_order_relaxed)) return false;
    const int64_t item = next.fetch_add(1, std::memory_order_relaxed);
    if (item >= job.items) return false;
    try {
      job.run(item, scratch);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
      stop = true;
    }
    return true;
  }

  void work(char* scratch) {
    const SameEnvironment here(environment);
    while (step(scratch)) {
    }
  }

  // the caller's end of a job: no worker is inside any more
  bool end(bool interrupted) const {
    if (error && !interrupted) std::rethrow_exception(error);
    return !interrupted;
  }
};

// looks for signals now and then; once one was seen it has nothing more to look for
class Watch {
 public:
  explicit Watch(const Interrupt& interrupted) : interrupted_(interrupted) {}
  bool seen() const { return seen_; }
  bool look() {
    const auto now = Clock::now();
    if (seen_ || now - last_ < kSignalPeriod) return seen_;
    last_ = now;
    return seen_ = interrupted_();
  }

 private:
  const Interrupt& interrupted_;
  Clock::time_point last_ = Clock::now();
  bool seen_ = false;
};

void drain(Running& running, char* scratch, Watch& watch) {
  while (running.step(scratch))
    if (watch.look()) running.stop = true;
}

bool run_alone(const Job& job, char* scratch, const Interrupt& interrupted) {
  Running running(job);
  Watch watch(interrupted);
  drain(running, scratch, watch);
  return running.end(watch.seen());
}

class Pool {
 public:
  bool run(const Job& job, int threads, const Interrupt& interrupted) {
    const int helpers = int(std::min<int64_t>(threads, job.items)) - 1;
    const size_t bytes = std::max<size_t>(job.scratch, 1);
    std::unique_lock<std::mutex> turn(busy_, std::try_to_lock);
    // another Python thread is computing already: the machine is in use, this call runs on its own thread
    if (!turn.owns_lock()) {
      Scratch own;
      return run_alone(job, own.at_least(bytes), interrupted);
    }
    // memory is taken here, before any other thread is in the job
    char* own = caller_.at_least(bytes);
    if (helpers < 1) return run_alone(job, own, interrupted);
    while (int(scratch_.size()) < helpers) scratch_.push_back(std::make_unique<Scratch>());
    for (int id = 0; id < helpers; ++id) scratch_[size_t(id)]->at_least(bytes);
    return team_is_borrowed() ? with_team(job, threads, helpers, interrupted) : with_workers(job, helpers, interrupted);
  }

 private:
  struct Shared {
    Pool& pool;
    Running running;
    Watch watch;
    int helpers;
    std::thread::id caller;
  };

  // always on all of torch's threads: a smaller team would end those that it leaves out
  bool with_team(const Job& job, int threads, int helpers, const Interrupt& interrupted) {
    Shared shared{*this, Running(job), Watch(interrupted), helpers, std::this_thread::get_id()};
    run_on_team(in_team, &shared, unsigned(threads));
    return shared.running.end(shared.watch.seen());
  }

  static void in_team(void* data) {
    Shared& shared = *static_cast<Shared*>(data);
    Running& running = shared.running;
    if (std::this_thread::get_id() == shared.caller) {
      drain(running, shared.pool.caller_.at_least(1), shared.watch);
      return wait_in_team(running, shared.watch);
    }
    running.active.fetch_add(1);
    const int seat = running.seats.fetch_add(1);
    if (seat < shared.helpers) running.work(shared.pool.scratch_of(size_t(seat)));
    running.active.fetch_sub(1, std::memory_order_release);
  }

  // the region ends with a barrier that knows of no signals: they are looked for here
  static void wait_in_team(Running& running, Watch& watch) {
    while (running.active.load(std::memory_order_acquire) > 0) {
      if (watch.look()) running.stop = true;
      std::this_thread::yield();
    }
  }

  bool with_workers(const Job& job, int helpers, const Interrupt& interrupted) {
    auto running = std::make_shared<Running>(job);
    Watch watch(interrupted);
    start(helpers);
    running->seats = helpers;
    {
      std::lock_guard<std::mutex> hold(mutex_);
      current_ = running;
      ++generation_;
    }
    wake_.notify_all();
    drain(*running, caller_.at_least(1), watch);
    running->seats = 0;
    {
      std::lock_guard<std::mutex> hold(mutex_);
      current_.reset();
    }
    while (running->active.load(std::memory_order_acquire) > 0) {
      std::unique_lock<std::mutex> hold(mutex_);
      done_.wait_for(hold, kSignalPeriod, [&] { return running->active.load(std::memory_order_acquire) == 0; });
      hold.unlock();
      if (watch.look()) running->stop = true;
    }
    return running->end(watch.seen());
  }

  void start(int helpers) {
    for (; workers_ < size_t(helpers); ++workers_) std::thread([this, id = workers_] { work(id); }).detach();
  }

  void work(size_t id) {
    uint64_t seen = 0;
    while (true) {
      std::shared_ptr<Running> running;
      {
        std::unique_lock<std::mutex> hold(mutex_);
        wake_.wait(hold, [&] { return generation_ != seen; });
        seen = generation_;
        running = current_;
        // a seat is taken under the lock: once the caller has cleared current_, nobody joins any more
        if (!running || int(id) >= running->seats.load()) continue;
        running->active.fetch_add(1);
      }
      running->work(scratch_of(id));
      {
        std::lock_guard<std::mutex> hold(mutex_);
        running->active.fetch_sub(1, std::memory_order_release);
      }
      done_.notify_one();
    }
  }

  char* scratch_of(size_t id) { return scratch_[id]->at_least(1); }

  std::mutex busy_, mutex_;
  std::condition_variable wake_, done_;
  std::shared_ptr<Running> current_;
  uint64_t generation_ = 0;
  size_t workers_ = 0;
  std::vector<std::unique_ptr<Scratch>> scratch_;
  Scratch caller_;
};

// never destroyed: its threads are detached and may outlive static destructors
std::atomic<Pool*> pool{nullptr};

Pool& the_pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    pool = new Pool;
    // threads do not survive a fork: the child starts with a new pool and forgets the old one
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
  });
  return *pool.load();
}

}  // namespace

bool run_job(const Job& job, int threads, const Interrupt& interrupted) {
  if (job.items == 0) return true;
  return the_pool().run(job, std::max(threads, 1), interrupted);
}

}  // namespace attn
