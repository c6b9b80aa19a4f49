// 2048 tokens, 16 key heads, 32 value heads of 128, bf16. Items are the operations of the recurrence and its
// derivative, 12KV a token and value head.
#include <benchmark/benchmark.h>

#include "ops/bench_data.h"
#include "tidegate/delta_rule.h"

namespace tidegate {
namespace {

constexpr std::int64_t kTokens = 2048;
constexpr std::int64_t kKeyHeads = 16;
constexpr std::int64_t kHeads = 32;
constexpr std::int64_t kSize = 128;

void backward(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const auto tensor = [](std::int64_t heads) { return BenchTensor(DType::kBF16, {kTokens, heads, kSize}); };
  const auto gate = [] { return BenchTensor(DType::kF32, {kTokens, kHeads}); };
  const BenchTensor q = tensor(kKeyHeads), k = tensor(kKeyHeads), v = tensor(kHeads), o = tensor(kHeads);
  const BenchTensor dq = tensor(kKeyHeads), dk = tensor(kKeyHeads), dv = tensor(kHeads);
  const BenchTensor g = gate(), beta = gate(), dg = gate(), dbeta = gate();
  const BenchTensor A_log(DType::kF32, {kHeads});
  const SeqLens seq = SeqLens::dense(1, kTokens);
  const std::vector<SnapshotPoint> points = saved_states(seq);
  const BenchTensor states(DType::kF32, {static_cast<std::int64_t>(points.size()), kHeads, kSize, kSize});
  ChunkGatedDeltaRuleOptions options;
  options.layout = Layout::kTND;
  options.use_qk_l2norm = options.beta_sigmoid = true;
  options.A_log = A_log;
  options.snapshot_at = points;
  chunk_gated_delta_rule_fwd(q, k, v, g, beta, {}, o, {}, states, seq, options);
  options.snapshot_at = {};
  for (auto _ : state) {
    chunk_gated_delta_rule_bwd(o, {}, q, k, v, g, beta, {}, states, {dq, dk, dv, dg, dbeta, {}, {}, {}}, seq, options);
  }
  state.SetItemsProcessed(state.iterations() * 12 * kHeads * kTokens * kSize * kSize);
}

[[maybe_unused]] const bool registered =
    register_for_every_isa("chunk_gated_delta_rule_bwd/2048x32x128/bf16", backward);

}  // namespace
}  // namespace tidegate
