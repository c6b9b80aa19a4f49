// chunk_fwd_o on the problem of chunk_bench.h.
#include "ops/chunk_bench.h"

namespace tidegate {
namespace {

using namespace chunk_bench;

void forward(benchmark::State& state, Isa isa) {
  const BenchTensor q = keys();
  const BenchTensor k = keys();
  const BenchTensor v_new = values();
  const BenchTensor h = chunk_states();
  const BenchTensor gc = gates();
  const BenchTensor o = values(DType::kBF16);
  const std::int64_t between = 2 * kHeads * kTokens * kSize * kSize;
  const std::int64_t inside = (kHeads + kKeyHeads) * kTokens * kChunk * kSize;
  measure(state, isa, between + inside, [&](const SeqLens& seq) {
    chunk_fwd_o(q, k, v_new, h, gc, o, seq, {0.1, kChunk, kLayout});
  });
}

[[maybe_unused]] const bool registered = register_for_every_isa("chunk_fwd_o/4096x32x128/bf16", forward);

}  // namespace
}  // namespace tidegate
