#include "tidegate/parallel.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cfloat>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <pmmintrin.h>
#include <xmmintrin.h>
#endif

#include "base/shares.h"
#include "tidegate/error.h"

#ifndef __has_feature
#define __has_feature(x) 0  // g++ says it with macros of its own
#endif
#if defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)
#define TIDEGATE_SANITIZED 2
#elif defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#define TIDEGATE_SANITIZED 1
#else
#define TIDEGATE_SANITIZED 0
#endif

namespace tidegate {
namespace {

class ParallelTest : public testing::Test {
 protected:
  void TearDown() override {
    set_parallel_backend(nullptr);
    set_num_threads(before_);
  }
  const int before_ = num_threads();
};

std::int64_t sum_of_tasks(std::int64_t tasks) {
  std::atomic<std::int64_t> sum{0};
  parallel_for(tasks, [&](std::int64_t task) { sum += task + 1; });
  return sum;
}

// Runs f in a forked child; true if it returned true there within a minute.
template <class F>
bool in_child(F&& f) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(f() ? 0 : 1);
  }
  int status = -1;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST_F(ParallelTest, EveryTaskRunsOnce) {
  for (const int threads : {1, 2, 3, 8}) {
    set_num_threads(threads);
    EXPECT_EQ(num_threads(), threads);
    for (const std::int64_t tasks : {-1, 0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> runs(1000);
      parallel_for(tasks, [&](std::int64_t task) { ++runs.at(static_cast<std::size_t>(task)); });
      for (std::int64_t task = 0; task < 1000; ++task) {
        ASSERT_EQ(runs[static_cast<std::size_t>(task)], task < tasks ? 1 : 0) << threads << " threads, task " << task;
      }
    }
  }
}

TEST_F(ParallelTest, TasksRunAtTheSameTimeAndTheCallerWaitsForTheLast) {
  set_num_threads(3);
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> arrived{0}, done{0};
  parallel_for(3, [&](std::int64_t) {
    ++arrived;
    while (arrived < 3) {  // ends only if three threads are in here together
      std::this_thread::yield();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(std::this_thread::get_id() == caller ? 0 : 20));
    ++done;
  });
  EXPECT_EQ(done, 3);
}

TEST_F(ParallelTest, NestedCallsRunEveryTaskOnce) {
  for (const int threads : {1, 2, 8}) {
    set_num_threads(threads);
    std::vector<std::atomic<int>> runs(8 * 16);
    parallel_for(8, [&](std::int64_t outer) {
      parallel_for(16, [&](std::int64_t inner) { ++runs[static_cast<std::size_t>(outer * 16 + inner)]; });
    });
    for (const std::atomic<int>& r : runs) {
      ASSERT_EQ(r, 1) << threads;
    }
  }
}

TEST_F(ParallelTest, ConcurrentCallers) {
  set_num_threads(3);
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 8; ++caller) {
    callers.emplace_back([&wrong] {
      for (int i = 0; i < 200; ++i) {
        wrong += sum_of_tasks(100) != 5050;
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  EXPECT_EQ(wrong, 0);
}

TEST_F(ParallelTest, ACallerNeverWaitsForAnotherOne) {
  set_num_threads(2);
  std::atomic<int> right{0};
  parallel_for(2, [&](std::int64_t) {  // would hang if the other thread's call waited for this one
    std::thread([&] { right += sum_of_tasks(10) == 55; }).join();
  });
  EXPECT_EQ(right, 2);
  parallel_for(4, [&](std::int64_t) { set_num_threads(num_threads() == 2 ? 3 : 2); });
  EXPECT_EQ(sum_of_tasks(100), 5050);
}

TEST_F(ParallelTest, AnExceptionReachesTheCaller) {
  for (const int threads : {1, 3}) {
    set_num_threads(threads);
    for (const std::int64_t bad : {0, 50, 99}) {
      const auto body = [bad](std::int64_t task) { task == bad ? throw std::runtime_error("task") : void(); };
      EXPECT_THROW(parallel_for(100, body), std::runtime_error);
      EXPECT_EQ(sum_of_tasks(100), 5050);
    }
  }
}

TEST_F(ParallelTest, ThreadCountsOutOfRange) {
  for (const int threads : {0, -1, 4097}) {
    try {
      set_num_threads(threads);
      ADD_FAILURE() << threads;
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()), "set_num_threads: threads: expected 1 to 4096, got " + std::to_string(threads));
    }
  }
  EXPECT_EQ(num_threads(), before_);
}

// Two ranges, the second one first: any order and any cut is allowed.
std::int64_t backend_calls = 0;
void two_ranges(std::int64_t tasks, ParallelBody body, void* context) {
  ++backend_calls;
  body(context, tasks / 2, tasks);
  body(context, 0, tasks / 2);
}

TEST_F(ParallelTest, CustomBackendGetsEveryCall) {
  backend_calls = 0;
  set_parallel_backend(two_ranges, [] { return 7; });
  EXPECT_EQ(sum_of_tasks(101), 5151);
  set_parallel_backend(nullptr);
  EXPECT_EQ(sum_of_tasks(100), 5050);
  EXPECT_EQ(backend_calls, 1);
}

TEST_F(ParallelTest, ABackendOfUnknownSizeGetsWorkersForAnyThreadCount) {
  set_num_threads(1);
  backend_calls = 0;
  set_parallel_backend(two_ranges);
  EXPECT_EQ(sum_of_tasks(101), 5151);
  EXPECT_EQ(backend_calls, 1);
  const auto body = [](std::int64_t task) { task == 50 ? throw std::runtime_error("task") : void(); };
  EXPECT_THROW(parallel_for(100, body), std::runtime_error);
  EXPECT_EQ(sum_of_tasks(100), 5050);
  set_parallel_backend(nullptr);
}

// As a pool with a static cut does it, with one thread that comes late.
void late_second(std::int64_t tasks, ParallelBody body, void* context) {
  ASSERT_EQ(tasks, 2);
  std::thread first([&] { body(context, 0, 1); });
  first.join();
  body(context, 1, 2);
}

TEST_F(ParallelTest, AWorkerOfABackendDoesTheTasksOfOneThatIsLate) {
  set_parallel_backend(late_second, [] { return 2; });
  std::vector<std::thread::id> who(100);
  parallel_for(100, [&](std::int64_t task) { who[static_cast<std::size_t>(task)] = std::this_thread::get_id(); });
  set_parallel_backend(nullptr);
  for (const std::thread::id id : who) {
    EXPECT_NE(id, std::thread::id());
    EXPECT_NE(id, std::this_thread::get_id());
  }
}

#if defined(__x86_64__)
TEST_F(ParallelTest, FloatEnvironmentIsTheDefaultInsideAndTheCallersAfterwards) {
  constexpr unsigned kControl = 0xffc0;  // everything but the sticky flags
  const unsigned original = _mm_getcsr();
  for (const int threads : {0, 1, 3}) {  // 0 = through a backend
    set_parallel_backend(threads == 0 ? two_ranges : nullptr);
    set_num_threads(threads == 0 ? 1 : threads);
    _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);
    _MM_SET_DENORMALS_ZERO_MODE(_MM_DENORMALS_ZERO_ON);
    _MM_SET_ROUNDING_MODE(_MM_ROUND_UP);
    const unsigned before = _mm_getcsr();
    std::atomic<int> wrong{0};
    parallel_for(64, [&](std::int64_t) {  // new workers inherit the caller's bits, too
      volatile float tiny = FLT_MIN;
      volatile float one = 1.0f;
      wrong += (_mm_getcsr() & kControl) != 0x1f80 || tiny * 0.5f == 0.0f || one + tiny != 1.0f;
    });
    const unsigned after = _mm_getcsr();
    _mm_setcsr(original);
    EXPECT_EQ(wrong, 0) << threads;
    EXPECT_EQ(after & kControl, before & kControl) << threads;
  }
}
#endif

TEST_F(ParallelTest, WorksAfterFork) {
  if (TIDEGATE_SANITIZED == 2) {
    GTEST_SKIP() << "ThreadSanitizer allows no threads after a fork";
  }
  set_num_threads(3);
  ASSERT_EQ(sum_of_tasks(100), 5050);
  EXPECT_TRUE(in_child([] { return sum_of_tasks(100) == 5050 && sum_of_tasks(10) == 55; }));
  EXPECT_EQ(sum_of_tasks(100), 5050);
}

TEST_F(ParallelTest, FewerThreadsThanAskedForIsNoError) {
  if (TIDEGATE_SANITIZED != 0) {
    GTEST_SKIP() << "sanitizers reserve address space without limit";
  }
  EXPECT_TRUE(in_child([] {
    long pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlim_t limit = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE)) + (rlim_t{32} << 20);
    const rlimit address_space = {limit, limit};  // a few stacks
    set_num_threads(1000);
    return pages > 0 && setrlimit(RLIMIT_AS, &address_space) == 0 && sum_of_tasks(100) == 5050 && num_threads() == 1000;
  }));
}

TEST(ParallelEnvironmentDeathTest, InvalidThreadCountIsAnError) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a fresh process: the variable is read once
  const char* old = std::getenv("TIDEGATE_NUM_THREADS");
  const std::string before = old != nullptr ? old : "";
  const auto report = [] {
    try {
      std::_Exit(num_threads());
    } catch (const Error& e) {
      std::fputs(e.what(), stderr);
      std::_Exit(99);
    }
  };
  setenv("TIDEGATE_NUM_THREADS", "5", 1);
  EXPECT_EXIT(report(), testing::ExitedWithCode(5), "");
  for (const std::string text : {"0", "-2", "4097", "two", "3x", " "}) {
    setenv("TIDEGATE_NUM_THREADS", text.c_str(), 1);
    EXPECT_EXIT(report(), testing::ExitedWithCode(99),
                "TIDEGATE_NUM_THREADS: expected an integer from 1 to 4096, got " + text);
  }
  old != nullptr ? setenv("TIDEGATE_NUM_THREADS", before.c_str(), 1) : unsetenv("TIDEGATE_NUM_THREADS");
}

TEST(Shares, EveryPieceOnceAndTheOwnStretchFirst) {
  for (const std::int64_t pieces : {0, 1, 2, 7, 64, 1000}) {
    for (const std::int64_t workers : {1, 2, 3, 64}) {
      Shares shares(pieces, workers);
      std::vector<int> taken(static_cast<std::size_t>(pieces));
      const std::int64_t last = shares.workers() - 1;
      std::int64_t expected = pieces * last / shares.workers();
      for (std::int64_t i = shares.take(last); i >= 0; i = shares.take(last)) {
        EXPECT_EQ(i, expected % std::max<std::int64_t>(pieces, 1));  // its own stretch, then the others' from the first
        expected = i + 1;
        ++taken[static_cast<std::size_t>(i)];
      }
      EXPECT_EQ(shares.take(0), -1);
      EXPECT_EQ(taken, std::vector<int>(static_cast<std::size_t>(pieces), 1));
    }
  }
}

TEST(Shares, WorkersNeverMeet) {
  constexpr std::int64_t kPieces = 20000;
  std::vector<int> taken(kPieces);  // plain ints: a piece taken twice is a race
  Shares shares(kPieces, 100);
  EXPECT_EQ(shares.workers(), 100);
  std::vector<std::thread> workers;
  for (const std::int64_t w : {0, 1, 2, 3, 64, 65, 66, 99}) {  // 64 and 0 have the same stretch
    workers.emplace_back([&, w] {
      for (std::int64_t i = shares.take(w); i >= 0; i = shares.take(w)) {
        ++taken[static_cast<std::size_t>(i)];
      }
    });
  }
  for (std::thread& w : workers) {
    w.join();
  }
  EXPECT_EQ(taken, std::vector<int>(kPieces, 1));
}

}  // namespace
}  // namespace tidegate
