// Grouped products of 64 groups, [512, 2048] bf16 weights, 64 rows each, in both memory orders of the weight.
#include <benchmark/benchmark.h>

#include "ops/bench_data.h"
#include "tidegate/moe.h"

namespace tidegate {
namespace {

constexpr std::int64_t kGroups = 64, kRows = 64, kN = 512, kK = 2048;

template <WeightAxes kAxes>
void forward(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const BenchTensor x(DType::kBF16, {kGroups * kRows, kK}), y(DType::kBF16, {kGroups * kRows, kN}),
      weight(DType::kBF16, {kGroups, kAxes == WeightAxes::kNK ? kN : kK, kAxes == WeightAxes::kNK ? kK : kN}),
      room(DType::kF32, {kGroups});
  TensorView groups = room;
  groups.dtype = DType::kI32;
  for (std::int64_t g = 0; g < kGroups; ++g) {
    groups.as<std::int32_t>()[g] = kRows;
  }
  for (auto _ : state) {
    grouped_matmul_fwd(x, weight, groups, {}, y, {kAxes});
  }
  state.counters["GFLOP/s"] =
      benchmark::Counter(2e-9 * kGroups * kRows * kN * kK * state.iterations(), benchmark::Counter::kIsRate);
}

[[maybe_unused]] const bool registered =
    register_for_every_isa("grouped_matmul_fwd/64x64x512x2048/nk/bf16", forward<WeightAxes::kNK>) &&
    register_for_every_isa("grouped_matmul_fwd/64x64x512x2048/kn/bf16", forward<WeightAxes::kKN>);

}  // namespace
}  // namespace tidegate
