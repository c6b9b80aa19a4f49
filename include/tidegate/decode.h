// A whole linear-attention layer between its projections, one step.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "tidegate/norm.h"
#include "tidegate/seqlens.h"
#include "tidegate/tensor.h"

namespace tidegate {

// What the input projections hand over.
//   kQkv     mixed [T, 2 HK K + HV V]: all q heads, all k heads, all v heads; z [T, HV V]; a, b [T, HV]
//   kQkvzBa  mixed [T, HK (2 K + 2 G V)]: of every key head q, k, its G = HV/HK values, its G gates z;
//            b [T, 2 HV]: of every key head its G b, its G a. z and a are absent.
enum class Projection : std::uint8_t { kQkv, kQkvzBa };
Projection parse_projection(std::string_view op, std::string_view name);  // "qkv", "qkvz_ba"

struct GdnPackedDecodeOptions {
  std::int64_t HK = 0, HV = 0, K = 0, V = 0;
  Projection projection = Projection::kQkv;
  // As in RecurrentGatedDeltaRuleOptions. num_accepted_tokens also selects the convolution's speculative mode.
  std::span<const std::int64_t> state_indices;
  std::int64_t states_per_sequence = 0;
  std::span<const std::int64_t> num_accepted_tokens;
  std::span<const std::int64_t> conv_indices;  // [N] rows of conv_state; empty = the first slot of each sequence
  std::int64_t null_slot = -1;                 // to start from: the sequence is skipped, y = 0
  bool state_v_first = false;
  std::optional<double> scale;  // K^-0.5 if absent
  RmsNormGatedOptions norm;
};

// Computes, for every token: causal_conv1d_update (SiLU), split into q, k, v, gdn_gating, recurrent_gated_delta_rule
// with use_qk_l2norm, rms_norm_gated. The bits are those of these operators called one after the other.
//   mixed, z, a, b                see Projection; fp32, bf16 or fp16
//   conv_state [rows,D,S]         any strides, changed in place; D = 2 HK K + HV V, channels in the order q, k, v
//   conv_weight [D,W], conv_bias [D] or absent, A_log, dt_bias [HV] (dt_bias may be absent), norm_weight [V]
//   state [slots,HV,K,V]          fp32 or bf16, changed in place
//   y [T, HV V]
void gdn_packed_decode(const TensorView& mixed, const TensorView& z, const TensorView& a, const TensorView& b,
                       const TensorView& conv_state, const TensorView& conv_weight, const TensorView& conv_bias,
                       const TensorView& A_log, const TensorView& dt_bias, const TensorView& state,
                       const TensorView& norm_weight, const TensorView& y, const SeqLens& seq,
                       const GdnPackedDecodeOptions& options);

}  // namespace tidegate
