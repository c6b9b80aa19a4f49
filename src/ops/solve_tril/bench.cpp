// solve_tril on the problem of chunk_bench.h.
#include "ops/chunk_bench.h"

namespace tidegate {
namespace {

using namespace chunk_bench;

void forward(benchmark::State& state, Isa isa) {
  const BenchTensor A0 = triangles();
  const BenchTensor A = triangles();
  measure(state, isa, kHeads * kTokens * kChunk * kChunk / 3,
          [&](const SeqLens& seq) { solve_tril(A0, A, seq, kLayout); });
}

[[maybe_unused]] const bool registered = register_for_every_isa("solve_tril/4096x32/fp32", forward);

}  // namespace
}  // namespace tidegate
