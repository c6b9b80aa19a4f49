// The two products of int8 experts apart from each other: 64 groups of 64 rows, K 2048 and 512.
#include <benchmark/benchmark.h>

#include "ops/bench_data.h"
#include "tidegate/quant.h"

namespace tidegate {
namespace {

constexpr std::int64_t kGroups = 64, kRows = 64;

template <std::int64_t K, std::int64_t N>
struct Case {
  BenchTensor x{DType::kI8, {kGroups * kRows, K}}, weight{DType::kI8, {kGroups, N, K}};
  BenchTensor x_scale{DType::kF32, {kGroups * kRows}}, weight_scale{DType::kF32, {kGroups, N}};
  BenchTensor groups{DType::kI64, {kGroups}};
  Case() {
    for (const TensorView& t : {static_cast<const TensorView&>(x), static_cast<const TensorView&>(weight)}) {
      for (std::int64_t i = 0; i < t.numel(); ++i) {
        t.as<std::int8_t>()[i] = static_cast<std::int8_t>(i * 31 % 255 - 127);
      }
    }
    for (std::int64_t g = 0; g < kGroups; ++g) {
      static_cast<const TensorView&>(groups).as<std::int64_t>()[g] = kRows;
    }
  }
  GroupedQuantInputs inputs() const { return {x, x_scale, weight, weight_scale, groups}; }
};

void count(benchmark::State& state, std::int64_t macs) {
  state.counters["GMAC/s"] =
      benchmark::Counter(1e-9 * static_cast<double>(macs * state.iterations()), benchmark::Counter::kIsRate);
}

void swiglu(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const Case<2048, 1024> c;
  const BenchTensor q(DType::kI8, {kGroups * kRows, 512});
  const BenchTensor scale(DType::kF32, {kGroups * kRows});
  for (auto _ : state) {
    grouped_matmul_swiglu_quant(c.inputs(), {}, q, scale);
  }
  count(state, kGroups * kRows * 2048 * 1024);
}

void product(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const Case<512, 2048> c;
  const BenchTensor y(DType::kBF16, {kGroups * kRows, 2048});
  for (auto _ : state) {
    grouped_matmul_quant(c.inputs(), y);
  }
  count(state, kGroups * kRows * 2048 * 512);
}

[[maybe_unused]] const bool registered = register_for_every_isa("grouped_matmul_swiglu_quant/64x64x2048", swiglu) &&
                                         register_for_every_isa("grouped_matmul_quant/64x64x512", product);

}  // namespace
}  // namespace tidegate
