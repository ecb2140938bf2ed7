// A pool of threads for parallel loops. The caller takes tasks until none is left, and waits only for threads that have
// begun one.
//
// An OpenMP loop ends when every thread has passed a barrier, also one that the system has not let run yet. On cores
// that several processes share, as the workers of a cluster on one machine do, each loop then lasts as long as another
// process's time slice.
#pragma once

#include <cstdint>

using TaskFunction = void (*)(const void* context, int64_t task);

// The number of threads for a loop: torch's setting for the calling thread; 1 before `tandem_ask_threads`.
int num_threads();

// Runs tasks 0 … count - 1 on `num_threads()` threads. While another loop runs, the calling thread runs all tasks
// itself.
void run_tasks(int64_t count, TaskFunction function, const void* context);

template <typename F>
void parallel_for(int64_t count, const F& body) {
  run_tasks(count, [](const void* context, int64_t task) { (*(const F*)context)(task); }, &body);
}

// The same, `grain` iterations to a task; body(first, last).
template <typename F>
void parallel_ranges(int64_t count, int64_t grain, const F& body) {
  parallel_for((count + grain - 1) / grain, [&](int64_t task) {
    const int64_t first = task * grain, last = first + grain;
    body(first, last < count ? last : count);
  });
}
