// The n-th allocation of a call fails, n = 1, 2, ... until it succeeds: a clean error, nothing lost, and the next call
// is right. Allocations of the core are operator new and the arenas' mmap; both are counted here (the linker wraps
// mmap).
#include <sys/mman.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <thread>

#include "fuzz/drivers.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace {

std::atomic<std::int64_t> until_failure{-1};  // -1: nothing fails
std::atomic<std::int64_t> blocks{0};          // of operator new that are not freed

bool fails_now() { return until_failure.load(std::memory_order_relaxed) >= 0 && until_failure.fetch_sub(1) == 1; }

void* allocate(std::size_t n, bool fails) noexcept {
  void* p = fails ? nullptr : std::malloc(n == 0 ? 1 : n);
  blocks.fetch_add(p == nullptr ? 0 : 1);
  return p;
}
void* allocate_or_throw(std::size_t n) {
  void* p = allocate(n, fails_now());
  return p == nullptr ? throw std::bad_alloc() : p;
}
void release(void* p) noexcept {
  if (p != nullptr) {
    blocks.fetch_sub(1);
    std::free(p);
  }
}

}  // namespace

void* operator new(std::size_t n) { return allocate_or_throw(n); }
void* operator new[](std::size_t n) { return allocate_or_throw(n); }
// std::stable_sort asks for room in this way and sorts without it too: it never fails, or the call would not.
void* operator new(std::size_t n, const std::nothrow_t&) noexcept { return allocate(n, false); }
void operator delete(void* p) noexcept { release(p); }
void operator delete[](void* p) noexcept { release(p); }
void operator delete(void* p, std::size_t) noexcept { release(p); }
void operator delete[](void* p, std::size_t) noexcept { release(p); }

extern "C" void* __real_mmap(void* address, std::size_t n, int protection, int flags, int file, off_t offset);
extern "C" void* __wrap_mmap(void* address, std::size_t n, int protection, int flags, int file, off_t offset) {
  return fails_now() ? MAP_FAILED : __real_mmap(address, n, protection, flags, file, offset);
}

namespace tidegate::fuzz {
namespace {

int failures = 0;
void expect(bool good, const Line& line, std::int64_t n, const char* what) {
  if (!good) {
    ++failures;
    std::printf("FAILED  %s\n        allocation %lld: %s\n", line.print().c_str(), static_cast<long long>(n), what);
  }
}

// One attempt in a thread of its own, whose arena is empty. Returns whether the call came through.
bool attempt(const Problem& p, const Views& in, const Views& out, std::int64_t n, const Line& line) {
  bool done = false;
  std::thread([&] {
    until_failure.store(n);
    try {
      p.call(in, out, p.seq);
      done = true;
    } catch (const std::bad_alloc&) {
    } catch (const std::exception& error) {
      until_failure.store(-1);
      expect(false, line, n, error.what());
    }
    until_failure.store(-1);
  }).join();
  return done;
}

std::int64_t inject(const Line& line, int threads) {
  const Problem p = driver_of(line).make(line);
  set_isa(line.text("isa"));
  set_num_threads(threads);
  const std::vector<Tensor> want = results(p);
  std::int64_t n = 1;
  for (;; ++n) {
    std::vector<Tensor> in, out;
    for (const Part& part : p.in) {
      in.push_back(part.tensor);
    }
    for (const Part& part : p.out) {
      out.push_back(part.tensor);
    }
    const Views in_views = test::views_of(in), out_views = test::views_of(out);
    // Another number and back: the pool is made anew, and making it may fail too.
    set_num_threads(threads == 1 ? 1 : threads + static_cast<int>(n % 2));
    const std::int64_t before = blocks.load();
    const bool done = attempt(p, in_views, out_views, n, line);
    // A pool that was made in the call stays: its threads hold some blocks.
    expect(threads > 1 || blocks.load() == before, line, n, "memory was lost");
    if (done) {
      expect(different_bits(p, out, want).empty(), line, n, "wrong results of a call that came through");
      break;
    }
    for (std::size_t i = 0; i < out.size(); ++i) {
      // What is changed in place has values before the call; what is only written is NaN there, and may be anything
      // now.
      const Tensor& start = p.out[i].tensor;
      const bool in_place = start.defined() && start.view().numel() > 0 && !std::isnan(start.get(0));
      expect(!in_place || out[i].checksum() == start.checksum(), line, n, "a state was changed by a call that failed");
    }
    expect(different_bits(p, results(p), want).empty(), line, n, "wrong results of the call after a failure");
    if (n > 2000) {
      expect(false, line, n, "no end");
      break;
    }
  }
  return n - 1;
}

}  // namespace
}  // namespace tidegate::fuzz

int main() {
  using namespace tidegate::fuzz;
  std::int64_t injected = 0, calls = 0;
  for (const Driver& driver : all_drivers()) {
    if (driver.name == "ep") {
      continue;  // what fails in one rank is an ep::Failure in the others, after some seconds
    }
    Random random(3);
    for (int i = 0; i < 6; ++i) {
      const Line line = draw_line(driver, random);
      for (const int threads : {1, 2}) {
        injected += inject(line, threads);
        ++calls;
      }
    }
  }
  std::printf("%lld calls, %lld allocations failed in turn: %d findings\n", static_cast<long long>(calls),
              static_cast<long long>(injected), failures);
  return failures == 0 && injected > 0 ? 0 : 1;
}
