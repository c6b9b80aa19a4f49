// chunk_gated_delta_rule_fwd_h on the problem of chunk_bench.h.
#include "ops/chunk_bench.h"

namespace tidegate {
namespace {

using namespace chunk_bench;

void forward(benchmark::State& state, Isa isa) {
  const BenchTensor k = keys();
  const BenchTensor w = values();
  const BenchTensor u = values();
  const BenchTensor gc = gates();
  const BenchTensor h = chunk_states();
  const BenchTensor v_new = values();
  measure(state, isa, 4 * kHeads * kTokens * kSize * kSize, [&](const SeqLens& seq) {
    chunk_gated_delta_rule_fwd_h(k, w, u, gc, {}, h, v_new, {}, seq, {kChunk, false, kLayout});
  });
}

[[maybe_unused]] const bool registered =
    register_for_every_isa("chunk_gated_delta_rule_fwd_h/4096x32x128/bf16", forward);

}  // namespace
}  // namespace tidegate
