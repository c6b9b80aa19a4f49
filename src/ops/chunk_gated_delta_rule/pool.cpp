// chunk_gated_delta_rule_pool: the fused operator on states that stay where they are.
#include "base/float_environment.h"
#include "ops/chunk_gated_delta_rule/problem.h"

namespace tidegate {

void chunk_gated_delta_rule_pool(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& g,
                                 const TensorView& beta, const TensorView& state, const TensorView& o,
                                 const SeqLens& seq, const ChunkGatedDeltaRuleOptions& options) {
  constexpr std::string_view op = "chunk_gated_delta_rule_pool";
  const FloatEnvironment environment;
  check_rank(op, {"state", state}, 4);
  check(options.snapshot_at.empty(), op, ": snapshot_at: expected none, got ", options.snapshot_at.size(), " entries");
  check(static_cast<std::int64_t>(options.state_indices.size()) == seq.count(), op, ": state_indices: expected ",
        seq.count(), " entries (one per sequence), got ", options.state_indices.size());
  const TensorView used = seq.count() > 0 ? state : TensorView{};  // no sequence, no slot
  const chunk_gated_delta_rule::Tensors t{q, k, v, g, beta, used, o, used, {}};
  run(check_call(op, t, seq, options, {"state", "state"}), t, seq, options);
}

}  // namespace tidegate
