// recompute_w_u on the problem of chunk_bench.h.
#include "ops/chunk_bench.h"

namespace tidegate {
namespace {

using namespace chunk_bench;

void forward(benchmark::State& state, Isa isa) {
  const BenchTensor k = keys();
  const BenchTensor v = values(DType::kBF16);
  const BenchTensor beta = gates();
  const BenchTensor A = triangles();
  const BenchTensor gc = gates();
  const BenchTensor w = values();
  const BenchTensor u = values();
  measure(state, isa, 2 * kHeads * kTokens * kChunk * kSize,
          [&](const SeqLens& seq) { recompute_w_u(k, v, beta, A, gc, w, u, seq, kLayout); });
}

[[maybe_unused]] const bool registered = register_for_every_isa("recompute_w_u/4096x32x128/bf16", forward);

}  // namespace
}  // namespace tidegate
