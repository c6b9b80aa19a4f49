// chunk_gated_delta_rule_fwd_h at 4096 tokens, 16 key heads, 32 value heads of 128, chunks of 64, bf16, head-major.
// Items are floating-point operations.
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
  const BenchTensor w(DType::kF32, {kHeads, kTokens, kSize});
  const BenchTensor u(DType::kF32, {kHeads, kTokens, kSize});
  const BenchTensor gc(DType::kF32, {kHeads, kTokens});
  const BenchTensor h(DType::kF32, {kHeads, kTokens / kChunk, kSize, kSize});
  const BenchTensor v_new(DType::kF32, {kHeads, kTokens, kSize});
  const SeqLens seq = SeqLens::dense(1, kTokens);
  for (auto _ : state) {
    chunk_gated_delta_rule_fwd_h(k, w, u, gc, {}, h, v_new, {}, seq, {kChunk, false, Layout::kNTD});
  }
  state.SetItemsProcessed(state.iterations() * 4 * kHeads * kTokens * kSize * kSize);
}

[[maybe_unused]] const bool registered =
    register_for_every_isa("chunk_gated_delta_rule_fwd_h/4096x32x128/bf16", forward);

}  // namespace
}  // namespace tidegate
