// The convolution's arguments, checked and put into one shape. Shared by forward, backward, update and the reference.
#pragma once

#include <string_view>
#include <vector>

#include "ops/causal_conv1d/kernel.h"
#include "tidegate/conv.h"

namespace tidegate::causal_conv1d {

struct Problem {
  std::int64_t rows, tokens, channels, taps;
};

// Checks x, weight and bias against the layout and the boundaries.
Problem check_inputs(std::string_view op, const TensorView& x, const TensorView& weight, const TensorView& bias,
                     const SeqLens& seq, Layout layout, Activation activation);
// Checks a tensor in the layout of y (head-major if head_num > 0) and of x's type.
void check_output_side(std::string_view op, std::string_view name, const TensorView& t, const TensorView& x,
                       const Problem& p, Layout layout, std::int64_t head_num);
// Checks a [N,D,S] state of x's type, S >= W-1. Absent passes.
void check_state(std::string_view op, std::string_view name, const TensorView& t, const TensorView& x, const Problem& p,
                 std::int64_t count, std::int64_t min_length);

// A tensor of this layout as a Grid; head_num > 0 selects the head-major form.
Grid grid_of(const TensorView& t, Layout layout, std::int64_t head_num, std::int64_t channels);
State state_of(const TensorView& t);

// The tasks of a forward: blocks of tokens of every sequence, in order. A function of the boundaries only.
struct TokenBlock {
  std::int64_t sequence, first, last;
};
std::vector<TokenBlock> token_blocks(const SeqLens& seq, std::int64_t size);

// The last S samples of (initial state or zeros, sequence), copied bit for bit.
void write_final_state(const TensorView& x, const Grid& grid, const TensorView& initial, const TensorView& final_state,
                       const SeqLens& seq, std::int64_t channels);

// Plain loops in Acc arithmetic; the arguments are checked already.
template <class Acc>
void reference_fwd(const TensorView& x, const TensorView& weight, const TensorView& bias, const TensorView& initial,
                   const TensorView& y, const SeqLens& seq, const CausalConv1dOptions& options);
template <class Acc>
void reference_bwd(const TensorView& dy, const TensorView& x, const TensorView& weight, const TensorView& bias,
                   const TensorView& initial, const TensorView& dfinal, const TensorView& dx, const TensorView& dweight,
                   const TensorView& dbias, const TensorView& dinitial, const SeqLens& seq,
                   const CausalConv1dOptions& options);

}  // namespace tidegate::causal_conv1d
