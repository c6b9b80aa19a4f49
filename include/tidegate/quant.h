// int8 experts for inference: numbers as int8 with one fp32 scale a row (symmetric, -127..127), products exact in
// int32. Inner widths are at most 131071: sums of so many products fit into int32.
#pragma once

#include "tidegate/moe.h"

namespace tidegate {

// scale = max |x| / 127 along `axis` (the last dimension or the one before it; negative counts from the end), 1 where
// all numbers are 0; q = x / scale rounded to nearest even. x of any float type but fp64, q int8 of its shape, scale
// fp32 of the shape without `axis`. A weight [E,N,K] has a scale for every row n: axis -1, or -2 for [E,K,N]; tokens
// have one each. One of the last two dimensions has stride 1 in both x and q. NaN or Inf make the scale NaN.
void quantize(const TensorView& x, const TensorView& q, const TensorView& scale, int axis = -1);

// Rows of int8 [M,K] with scales [M], weights int8 of the groups [G,N,K] (or as weight_axes says) with scales [G,N],
// groups as in grouped_matmul_fwd. Rows outside all groups are left alone.
struct GroupedQuantInputs {
  TensorView x, x_scale, weight, weight_scale, groups;
};
struct GroupedQuantOptions {
  WeightAxes weight_axes = WeightAxes::kNK;
  GroupList group_list = GroupList::kCounts;
};

// y[j] = float(W_g x[j]) * weight_scale * x_scale[j], in this order; y [M,N] of any float type but fp64.
void grouped_matmul_quant(const GroupedQuantInputs& in, const TensorView& y, const GroupedQuantOptions& options = {});

// N = 2I, gate rows first: s = silu(gate) * up (* smooth_scale [G,I] if given), quantised again row by row: q int8
// [M,I], q_scale [M].
void grouped_matmul_swiglu_quant(const GroupedQuantInputs& in, const TensorView& smooth_scale, const TensorView& q,
                                 const TensorView& q_scale, const GroupedQuantOptions& options = {});

// The experts of a layer: tokens x [T,H] are quantised once each, then both products above, then the sum in fp32
// in the order of experts, rounded once to out's type (x's). gate_up int8 [E,2I,H], down int8 [E,H,I], scales [E,2I],
// [E,H].
struct MoeExpertsQuantInputs {
  TensorView x, ids, weights, gate_up, gate_up_scale, down, down_scale;
};
struct MoeExpertsQuantOptions {
  WeightAxes weight_axes = WeightAxes::kNK;
  ExpertIds ids_convention = ExpertIds::kPlain;
};
void moe_experts_quant(const MoeExpertsQuantInputs& in, const TensorView& out,
                       const MoeExpertsQuantOptions& options = {});

}  // namespace tidegate
