// The arguments of the backward, checked. Shared with the reference.
#pragma once

#include "ops/chunk_gated_delta_rule/problem.h"

namespace tidegate::delta_rule_gradient {

struct Tensors {
  TensorView d_o, dfinal_state;
  chunk_gated_delta_rule::Tensors rule;  // inputs of the forward
  TensorView states;
};

chunk_gated_delta_rule::Problem check_call(const Tensors& t, const ChunkGatedDeltaRuleGradients& d, const SeqLens& seq,
                                           const ChunkGatedDeltaRuleOptions& options);

// The token recurrence backwards, in plain loops; the arguments are checked already.
template <class Acc>
void reference_bwd(const chunk_gated_delta_rule::Problem& p, const Tensors& t, const ChunkGatedDeltaRuleGradients& d,
                   const SeqLens& seq, const ChunkGatedDeltaRuleOptions& options);

}  // namespace tidegate::delta_rule_gradient
