// swiglu of 1024 tokens at the inner width of a 0.8B MLP, and of one token.
#include <benchmark/benchmark.h>

#include "ops/bench_data.h"
#include "tidegate/swiglu.h"

namespace tidegate {
namespace {

constexpr std::int64_t kWidth = 3584;

template <std::int64_t kRows>
void forward(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const BenchTensor gate(DType::kBF16, {kRows, kWidth});
  const BenchTensor up(DType::kBF16, {kRows, kWidth});
  const BenchTensor y(DType::kBF16, {kRows, kWidth});
  for (auto _ : state) {
    swiglu_fwd(gate, up, y);
  }
  state.SetBytesProcessed(state.iterations() * 3 * y.bytes());
}

void backward(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const BenchTensor gate(DType::kBF16, {1024, kWidth});
  const BenchTensor up(DType::kBF16, {1024, kWidth});
  const BenchTensor dy(DType::kBF16, {1024, kWidth});
  const BenchTensor dgate(DType::kBF16, {1024, kWidth});
  const BenchTensor dup(DType::kBF16, {1024, kWidth});
  for (auto _ : state) {
    swiglu_bwd(dy, gate, up, dgate, dup);
  }
  state.SetBytesProcessed(state.iterations() * 5 * dy.bytes());
}

[[maybe_unused]] const bool registered = register_for_every_isa("swiglu_fwd/1024x3584/bf16", forward<1024>) &&
                                         register_for_every_isa("swiglu_fwd/1x3584/bf16", forward<1>) &&
                                         register_for_every_isa("swiglu_bwd/1024x3584/bf16", backward);

}  // namespace
}  // namespace tidegate
