// chunk_scaled_dot_kkt on the problem of chunk_bench.h.
#include "ops/chunk_bench.h"

namespace tidegate {
namespace {

using namespace chunk_bench;

void forward(benchmark::State& state, Isa isa) {
  const BenchTensor k = keys();
  const BenchTensor gc = gates();
  const BenchTensor beta = gates();
  const BenchTensor A0 = triangles();
  measure(state, isa, kKeyHeads * kTokens * kChunk * kSize, [&](const SeqLens& seq) {
    chunk_scaled_dot_kkt(k, gc, beta, A0, seq, {kChunk, kLayout});
  });
}

[[maybe_unused]] const bool registered = register_for_every_isa("chunk_scaled_dot_kkt/4096x32x128/bf16", forward);

}  // namespace
}  // namespace tidegate
