// chunk_local_cumsum at 4096 tokens, 32 heads, chunks of 64, fp32, head-major.
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
  const BenchTensor g(DType::kF32, {kHeads, kTokens});
  const BenchTensor out(DType::kF32, {kHeads, kTokens});
  const SeqLens seq = SeqLens::dense(1, kTokens);
  for (auto _ : state) {
    chunk_local_cumsum(g, out, kChunk, seq, {.layout = Layout::kNTD});
  }
  state.SetBytesProcessed(state.iterations() * (g.bytes() + out.bytes()));
}

[[maybe_unused]] const bool registered = register_for_every_isa("chunk_local_cumsum/4096x32/fp32", forward);

}  // namespace
}  // namespace tidegate
