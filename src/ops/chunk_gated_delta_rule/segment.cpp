// gdn_segment_map: the fused operator without outputs, run on the columns of the identity and on the values.
//
// A segment is linear in the state and the values together. Started from 0 it leaves s; started from the identity with
// values of 0 it leaves phi.
#include "base/element.h"
#include "base/float_environment.h"
#include "ops/chunk_gated_delta_rule/problem.h"

namespace tidegate {

void gdn_segment_map(const TensorView& k, const TensorView& v, const TensorView& g, const TensorView& beta,
                     const TensorView& phi, const TensorView& s, const SeqLens& seq,
                     const ChunkGatedDeltaRuleOptions& options) {
  constexpr std::string_view op = "gdn_segment_map";
  const FloatEnvironment environment;
  check(options.snapshot_at.empty() && options.state_indices.empty() && options.has_initial_state.empty() &&
            !options.state_v_first && !options.out_layout.has_value() && !options.scale.has_value() &&
            options.time_segments == 1,
        op, ": options: expected none about states, snapshots or o, got one");
  check_present(op, {"phi", phi});
  check_present(op, {"s", s});
  chunk_gated_delta_rule::Tensors t{{}, k, v, g, beta, {}, {}, s, {}};
  chunk_gated_delta_rule::Problem p = check_call(op, t, seq, options, {.last = "s"});
  const DType wide = k.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  check_dtype(op, {"s", s}, wide);
  check_dtype(op, {"phi", phi}, wide);
  check_shape(op, {"phi", phi}, {seq.count(), p.sizes.HV, p.sizes.K, p.sizes.K});
  check_outputs(op, {{"phi", phi}, {"s", s}},
                {{"k", k}, {"v", v}, {"g", g}, {"beta", beta}, {"A_log", options.A_log}, {"dt_bias", options.dt_bias}});
  run(p, t, seq, options);

  for (std::int64_t n = 0; n < seq.count(); ++n) {
    for (std::int64_t h = 0; h < p.sizes.HV; ++h) {
      for (std::int64_t i = 0; i < p.sizes.K; ++i) {
        for (std::int64_t j = 0; j < p.sizes.K; ++j) {
          write_element(phi, offset_of(phi, n, h, i, j), i == j ? 1.0 : 0.0);
        }
      }
    }
  }
  p.sizes.V = p.sizes.K;
  t.v = {};
  t.initial_state = phi;
  t.final_state = phi;
  run(p, t, seq, options);
}

}  // namespace tidegate
