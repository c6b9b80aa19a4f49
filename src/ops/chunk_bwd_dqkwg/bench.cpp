// chunk_bwd_dqkwg at 4096 tokens, 16 key heads, 32 value heads of 128, chunks of 64, bf16, head-major.
// Items are the floating-point operations, those of the triangles halved.
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
  const BenchTensor v_new(DType::kF32, {kHeads, kTokens, kSize});
  const BenchTensor gc(DType::kF32, {kHeads, kTokens});
  const BenchTensor h(DType::kF32, {kHeads, kTokens / kChunk, kSize, kSize});
  const BenchTensor d_o(DType::kBF16, {kHeads, kTokens, kSize});
  const BenchTensor dh(DType::kF32, {kHeads, kTokens / kChunk, kSize, kSize});
  const BenchTensor dv2(DType::kF32, {kHeads, kTokens, kSize});
  const BenchTensor dq(DType::kF32, {kKeyHeads, kTokens, kSize});
  const BenchTensor dk(DType::kF32, {kKeyHeads, kTokens, kSize});
  const BenchTensor dw(DType::kF32, {kHeads, kTokens, kSize});
  const BenchTensor dg(DType::kF32, {kHeads, kTokens});
  const SeqLens seq = SeqLens::dense(1, kTokens);
  for (auto _ : state) {
    chunk_bwd_dqkwg(q, k, v_new, gc, h, d_o, dh, dv2, dq, dk, dw, dg, seq, {0.1, kChunk, Layout::kNTD});
  }
  state.SetItemsProcessed(state.iterations() *
                          (6 * kHeads * kTokens * kSize * kSize + (3 * kHeads + kKeyHeads) * kTokens * kChunk * kSize));
}

[[maybe_unused]] const bool registered = register_for_every_isa("chunk_bwd_dqkwg/4096x32x128/bf16", run);

}  // namespace
}  // namespace tidegate
