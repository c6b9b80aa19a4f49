// The arguments of the fused operator, checked and put into one shape. Shared with the reference.
#pragma once

#include <string_view>
#include <vector>

#include "base/arena.h"
#include "base/delta_checks.h"
#include "ops/chunk_gated_delta_rule/kernel.h"
#include "tidegate/delta_rule.h"

namespace tidegate::chunk_gated_delta_rule {

struct Problem {
  DeltaSizes sizes;
  Layout layout, out_layout;
  double scale;
  // Of every sequence in the states; -1: the sequence is skipped, -2: somebody else computes it.
  std::vector<std::int64_t> slots;
};

struct Tensors {
  TensorView q, k, v, g, beta, initial_state, o, final_state, snapshots;
};

// What the caller calls its states.
struct StateNames {
  std::string_view initial = "initial_state", last = "final_state";
};

// What does not speak of gates or states: q, k, v, boundaries, parameters of the gates, scale.
Problem check_inputs(std::string_view op, const Tensors& t, const SeqLens& seq,
                     const ChunkGatedDeltaRuleOptions& options);

// v and, with o, q may be absent only where the caller says so (gdn_segment_map).
Problem check_call(std::string_view op, const Tensors& t, const SeqLens& seq, const ChunkGatedDeltaRuleOptions& options,
                   const StateNames& names = {});

// The token recurrence in plain loops; the arguments are checked already.
template <class Acc>
void reference_fwd(const Problem& p, const Tensors& t, const SeqLens& seq, const ChunkGatedDeltaRuleOptions& options);

// Checked arguments to the kernels, or to the reference for fp64.
void run(const Problem& p, const Tensors& t, const SeqLens& seq, const ChunkGatedDeltaRuleOptions& options);

// The arguments as the kernels want them; parameters of the heads are copied into the scratch memory.
Args make_args(const Problem& p, const Tensors& t, const ChunkGatedDeltaRuleOptions& options, Scratch& scratch);
States states_of(const TensorView& t, bool v_first);

// The same with every sequence cut into options.time_segments segments. Not for fp64.
void run_split(const Problem& p, const Tensors& t, const SeqLens& seq, const ChunkGatedDeltaRuleOptions& options);

}  // namespace tidegate::chunk_gated_delta_rule
