// Threads that help with a loop, and are not waited for unless they do.
//
// OpenMP's loops end when every thread has passed a barrier, also one that the system has not let run yet: on cores that
// are shared, as between the workers of a cluster on one machine, each loop then lasts as long as another's time slice.
// Here the caller takes tasks until none is left, and waits for those only that a helper has begun.
#pragma once

#include <cstdint>

using TaskFunction = void (*)(const void* context, int64_t task);

// How many threads a loop takes: as many as torch says for the calling thread; 1 before `tandem_ask_threads`.
int num_threads();

// Runs tasks 0 … count - 1, on `num_threads()` threads at once. Called while another loop runs, alone.
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
