// chunk_scaled_dot_kkt at 4096 tokens, 16 key heads, 32 value heads of 128, chunks of 64, bf16, head-major. Items are
// the floating-point operations of the lower triangles.
#include <benchmark/benchmark.h>

#include "ops/bench_data.h"
#include "tidegate/chunk.h"

namespace tidegate {
namespace {

constexpr std::int64_t kTokens = 4096;
constexpr std::int64_t kKeyHeads = 16;
constexpr std::int64_t kHeads = 32;
constexpr std::int64_t kSize = 128;
constexpr std::int64_t kChunk = 64;

void forward(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const BenchTensor k(DType::kBF16, {kKeyHeads, kTokens, kSize});
  const BenchTensor gc(DType::kF32, {kHeads, kTokens});
  const BenchTensor beta(DType::kF32, {kHeads, kTokens});
  const BenchTensor A0(DType::kF32, {kHeads, kTokens, kChunk});
  const SeqLens seq = SeqLens::dense(1, kTokens);
  for (auto _ : state) {
    chunk_scaled_dot_kkt(k, gc, beta, A0, seq, {kChunk, Layout::kNTD});
  }
  state.SetItemsProcessed(state.iterations() * kKeyHeads * kTokens * kChunk * kSize);
}

[[maybe_unused]] const bool registered = register_for_every_isa("chunk_scaled_dot_kkt/4096x32x128/bf16", forward);

}  // namespace
}  // namespace tidegate
