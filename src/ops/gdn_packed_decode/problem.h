// The arguments of a decode step, checked and put into one shape.
#pragma once

#include "ops/causal_conv1d/kernel.h"
#include "ops/recurrent_gated_delta_rule/problem.h"
#include "tidegate/decode.h"

namespace tidegate::packed_decode {

using Options = GdnPackedDecodeOptions;

struct Tensors {
  TensorView mixed, z, a, b, conv_state, conv_weight, conv_bias, A_log, dt_bias, state, norm_weight, y;
};

// Where the parts of one key head stand in a row of mixed, z, a and b: element = first + key head * step.
struct Part {
  const TensorView* tensor;
  std::int64_t first, step;
};
struct Parts {
  Part q, k, v, z, a, b;
};

struct Problem {
  recurrence::Problem states;
  Parts parts;
  std::int64_t taps;
  causal_conv1d::StateMode mode;
  const causal_conv1d::UpdateRow* rows;  // [N]
};

Problem check_call(std::string_view op, const Tensors& t, const SeqLens& seq, const Options& options, Scratch& scratch);

// Sequences that one task takes for its key head: enough to pay for packing the head's taps, few enough to leave every
// thread four tasks. No bit depends on it.
std::int64_t sequences_per_task(std::int64_t sequences, std::int64_t key_heads, std::int64_t threads);

}  // namespace tidegate::packed_decode
