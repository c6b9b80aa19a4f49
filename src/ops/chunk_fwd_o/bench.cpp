// chunk_fwd_o at 4096 tokens, 16 key heads, 32 value heads of 128, chunks of 64, bf16, head-major. Items are the
// floating-point operations of the lower triangles.
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
  const BenchTensor q(DType::kBF16, {kKeyHeads, kTokens, kSize});
  const BenchTensor k(DType::kBF16, {kKeyHeads, kTokens, kSize});
  const BenchTensor v_new(DType::kF32, {kHeads, kTokens, kSize});
  const BenchTensor h(DType::kF32, {kHeads, kTokens / kChunk, kSize, kSize});
  const BenchTensor gc(DType::kF32, {kHeads, kTokens});
  const BenchTensor o(DType::kBF16, {kHeads, kTokens, kSize});
  const SeqLens seq = SeqLens::dense(1, kTokens);
  for (auto _ : state) {
    chunk_fwd_o(q, k, v_new, h, gc, o, seq, {0.1, kChunk, Layout::kNTD});
  }
  state.SetItemsProcessed(state.iterations() *
                          (2 * kHeads * kTokens * kSize * kSize + (kHeads + kKeyHeads) * kTokens * kChunk * kSize));
}

[[maybe_unused]] const bool registered = register_for_every_isa("chunk_fwd_o/4096x32x128/bf16", forward);

}  // namespace
}  // namespace tidegate
