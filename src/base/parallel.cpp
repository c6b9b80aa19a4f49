#include "tidegate/parallel.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "base/float_environment.h"
#include "base/shares.h"
#include "tidegate/error.h"

namespace tidegate {
#if defined(__x86_64__)
FloatEnvironment::FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }  // all exceptions masked too
FloatEnvironment::~FloatEnvironment() { _mm_setcsr(saved_); }
#else
FloatEnvironment::FloatEnvironment() {
  std::fegetenv(&saved_);
  std::fesetenv(FE_DFL_ENV);
}
FloatEnvironment::~FloatEnvironment() { std::fesetenv(&saved_); }
#endif

namespace {

struct Job {
  Shares tasks;
  ParallelBody body;
  void* context;
  std::exception_ptr failure{};  // of the first task that threw; out of memory is the only expected reason
  std::atomic<bool> failed{false};

  void work(std::int64_t worker) {
    const FloatEnvironment environment;
    for (std::int64_t task = tasks.take(worker); task >= 0 && !failed.load(std::memory_order_relaxed);
         task = tasks.take(worker)) {
      body(context, task, task + 1);
    }
  }
  void work_in_pool(std::int64_t worker) noexcept {
    try {
      work(worker);
    } catch (...) {
      if (!failed.exchange(true)) {  // no further task starts
        failure = std::current_exception();
      }
    }
  }
};

int default_threads() {
  if (const char* text = std::getenv("TIDEGATE_NUM_THREADS"); text != nullptr && *text != '\0') {
    char* end = nullptr;
    const long n = std::strtol(text, &end, 10);
    check(*end == '\0' && n >= 1 && n <= 4096, "TIDEGATE_NUM_THREADS: expected an integer from 1 to 4096, got ", text);
    return static_cast<int>(n);
  }
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    return CPU_COUNT(&set);
  }
  // More CPUs than a cpu_set_t holds.
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 4096);
}

thread_local bool inside_pool = false;

// Workers sleep between jobs. One job at a time: a second caller, or a nested call, runs its tasks itself.
class Pool {
 public:
  explicit Pool(int threads) : threads_(threads) {
    workers_.reserve(static_cast<std::size_t>(threads));
    try {
      for (int i = 1; i < threads; ++i) {
        workers_.emplace_back([this, i] { serve(i); });
      }
    } catch (const std::system_error&) {
      // The system gives no more threads. Those there are do the work, with the same bits.
    } catch (const std::bad_alloc&) {
      // No memory for one more thread: the same. Passing it on would end the process, for threads run already.
    }
  }
  ~Pool() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) {
      worker.join();
    }
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }  // asked for

  void run(Job& job) {
    {
      const std::lock_guard lock(mutex_);
      job_ = &job;
      ++generation_;
    }
    wake_.notify_all();
    inside_pool = true;
    job.work_in_pool(0);
    inside_pool = false;
    std::unique_lock lock(mutex_);
    job_ = nullptr;  // latecomers find nothing
    idle_.wait(lock, [this] { return busy_ == 0; });
    if (job.failure) {
      std::rethrow_exception(job.failure);
    }
  }

 private:
  void serve(int worker) {
    inside_pool = true;
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return stopping_ || (job_ != nullptr && generation_ != seen); });
      if (stopping_) {
        return;
      }
      seen = generation_;
      Job* job = job_;
      ++busy_;
      lock.unlock();
      job->work_in_pool(worker);
      lock.lock();
      if (--busy_ == 0) {
        idle_.notify_all();
      }
    }
  }

  const int threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::vector<std::thread> workers_;
  Job* job_ = nullptr;
  std::uint64_t generation_ = 0;
  int busy_ = 0;
  bool stopping_ = false;
};

// Guards the pool and is held while a job runs. It is only ever tried: who finds it taken works alone and never waits.
std::mutex pool_mutex;
Pool* pool = nullptr;                // leaked at exit on purpose: workers may still be asleep in it
std::atomic<int> wanted_threads{0};  // 0 = not known yet; the pool follows at the next job
std::atomic<ParallelBackend> installed{nullptr};
std::atomic<int (*)()> installed_threads{nullptr};

// A forked child has the memory of the pool but none of its threads: forget it, a new one is made on demand.
void forget_pool_in_child() {
  pool = nullptr;
  new (&pool_mutex) std::mutex;
}

void run_alone(std::int64_t tasks, ParallelBody body, void* context) {
  const FloatEnvironment environment;
  body(context, 0, tasks);
}

}  // namespace

void set_parallel_backend(ParallelBackend backend, int (*threads)()) {
  installed.store(backend);
  installed_threads.store(threads);
}

int parallel_threads() {
  const auto threads = installed_threads.load();
  return threads != nullptr ? std::max(threads(), 1) : num_threads();
}

void set_num_threads(int threads) {
  check(threads >= 1 && threads <= 4096, "set_num_threads: threads: expected 1 to 4096, got ", threads);
  wanted_threads.store(threads);
}

int num_threads() {
  int threads = wanted_threads.load();
  if (threads == 0) {
    const int automatic = default_threads();
    threads = wanted_threads.compare_exchange_strong(threads, automatic) ? automatic : threads;
  }
  return threads;
}

void run_parallel(std::int64_t tasks, ParallelBody body, void* context) {
  if (tasks <= 0) {
    return;
  }
  const ParallelBackend backend = installed.load();
  const bool known = backend == nullptr || installed_threads.load() != nullptr;
  const std::int64_t workers = known ? parallel_threads() : tasks;  // as many as a pool of any size can use
  if (tasks == 1 || workers == 1 || (backend == nullptr && inside_pool)) {
    run_alone(tasks, body, context);
    return;
  }
  Job job{Shares(tasks, workers), body, context};
  if (backend != nullptr) {
    // A static cut of the tasks, as pools have it, waits for the slowest of its parts: theirs are workers.
    backend(
        job.tasks.workers(),
        [](void* user, std::int64_t first, std::int64_t last) {
          for (std::int64_t worker = first; worker < last; ++worker) {
            static_cast<Job*>(user)->work(worker);
          }
        },
        &job);
    return;
  }
  const std::unique_lock lock(pool_mutex, std::try_to_lock);
  if (!lock.owns_lock()) {
    run_alone(tasks, body, context);
    return;
  }
  const int threads = static_cast<int>(workers);
  if (pool == nullptr || pool->threads() != threads) {
    [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, forget_pool_in_child);
    delete pool;
    pool = nullptr;
    pool = new Pool(threads);
  }
  pool->run(job);
}

}  // namespace tidegate
