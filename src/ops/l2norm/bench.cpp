// l2norm of 4096 tokens with 32 heads of 128.
#include <benchmark/benchmark.h>

#include "ops/bench_data.h"
#include "tidegate/norm.h"

namespace tidegate {
namespace {

constexpr std::int64_t kRows = 4096 * 32;
constexpr std::int64_t kWidth = 128;

void forward(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const BenchTensor x(DType::kBF16, {kRows, kWidth});
  const BenchTensor y(DType::kBF16, {kRows, kWidth});
  const BenchTensor rstd(DType::kF32, {kRows});
  for (auto _ : state) {
    l2norm_fwd(x, y, rstd);
  }
  state.SetBytesProcessed(state.iterations() * (x.bytes() + y.bytes() + rstd.bytes()));
}

void backward(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const BenchTensor x(DType::kBF16, {kRows, kWidth});
  const BenchTensor dy(DType::kBF16, {kRows, kWidth});
  const BenchTensor dx(DType::kBF16, {kRows, kWidth});
  const BenchTensor rstd(DType::kF32, {kRows});
  for (auto _ : state) {
    l2norm_bwd(dy, x, rstd, dx);
  }
  state.SetBytesProcessed(state.iterations() * (x.bytes() + dy.bytes() + dx.bytes() + rstd.bytes()));
}

[[maybe_unused]] const bool registered = register_for_every_isa("l2norm_fwd/131072x128/bf16", forward) &&
                                         register_for_every_isa("l2norm_bwd/131072x128/bf16", backward);

}  // namespace
}  // namespace tidegate
