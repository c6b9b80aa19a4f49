// The one place where threads come from.
//
// An operator cuts its work into tasks by a pure function of the problem, never of the thread count, and calls
// parallel_for(tasks, f). Who runs a task is free; what a task computes is not. That is why results have the same bits
// for any number of threads.
#pragma once

#include <cstdint>
#include <type_traits>

namespace tidegate {

// A backend runs body(context, first, last) for disjoint ranges that cover [0, tasks). Its tasks are the workers of one
// call, as many as it has threads at most (if it tells how many); each takes pieces of the work until none is left.
using ParallelBody = void (*)(void* context, std::int64_t first, std::int64_t last);
using ParallelBackend = void (*)(std::int64_t tasks, ParallelBody body, void* context);

// Installs another pool (the torch adapter installs torch's) and what tells its size; nullptr brings back the library's
// own.
void set_parallel_backend(ParallelBackend backend, int (*threads)() = nullptr);

// Threads of the library's own pool. The default is the number of CPUs this process may use, or TIDEGATE_NUM_THREADS.
void set_num_threads(int threads);
int num_threads();

// Threads that the next parallel_for may get, whoever's pool it is. For choosing how finely to cut work whose bits do
// not depend on the cut.
int parallel_threads();

// Runs tasks through the backend. Around every range the floating-point control word is set to the default (round to
// nearest, denormals kept) and restored afterwards, so results do not depend on the caller's FTZ/DAZ bits.
void run_parallel(std::int64_t tasks, ParallelBody body, void* context);

// f(task) for every task in [0, tasks). f must not throw.
template <class F>
void parallel_for(std::int64_t tasks, F&& f) {
  using Fn = std::remove_reference_t<F>;
  run_parallel(
      tasks,
      [](void* context, std::int64_t first, std::int64_t last) {
        Fn& fn = *static_cast<Fn*>(context);
        for (std::int64_t task = first; task < last; ++task) {
          fn(task);
        }
      },
      const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace tidegate
