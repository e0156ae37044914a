#include "pool.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

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

// entry of an OpenMP runtime to a parallel region, as GCC and Clang compile it: body(data) on `threads` threads
using Team = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
std::atomic<Team> team{nullptr};

// state of one job; workers hold it by shared_ptr, so a late worker never sees a dead one
struct Running {
  explicit Running(const Job& j) : job(j) {}
  Job job;
  std::atomic<int64_t> next{0};
  std::atomic<int> seats{0};   // workers that may still join
  std::atomic<int> active{0};  // workers inside
  std::atomic<bool> stop{false};

  bool step(char* scratch) {
    if (stop.load(std::memory_order_relaxed)) return false;
    const int64_t item = next.fetch_add(1, std::memory_order_relaxed);
    if (item >= job.items) return false;
    job.run(item, scratch);
    return true;
  }
};

class Pool {
 public:
  bool run(const Job& job, int threads, const Interrupt& interrupted) {
    const int helpers = int(std::min<int64_t>(threads, job.items)) - 1;
    const size_t bytes = std::max<size_t>(job.scratch, 1);
    std::unique_lock<std::mutex> turn(busy_, std::try_to_lock);
    // another Python thread is computing already: the machine is in use, this call runs on its own thread
    if (!turn.owns_lock()) {
      Scratch own;
      Running alone(job);
      return drain(alone, own.at_least(bytes), interrupted);
    }
    // memory is taken here, where an exception has somewhere to go
    caller_.at_least(bytes);
    while (int(scratch_.size()) < helpers) scratch_.push_back(std::make_unique<Scratch>());
    for (int id = 0; id < helpers; ++id) scratch_[size_t(id)]->at_least(bytes);
    if (helpers < 1) {
      Running alone(job);
      return drain(alone, caller_.at_least(1), interrupted);
    }
    if (const Team shared = team.load()) return with_team(shared, job, threads, helpers, interrupted);
    return with_workers(job, helpers, interrupted);
  }

 private:
  struct Region {
    Pool* pool;
    Running running;
    const Interrupt& interrupted;
    int helpers;
    std::thread::id caller;
    bool finished = true;
  };

  // always on all of torch's threads: a smaller team would end those that it leaves out
  bool with_team(Team shared, const Job& job, int threads, int helpers, const Interrupt& interrupted) {
    Region region{this, Running(job), interrupted, helpers, std::this_thread::get_id()};
    shared(in_region, &region, unsigned(threads), 0);
    return region.finished;
  }

  static void in_region(void* data) {
    Region& region = *static_cast<Region*>(data);
    Running& running = region.running;
    if (std::this_thread::get_id() == region.caller) {
      region.finished = drain(running, region.pool->caller_.at_least(1), region.interrupted);
      wait(running, region);
      return;
    }
    running.active.fetch_add(1);
    const int seat = running.seats.fetch_add(1);
    if (seat < region.helpers)
      while (running.step(region.pool->scratch_of(size_t(seat)))) {
      }
    running.active.fetch_sub(1, std::memory_order_release);
  }

  // the region ends with a barrier that knows of no signals: they are looked for here
  static void wait(Running& running, Region& region) {
    auto last = Clock::now();
    while (running.active.load(std::memory_order_acquire) > 0) {
      std::this_thread::yield();
      const auto now = Clock::now();
      if (now - last < kSignalPeriod) continue;
      last = now;
      if (!region.interrupted()) continue;
      running.stop = true;
      region.finished = false;
    }
  }

  bool with_workers(const Job& job, int helpers, const Interrupt& interrupted) {
    auto running = std::make_shared<Running>(job);
    start(helpers);
    running->seats = helpers;
    {
      std::lock_guard<std::mutex> hold(mutex_);
      current_ = running;
      ++generation_;
    }
    wake_.notify_all();
    bool finished = drain(*running, caller_.at_least(1), interrupted);
    running->seats = 0;
    {
      std::lock_guard<std::mutex> hold(mutex_);
      current_.reset();
    }
    while (running->active.load(std::memory_order_acquire) > 0) {
      std::unique_lock<std::mutex> hold(mutex_);
      done_.wait_for(hold, kSignalPeriod, [&] { return running->active.load(std::memory_order_acquire) == 0; });
      hold.unlock();
      if (running->active.load(std::memory_order_acquire) > 0 && interrupted()) {
        running->stop = true;
        finished = false;
      }
    }
    return finished;
  }

  static bool drain(Running& running, char* scratch, const Interrupt& interrupted) {
    auto last = Clock::now();
    while (running.step(scratch)) {
      const auto now = Clock::now();
      if (now - last < kSignalPeriod) continue;
      last = now;
      if (interrupted()) {
        running.stop = true;
        return false;
      }
    }
    return true;
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
      while (running->step(scratch_of(id))) {
      }
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
    pthread_atfork(nullptr, nullptr, [] {
      pool = new Pool;
      team = nullptr;
    });
  });
  return *pool.load();
}

}  // namespace

bool run_job(const Job& job, int threads, const Interrupt& interrupted) {
  if (job.items == 0) return true;
  return the_pool().run(job, std::max(threads, 1), interrupted);
}

bool share_torch_threads() {
  the_pool();  // so that a child knows that it has no team
  void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (!torch) return false;
  team = reinterpret_cast<Team>(dlsym(torch, "GOMP_parallel"));  // its own, or that of what it links to
  dlclose(torch);
  return team.load() != nullptr;
}

}  // namespace attn
