#include "ops/chunk_gated_delta_rule_bwd/problem.h"

#include <string>

namespace tidegate::delta_rule_gradient {
namespace {

constexpr std::string_view kOp = "chunk_gated_delta_rule_bwd";

void check_like(Named d, Named input) {
  if (d.tensor.defined()) {
    check_same_shape(kOp, d, input);
    check_same_dtype(kOp, d, input);
    check_inner_stride(kOp, d);
  }
}

void check_gate(Named d, Named gate, Named k) {
  if (d.tensor.defined()) {
    check_same_shape(kOp, d, gate);
    check_float(kOp, d);
    check_wide(kOp, d, k);
  }
}

void check_sum(Named d, std::string_view parameter, bool given, std::int64_t HV, bool wide) {
  if (d.tensor.defined()) {
    check(given, kOp, ": ", d.name, ": expected none without ", parameter, ", got a tensor");
    check_shape(kOp, d, {HV});
    check_dtype(kOp, d, wide ? DType::kF64 : DType::kF32);
  }
}

}  // namespace

chunk_gated_delta_rule::Problem check_call(const Tensors& t, const ChunkGatedDeltaRuleGradients& d, const SeqLens& seq,
                                           const ChunkGatedDeltaRuleOptions& options) {
  check_present(kOp, {"q", t.rule.q});
  check(options.snapshot_at.empty(), kOp, ": snapshot_at: expected none, got ", options.snapshot_at.size(),
        " entries (a snapshot has no gradient)");
  check(options.state_indices.empty() && options.has_initial_state.empty(), kOp,
        ": state_indices: expected none, got a list (a pool has no gradient)");
  chunk_gated_delta_rule::Problem p = chunk_gated_delta_rule::check_call(kOp, t.rule, seq, options);
  const DeltaSizes& z = p.sizes;
  const Named k{"k", t.rule.k};
  const bool wide = t.rule.k.dtype == DType::kF64;
  if (t.d_o.defined()) {
    check_tokens_heads(kOp, {"do", t.d_o}, p.out_layout, z, z.HV, z.V);
    check_same_dtype(kOp, {"do", t.d_o}, k);
  }
  const std::string each = "one per sequence of " + std::to_string(seq.count());
  check_states(kOp, {"dfinal_state", t.dfinal_state}, k, z, seq.count(), each, options.state_v_first);
  check_states(kOp, {"dh0", d.dh0}, k, z, seq.count(), each, options.state_v_first);
  if (d.dh0.defined()) {
    check(t.rule.initial_state.defined(), kOp, ": dh0: expected none without initial_state, got a tensor");
    check_stored(kOp, {"dh0", d.dh0});
  }
  if (t.states.defined()) {
    const auto count = static_cast<std::int64_t>(saved_states(seq).size());
    check_states(kOp, {"states", t.states}, k, z, count, "one after every 256 tokens of a sequence", false);
    check_dtype(kOp, {"states", t.states}, wide ? DType::kF64 : DType::kF32);
  }
  check_like({"dq", d.dq}, {"q", t.rule.q});
  check_like({"dk", d.dk}, k);
  check_like({"dv", d.dv}, {"v", t.rule.v});
  check_gate({"dg", d.dg}, {"g", t.rule.g}, k);
  check_gate({"dbeta", d.dbeta}, {"beta", t.rule.beta}, k);
  check_sum({"dA_log", d.dA_log}, "A_log", options.A_log.defined(), z.HV, wide);
  check_sum({"ddt_bias", d.ddt_bias}, "dt_bias", options.dt_bias.defined(), z.HV, wide);
  check_outputs(kOp,
                {{"dq", d.dq},
                 {"dk", d.dk},
                 {"dv", d.dv},
                 {"dg", d.dg},
                 {"dbeta", d.dbeta},
                 {"dh0", d.dh0},
                 {"dA_log", d.dA_log},
                 {"ddt_bias", d.ddt_bias}},
                {{"do", t.d_o},
                 {"dfinal_state", t.dfinal_state},
                 {"q", t.rule.q},
                 {"k", t.rule.k},
                 {"v", t.rule.v},
                 {"g", t.rule.g},
                 {"beta", t.rule.beta},
                 {"initial_state", t.rule.initial_state},
                 {"states", t.states},
                 {"A_log", options.A_log},
                 {"dt_bias", options.dt_bias}});
  return p;
}

}  // namespace tidegate::delta_rule_gradient
