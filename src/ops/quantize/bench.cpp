// Quantisation of tokens, and of one expert's weight in both memory orders.
#include <benchmark/benchmark.h>

#include "ops/bench_data.h"
#include "tidegate/quant.h"

namespace tidegate {
namespace {

template <std::int64_t kRows, std::int64_t kColumns, int kAxis>
void run(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const BenchTensor x(DType::kBF16, {kRows, kColumns});
  const BenchTensor q(DType::kI8, {kRows, kColumns});
  const BenchTensor scale(DType::kF32, {kAxis == 1 ? kRows : kColumns});
  for (auto _ : state) {
    quantize(x, q, scale, kAxis);
  }
  state.SetBytesProcessed(state.iterations() * (x.bytes() + q.bytes()));
}

[[maybe_unused]] const bool registered =
    register_for_every_isa("quantize/tokens/4096x2048/bf16", run<4096, 2048, 1>) &&
    register_for_every_isa("quantize/weight_kn/2048x1024/bf16", run<2048, 1024, 0>);

}  // namespace
}  // namespace tidegate
