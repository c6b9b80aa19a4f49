// Depthwise causal convolution over packed or batched sequences: forward, backward, and the in-place update for
// serving.
//
// Letters: B rows, T tokens, D channels, W taps (2, 3 or 4), N sequences, n heads, S = state length >= W-1.
#pragma once

#include <cstdint>
#include <span>

#include "tidegate/seqlens.h"
#include "tidegate/tensor.h"

namespace tidegate {

enum class Activation : std::uint8_t { kNone, kSilu, kSigmoid };
Activation parse_activation(std::string_view op, std::string_view name);  // "silu", "swish", "sigmoid", "" = none

struct CausalConv1dOptions {
  Activation activation = Activation::kNone;  // none or silu
  // > 0: y is head-major, [B,n,T,D/n] or [n,T,D/n] with channel c = head * (D/n) + d. 0: y has the layout of x.
  std::int64_t head_num = 0;
  Layout layout = Layout::kBSND;
};

// Computes: y[t] = act(bias + sum_j weight[:, j] * x[t - (W-1) + j]); samples before a sequence's first token come from
// its initial_state, else they are 0. Accumulated in fp32, oldest tap first, rounded once.
//   x              [B,T,D] | [T,D] | [B,n,T,D/n] | [n,T,D/n], fp32, bf16, fp16 (fp64: reference path)
//   weight         [D,W] any float type, newest tap last;  bias [D] or absent
//   initial_state  [N,D,S] in x's type, newest sample last, any strides; or absent
//   y              as above, same type as x
//   final_state    [N,D,S'], S' >= W-1: the last S' samples of (initial state or zeros, sequence); or absent
void causal_conv1d_fwd(const TensorView& x, const TensorView& weight, const TensorView& bias,
                       const TensorView& initial_state, const TensorView& y, const TensorView& final_state,
                       const SeqLens& seq, const CausalConv1dOptions& options = {});

// Gradients of the above. dy has the layout of y, dx that of x. dweight [D,W] and dbias [D] are fp32 (fp64 for fp64),
// dinitial_state [N,D,S] in x's type. Any output may be absent. dfinal_state [N,D,S'] or absent.
// The sums over tokens run block by block inside a sequence, then sequence by sequence: a packed call gives the bits of
// the separate calls added up in order.
void causal_conv1d_bwd(const TensorView& dy, const TensorView& x, const TensorView& weight, const TensorView& bias,
                       const TensorView& initial_state, const TensorView& dfinal_state, const TensorView& dx,
                       const TensorView& dweight, const TensorView& dbias, const TensorView& dinitial_state,
                       const SeqLens& seq, const CausalConv1dOptions& options = {});

struct CausalConv1dUpdateOptions {
  Activation activation = Activation::kNone;
  std::int64_t head_num = 0;
  Layout layout = Layout::kTND;                       // kTND or kBSND
  std::span<const std::int64_t> cache_indices;        // [N] pool row of each sequence; empty = identity
  std::span<const std::uint8_t> has_initial_state;    // [N]; 0: the old row counts as zeros; empty = all 1
  std::span<const std::int64_t> num_accepted_tokens;  // [N]; selects speculative mode
  std::span<const std::int64_t> cache_seqlens;        // [N]; selects circular mode
  std::int64_t pad_slot_id = -1;                      // a sequence in this row is skipped: y = 0, nothing touched
  bool state_anchor_head = false;                     // plain mode: history in columns 0..W-2 instead of the last W-1
};

// The same convolution on a pool of state rows conv_state [slots,D,S], changed in place. Modes (docs/operators.md):
//   plain        history = last (or first) W-1 columns; the row takes in the new samples
//   circular     cache_seqlens[n] = c samples written before; sample i lives in column i mod S
//   speculative  num_accepted_tokens[n] = a of the previous call's tokens became final; history = columns a-1 .. a+W-3
void causal_conv1d_update(const TensorView& x, const TensorView& conv_state, const TensorView& weight,
                          const TensorView& bias, const TensorView& y, const SeqLens& seq,
                          const CausalConv1dUpdateOptions& options = {});

}  // namespace tidegate
