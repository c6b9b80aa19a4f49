// solve_tril at 4096 tokens, 32 heads, chunks of 64, fp32, head-major. Items are floating-point operations.
#include <benchmark/benchmark.h>

#include "ops/bench_data.h"
#include "tidegate/chunk.h"

namespace tidegate {
namespace {

constexpr std::int64_t kTokens = 4096;
constexpr std::int64_t kHeads = 32;
constexpr std::int64_t kChunk = 64;

void forward(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const BenchTensor A0(DType::kF32, {kHeads, kTokens, kChunk});
  const BenchTensor A(DType::kF32, {kHeads, kTokens, kChunk});
  const SeqLens seq = SeqLens::dense(1, kTokens);
  for (auto _ : state) {
    solve_tril(A0, A, seq, Layout::kNTD);
  }
  state.SetItemsProcessed(state.iterations() * kHeads * kTokens * kChunk * kChunk / 3);
}

[[maybe_unused]] const bool registered = register_for_every_isa("solve_tril/4096x32/fp32", forward);

}  // namespace
}  // namespace tidegate
