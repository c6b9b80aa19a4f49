// What chunk_gated_delta_rule_bwd.cpp hands to the kernels.
#pragma once

#include "ops/chunk_gated_delta_rule/kernel.h"

namespace tidegate::delta_rule_gradient {

using chunk_gated_delta_rule::States;

// From one saved state to the next. The states of such a group (G K V fp32 numbers for every chunk of it) are computed
// again and should fit into a core's share of the last cache; the saved ones take K V HV / 64 bytes a token.
inline constexpr int64_t kGroupTokens = 256;

// A gradient of a gate: element strides and its type (DType as an integer).
struct GateGradient {
  Heads at;
  int type;
};

struct Args {
  chunk_gated_delta_rule::Args rule;  // q, k, v, gates and initial states; o is null
  Heads o_gradient;                   // null: 0
  States final_gradient;              // null: 0
  States saved;                       // a state for every group of chunks after a sequence's first one
  Heads dq, dk, dv;                   // gradients; null: not wanted
  GateGradient dg, dbeta;
  States initial_gradient;
  double* sums;        // [sequences][value heads][2]: terms of dA_log and ddt_bias; null: not wanted
  int64_t head_count;  // value heads
  bool zero_row_safe;
};

// One piece of work: one key head and its value heads over one sequence, so that everything they share is summed in
// one order.
struct Unit {
  int64_t row, begin, end;  // tokens
  int64_t sequence, key_head;
  int64_t first_saved;  // entry of `saved` that holds the state after the sequence's first group
};

struct Kernels {
  int64_t (*workspace)(const Args&) noexcept;
  void (*run[kDataTypes])(const Args&, const Unit&, float* workspace) noexcept;
};

}  // namespace tidegate::delta_rule_gradient

TIDEGATE_KERNEL_TABLE(delta_rule_gradient::Kernels, chunk_gated_delta_rule_bwd_kernels)
