// recompute_w_u at 4096 tokens, 16 key heads, 32 value heads of 128, chunks of 64, bf16, head-major. Items are the
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
  const BenchTensor k(DType::kBF16, {kKeyHeads, kTokens, kSize});
  const BenchTensor v(DType::kBF16, {kHeads, kTokens, kSize});
  const BenchTensor beta(DType::kF32, {kHeads, kTokens});
  const BenchTensor A(DType::kF32, {kHeads, kTokens, kChunk});
  const BenchTensor gc(DType::kF32, {kHeads, kTokens});
  const BenchTensor w(DType::kF32, {kHeads, kTokens, kSize});
  const BenchTensor u(DType::kF32, {kHeads, kTokens, kSize});
  const SeqLens seq = SeqLens::dense(1, kTokens);
  for (auto _ : state) {
    recompute_w_u(k, v, beta, A, gc, w, u, seq, Layout::kNTD);
  }
  state.SetItemsProcessed(state.iterations() * 2 * kHeads * kTokens * kChunk * kSize);
}

[[maybe_unused]] const bool registered = register_for_every_isa("recompute_w_u/4096x32x128/bf16", forward);

}  // namespace
}  // namespace tidegate
