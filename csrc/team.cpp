#include "team.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace attn {

namespace {

// a parallel region, as GCC and Clang compile it
using Region = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
// omp_pause_resource_all: ends the calling thread's team
using Pause = int (*)(int kind);
constexpr int kHard = 2;  // omp_pause_hard

enum class Verdict { open, yes, no };

std::atomic<Verdict> verdict{Verdict::open};
std::atomic<bool> wanted_now{false};
Region region = nullptr;
Pause pause_all = nullptr;
thread_local bool has_team = false;

// PF_FORKNOEXEC in the flags, the ninth field of /proc/self/stat; yes where that cannot be read
bool was_forked() {
  constexpr unsigned long kForkedNotExecuted = 0x40;
  char line[1024] = {};
  std::FILE* file = std::fopen("/proc/self/stat", "r");
  if (!file) return true;
  const size_t length = std::fread(line, 1, sizeof(line) - 1, file);
  std::fclose(file);
  const char* at = length ? std::strrchr(line, ')') : nullptr;  // the second field may hold spaces
  for (int field = 2; at && field < 9; ++field) at = std::strchr(at + 1, ' ');
  return !at || (std::strtoul(at, nullptr, 10) & kForkedNotExecuted);
}

void before_fork() {
  if (!has_team) return;
  pause_all(kHard);
  has_team = false;
}

// the entry that torch's calls are bound to, and the function that ends a team; false where one is missing
bool find(void* torch) {
  const char* const name = "GOMP_parallel";
  void* entry = dlsym(torch, name);
  if (!entry) return false;
  // what was preloaded, or loaded for all, comes before torch's own
  if (void* global = dlsym(RTLD_DEFAULT, name)) entry = global;
  Dl_info from;
  if (!dladdr(entry, &from) || !from.dli_fname || !std::strstr(from.dli_fname, "libgomp")) return false;
  void* runtime = dlopen(from.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (!runtime) return false;
  region = reinterpret_cast<Region>(entry);
  pause_all = reinterpret_cast<Pause>(dlsym(runtime, "omp_pause_resource_all"));
  dlclose(runtime);
  return pause_all != nullptr;
}

Verdict decide() {
  void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (!torch) return Verdict::open;
  const bool found = !was_forked() && find(torch);
  dlclose(torch);
  if (!found || pthread_atfork(before_fork, nullptr, [] { verdict = Verdict::no; }) != 0) return Verdict::no;
  return Verdict::yes;
}

}  // namespace

bool borrow_team(bool wanted) {
  if (wanted && verdict == Verdict::open) verdict = decide();
  wanted_now = wanted;
  return team_is_borrowed();
}

bool team_is_borrowed() { return wanted_now && verdict == Verdict::yes; }

void run_on_team(void (*body)(void*), void* data, unsigned threads) {
  has_team = true;
  region(body, data, threads, 0);
}

}  // namespace attn
