// chunk_local_cumsum on the problem of chunk_bench.h.
#include "ops/chunk_bench.h"

namespace tidegate {
namespace {

using namespace chunk_bench;

void forward(benchmark::State& state, Isa isa) {
  const BenchTensor g = gates();
  const BenchTensor out = gates();
  measure(state, isa, kHeads * kTokens,
          [&](const SeqLens& seq) { chunk_local_cumsum(g, out, kChunk, seq, {.layout = kLayout}); });
  state.SetBytesProcessed(state.iterations() * (g.bytes() + out.bytes()));
}

[[maybe_unused]] const bool registered = register_for_every_isa("chunk_local_cumsum/4096x32/fp32", forward);

}  // namespace
}  // namespace tidegate
