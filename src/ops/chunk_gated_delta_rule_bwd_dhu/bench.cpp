// chunk_gated_delta_rule_bwd_dhu at 4096 tokens, 16 key heads, 32 value heads of 128, chunks of 64, bf16, head-major.
// Items are the floating-point operations.
#include <benchmark/benchmark.h>

#include "ops/bench_data.h"
#include "tidegate/chunk_backward.h"

namespace tidegate {
namespace {

constexpr std::int64_t kTokens = 4096;
constexpr std::int64_t kKeyHeads = 16;
constexpr std::int64_t kHeads = 32;
constexpr std::int64_t kSize = 128;
constexpr std::int64_t kChunk = 64;

void run(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const BenchTensor q(DType::kBF16, {kKeyHeads, kTokens, kSize});
  const BenchTensor k(DType::kBF16, {kKeyHeads, kTokens, kSize});
  const BenchTensor w(DType::kF32, {kHeads, kTokens, kSize});
  const BenchTensor d_o(DType::kBF16, {kHeads, kTokens, kSize});
  const BenchTensor dv(DType::kF32, {kHeads, kTokens, kSize});
  const BenchTensor gc(DType::kF32, {kHeads, kTokens});
  const BenchTensor dh(DType::kF32, {kHeads, kTokens / kChunk, kSize, kSize});
  const BenchTensor dh0(DType::kF32, {1, kHeads, kSize, kSize});
  const BenchTensor dv2(DType::kF32, {kHeads, kTokens, kSize});
  const SeqLens seq = SeqLens::dense(1, kTokens);
  for (auto _ : state) {
    chunk_gated_delta_rule_bwd_dhu(q, k, w, d_o, dv, gc, {}, dh, dh0, dv2, seq, {0.1, kChunk, false, Layout::kNTD});
  }
  state.SetItemsProcessed(state.iterations() * 6 * kHeads * kTokens * kSize * kSize);
}

[[maybe_unused]] const bool registered = register_for_every_isa("chunk_gated_delta_rule_bwd_dhu/4096x32x128/bf16", run);

}  // namespace
}  // namespace tidegate
