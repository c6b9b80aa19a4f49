// tidegate_limits [threads]: measures what this machine can do at best and prints it as JSON.
//
// Every figure is the best of several tries: a limit is what the machine did once, undisturbed. DRAM bandwidth of
// virtual machines drifts by the hour, so the driver also probes it beside the engines.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <vector>

#include "base/dispatch.h"
#include "limits/limits.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

TIDEGATE_KERNEL_TABLE(LimitLoops, limit_loops)

namespace {

using namespace tidegate;

constexpr int kTries = 7;
constexpr double kTaskSeconds = 0.02;     // long against waking a thread (under 0.1 ms)
constexpr std::int64_t kBlock = 1 << 18;  // floats of one DRAM task: 1 MiB, many tasks for every thread

template <class F>
double seconds(F&& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
template <class F>
double best_seconds(F&& f) {
  double best = seconds(f);
  for (int i = 1; i < kTries; ++i) {
    best = std::min(best, seconds(f));
  }
  return best;
}

// Memory on huge pages where the system gives them: the limit is the machine's, not the page table's.
class Buffer {
 public:
  explicit Buffer(std::int64_t floats) : bytes_(static_cast<std::size_t>(floats) * sizeof(float)) {
    void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
      throw std::bad_alloc();
    }
    madvise(p, bytes_, MADV_HUGEPAGE);
    data_ = static_cast<float*>(p);
    parallel_for((floats + kBlock - 1) / kBlock, [&](std::int64_t block) {
      std::fill(data_ + block * kBlock, data_ + std::min(floats, (block + 1) * kBlock), 1.0f);
    });
  }
  ~Buffer() { munmap(data_, bytes_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  float* at(std::int64_t i) const { return data_ + i; }

 private:
  std::size_t bytes_;
  float* data_;
};

struct alignas(64) Sink {
  float value = 1.0f;
};

// 10^9 operations a second over all threads; -1 when the loop does not exist.
double compute_rate(ComputeLoop loop, int threads) {
  if (loop == nullptr) {
    return -1.0;
  }
  std::vector<Sink> sinks(static_cast<std::size_t>(threads));
  std::int64_t steps = 1 << 14;
  const double once = seconds([&] { loop(steps, &sinks[0].value); });
  steps = std::max<std::int64_t>(1, static_cast<std::int64_t>(static_cast<double>(steps) * kTaskSeconds / once));
  std::int64_t operations = 0;
  const double best = best_seconds([&] {
    parallel_for(threads, [&](std::int64_t task) {
      const std::int64_t done = loop(steps, &sinks[static_cast<std::size_t>(task)].value);
      if (task == 0) {
        operations = done;
      }
    });
  });
  return static_cast<double>(operations * threads) / best * 1e-9;
}

// GB/s of pass(task) over `bytes` bytes by each thread, repeated until a task is long enough.
template <class F>
double cache_rate(int threads, double bytes, F&& pass) {
  const double once = std::max(1e-7, std::min({seconds([&] { pass(0); }), seconds([&] { pass(0); })}));
  const auto passes = static_cast<std::int64_t>(kTaskSeconds / once) + 1;
  const double best = best_seconds([&] {
    parallel_for(threads, [&](std::int64_t task) {
      for (std::int64_t i = 0; i < passes; ++i) {
        pass(task);
      }
    });
  });
  return bytes * static_cast<double>(passes * threads) / best * 1e-9;
}

void print(const char* name, double value, const char* after = ", ") {
  value < 0 ? std::printf("\"%s\": null%s", name, after) : std::printf("\"%s\": %.2f%s", name, value, after);
}

std::int64_t cache_bytes(int name, std::int64_t fallback) {
  const long found = sysconf(name);
  return found > 0 ? found : fallback;
}

bool has_vnni() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512vnni") != 0;
#else
  return false;
#endif
}

void measure(Isa isa, int threads, std::int64_t l2_floats, const Buffer& x, const Buffer& y, std::int64_t floats) {
  const LimitLoops& loops = limit_loops_for(isa);
  set_num_threads(threads);
  const bool vnni = loops.int8_vnni != nullptr && has_vnni();
  std::printf("{\"isa\": \"%s\", \"threads\": %d, ", isa_name(isa).data(), threads);
  std::printf("\"bf16_dot\": \"%s\", \"int8_dot\": \"%s\", ", loops.bf16_instruction ? "vdpbf16ps" : "via fp32",
              vnni ? "vpdpbusd" : "vpmaddubsw");
  print("fp32_fma_gflops", compute_rate(loops.fp32_fma, threads));
  print("bf16_dot_gflops", compute_rate(loops.bf16_dot, threads));
  print("int8_dot_gops", compute_rate(vnni ? loops.int8_vnni : loops.int8_dot, threads));

  const double cached = static_cast<double>(l2_floats * 4);
  std::vector<Sink> sinks(static_cast<std::size_t>(threads));
  print("l2_read_gbs", cache_rate(threads, cached, [&](std::int64_t task) {
          loops.read(x.at(task * l2_floats), l2_floats, &sinks[static_cast<std::size_t>(task)].value);
        }));
  print("l2_rmw_gbs", cache_rate(threads, 2 * cached, [&](std::int64_t task) {
          loops.read_modify_write(x.at(task * l2_floats), l2_floats);
        }));

  const double once = static_cast<double>(floats * 4) * 1e-9;
  const auto dram = [&](double gigabytes, auto&& pass) {
    return gigabytes / best_seconds([&] { parallel_for(floats / kBlock, [&](std::int64_t t) { pass(t * kBlock); }); });
  };
  print("dram_read_gbs", dram(once, [&](std::int64_t i) {
          Sink sink;
          loops.read(x.at(i), kBlock, &sink.value);
          volatile float used = sink.value;
          static_cast<void>(used);
        }));
  print("dram_copy_gbs", dram(2 * once, [&](std::int64_t i) { loops.copy(x.at(i), y.at(i), kBlock); }));
  print("dram_stream_copy_gbs", dram(2 * once, [&](std::int64_t i) { loops.stream_copy(x.at(i), y.at(i), kBlock); }));
  print("dram_rmw_gbs", dram(2 * once, [&](std::int64_t i) { loops.read_modify_write(x.at(i), kBlock); }), "}");
}

}  // namespace

int main(int argc, char** argv) {
  const int most = argc > 1 ? std::atoi(argv[1]) : num_threads();
  if (most < 1) {
    std::fprintf(stderr, "tidegate_limits: threads: expected an integer >= 1, got %s\n", argv[1]);
    return 2;
  }
  // Half of L2, so that the program's own data does not push the buffer out. DRAM: twice what is reported as L3
  // (virtual machines report the host's), from 256 MiB to 1 GiB.
  const std::int64_t l2_floats = cache_bytes(_SC_LEVEL2_CACHE_SIZE, 512 << 10) / 2 / 4 / 128 * 128;
  const std::int64_t l3_bytes = cache_bytes(_SC_LEVEL3_CACHE_SIZE, 32 << 20);
  const std::int64_t floats = std::clamp<std::int64_t>(2 * l3_bytes, 256 << 20, 1 << 30) / 4 / kBlock * kBlock;
  const Buffer x(std::max(floats, most * l2_floats));
  const Buffer y(floats);

  std::vector<Isa> isas = available_isas();
  if (isas.size() > 1) {
    isas.erase(isas.begin());  // plain C says nothing about a machine that has vectors
  }
  std::printf("{\"isa\": \"%s\", \"l2_buffer_bytes\": %lld, \"dram_buffer_bytes\": %lld, \"runs\": [",
              isa_name(isas.back()).data(), static_cast<long long>(l2_floats * 4), static_cast<long long>(floats * 4));
  const char* separator = "\n";
  for (const Isa isa : isas) {
    for (int threads = 1; threads <= most; threads = threads < most ? std::min(most, threads * 2) : most + 1) {
      std::printf("%s", separator);
      separator = ",\n";
      measure(isa, threads, l2_floats, x, y, floats);
    }
  }
  std::printf("\n]}\n");
  return 0;
}
