#include "thread_pool.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "ops.h"
#include "pause.h"

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

constexpr int kPauses = 32;  // between two reads of the clock
constexpr microseconds kLeastSpin{10}, kMostSpin{200};

// Waits until `so()` is true; false when the time is over first. It does not call sched_yield: where anything else
// wants the core, that costs a whole time slice, and loops are shorter than that.
template <typename F>
bool spin(microseconds time, const F& so) {
  const auto end = Clock::now() + time;
  do {
    for (int i = 0; i < kPauses; i++) {
      if (so()) return true;
      pause_a_little();
    }
  } while (Clock::now() < end);
  return false;
}

// A helper's place among the cores.
struct Helper {
  std::atomic<pid_t> id{0};
  std::atomic<int> core{-1};      // where it fell asleep; -1: it is awake
  std::atomic<int> kept_off{-1};  // the caller's core, on which it is not to wake; -1: none
  cpu_set_t allowed{};            // its cores otherwise; written by the caller while `kept_off` is -1
  Helper* before = nullptr;       // the one that was made before it
};

class ThreadPool {
 public:
  void run(int64_t count, TaskFunction function, const void* context, int threads) {
    while (helpers_ < threads - 1) {
      Helper* helper = new Helper;  // a container's allocation would need a younger C++ runtime than wheels may
      helper->before = last_, last_ = helper;
      helpers_++;
      std::thread([this, helper, index = helpers_] { help(*helper, index); }).detach();
    }
    function_ = function, context_ = context, count_ = count;
    wanted_.store(threads - 1, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    open_.store(true);
    loop_.fetch_add(1);
    if (asleep_.load() > 0) {
      const int core = sched_getcpu();
      for (Helper* helper = last_; helper; helper = helper->before) keep_off(*helper, core);
      loop_.notify_all();
    }
    take_tasks();
    open_.store(false);
    // A helper that starts now finds the loop closed; one that started before is counted in active_.
    while (!spin(kMostSpin, [&] { return active_.load() == 0; })) sched_yield();
  }

 private:
  void take_tasks() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) function_(context_, i);
  }

  // Keeps a helper that sleeps from waking up on the caller's core. The system moves a caller whose core another thread
  // took to the core of a helper that sleeps, and wakes the helper behind it; there they then take turns of
  // milliseconds, for up to 20 ms, whichever core is idle meanwhile.
  static void keep_off(Helper& helper, int core) {
    const int slept = helper.core.load(), before = helper.kept_off.load();
    const bool has_moved = before >= 0 && before != core;  // the caller, since the helper was woken
    if (slept < 0 || core < 0 || core >= CPU_SETSIZE || (slept != core && !has_moved) || before == core) return;
    const pid_t id = helper.id.load();
    if (before < 0 && sched_getaffinity(id, sizeof(cpu_set_t), &helper.allowed) != 0) return;
    cpu_set_t others = helper.allowed;
    CPU_CLR(core, &others);
    if (CPU_COUNT(&others) > 0 && sched_setaffinity(id, sizeof(others), &others) == 0) helper.kept_off.store(core);
  }

  static void allow_all(Helper& helper) {
    if (helper.kept_off.load() < 0) return;
    sched_setaffinity(0, sizeof(helper.allowed), &helper.allowed);
    helper.kept_off.store(-1);
  }

  void help(Helper& helper, int index) {
    helper.id.store(pid_t(syscall(SYS_gettid)));  // gettid() is younger than the oldest glibc that wheels are for
    auto time = kMostSpin;
    for (uint32_t seen = 0;;) {
      seen = wait(helper, seen, time);
      allow_all(helper);
      active_.fetch_add(1);
      if (open_.load() && index <= wanted_.load(std::memory_order_relaxed)) take_tasks();
      active_.fetch_sub(1);
    }
  }

  // Waits for a loop after number `seen` and returns its number. The next loop mostly follows within microseconds, so a
  // helper spins before it sleeps; the time it spins adapts to how long recent waits took.
  uint32_t wait(Helper& helper, uint32_t seen, microseconds& time) {
    const auto begin = Clock::now();
    if (!spin(time, [&] { return loop_.load() != seen; })) {
      helper.core.store(sched_getcpu());
      asleep_.fetch_add(1);
      loop_.wait(seen);
      asleep_.fetch_sub(1);
      helper.core.store(-1);
    }
    const bool was_short = Clock::now() - begin < kMostSpin;
    time = was_short ? std::min(kMostSpin, 2 * time) : std::max(kLeastSpin, time / 2);
    return loop_.load();
  }

  int helpers_ = 0;
  Helper* last_ = nullptr;
  TaskFunction function_ = nullptr;
  const void* context_ = nullptr;
  int64_t count_ = 0;
  std::atomic<int> wanted_{0}, active_{0}, asleep_{0};
  std::atomic<bool> open_{false};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> loop_{0};
};

std::atomic<int (*)()> ask_threads{nullptr};

}  // namespace

// Sets the function that returns the number of threads for a loop: torch's, see launch.py. OpenMP is not linked: its
// file name differs between builds of torch, and a second copy of the runtime would not know the value of
// torch.set_num_threads.
extern "C" void tandem_ask_threads(int (*ask)()) { ask_threads.store(ask); }

int num_threads() {
  const auto ask = ask_threads.load(std::memory_order_relaxed);
  return ask ? std::max(1, ask()) : 1;
}

void run_tasks(int64_t count, TaskFunction function, const void* context) {
  static ThreadPool* pool = new ThreadPool;  // never destroyed: its threads end with the process
  static std::atomic_flag busy;
  const int threads = num_threads();
  if (count > 1 && threads > 1 && !busy.test_and_set(std::memory_order_acquire)) {
    pool->run(count, function, context, threads);
    busy.clear(std::memory_order_release);
    return;
  }
  for (int64_t i = 0; i < count; i++) function(context, i);
}
