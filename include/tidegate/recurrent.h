// The gated delta rule token by token, on states that stay where they are (decode, speculative verification).
//
// Letters and the rule as in delta_rule.h; M = states kept per sequence.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "tidegate/seqlens.h"
#include "tidegate/tensor.h"

namespace tidegate {

struct RecurrentGatedDeltaRuleOptions {
  std::optional<double> scale;  // K^-0.5 if absent
  bool use_qk_l2norm = false;   // rows of q and k are divided by their length, eps 1e-6 inside the root
  TensorView A_log, dt_bias;    // [HV]; with A_log, g holds the raw a: g = -exp(A_log) softplus(a + dt_bias)
  bool beta_sigmoid = false;    // beta holds the raw b: beta = beta_scale sigmoid(b)
  double beta_scale = 1.0;
  bool state_v_first = false;  // states are [.., V, K] instead of [.., K, V]
  Layout layout = Layout::kTND;
  // Pool form. states_per_sequence = 0: state_indices is [N]; the state of sequence n is read from its slot and written
  // back there after the last token. M > 0: state_indices is [N,M], row by row; sequence n starts from the state in
  // [n][a-1], a = num_accepted_tokens[n] (1 if absent), and the state after token t goes to [n][t].
  std::span<const std::int64_t> state_indices;
  std::int64_t states_per_sequence = 0;
  std::span<const std::int64_t> num_accepted_tokens;  // [N]
  std::int64_t null_slot = -1;                      // to start from: the sequence is skipped, o = 0; to go to: dropped
  std::span<const std::uint8_t> has_initial_state;  // [N]; 0: that sequence starts from 0; empty = all 1
};

//   q, k   [B,T,HK,K] | [T,HK,K] | [B,HK,T,K] | [HK,T,K] by layout; fp32, bf16, fp16 (fp64: reference path)
//   v, o   the same with HV, V, same type as q
//   g      [B,T,HV] | .. any float type, or absent = 0. g <= -104 is a reset: it forgets everything
//   gk     [B,T,HV,K] | .. any float type, or absent = 0: a log decay of every key channel, added to g
//   beta   [B,T,HV] | .., or one per value channel [B,T,HV,V] | ..; any float type
//   state  [slots,HV,K,V] fp32 or bf16, inner stride 1, changed in place
// A state is rounded to the type of the pool after every token, so that n tokens in one call have the bits of n calls.
// Sequences of more than recurrent_tokens() tokens go through the chunk form where that can be: state_indices [N], with
// g, without gk, one beta per head. Which form a sequence takes depends on its own length only, never on the batch.
void recurrent_gated_delta_rule(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& g,
                                const TensorView& gk, const TensorView& beta, const TensorView& state,
                                const TensorView& o, const SeqLens& seq, const RecurrentGatedDeltaRuleOptions& options);

// The same from given states to new ones. initial_state, final_state [N,HV,K,V] of one type, fp32 or bf16, or absent:
// start from 0, drop the state. Options of the pool form must be unset.
void recurrent_gated_delta_rule_fwd(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& g,
                                    const TensorView& gk, const TensorView& beta, const TensorView& initial_state,
                                    const TensorView& o, const TensorView& final_state, const SeqLens& seq,
                                    const RecurrentGatedDeltaRuleOptions& options = {});

// The longest sequence that is computed token by token where the chunk form could be used.
std::int64_t recurrent_tokens();

}  // namespace tidegate
