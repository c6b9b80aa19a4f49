// Rotary position embedding on the first R channels of each head.
#pragma once

#include "tidegate/norm.h"
#include "tidegate/tensor.h"

namespace tidegate {

struct PartialRopeOptions {
  Layout layout = Layout::kBNSD;
  Rounding rounding = Rounding::kHf;  // kHf rounds both products and their sum; kFp32 rounds once
};

// Computes, for pairs (i, j = i + R/2), i < R/2: y_i = x_i cos_i - x_j sin_i; y_j = x_j cos_j + x_i sin_j.
// Channels >= R pass through; y may be the same memory as x.
//   x, y      [B,T,H,D] | [T,H,D] | [B,H,T,D] | [H,T,D] by layout
//   cos, sin  [B,T,R] or [T,R] (the same for every row), R <= D even; x's type or fp32
void partial_rope_fwd(const TensorView& x, const TensorView& cos, const TensorView& sin, const TensorView& y,
                      const PartialRopeOptions& options = {});

// The transposed rotation: dx_i = dy_i cos_i + dy_j sin_j; dx_j = dy_j cos_j - dy_i sin_i.
void partial_rope_bwd(const TensorView& dy, const TensorView& cos, const TensorView& sin, const TensorView& dx,
                      const PartialRopeOptions& options = {});

// Interleaved mRoPE tables: position_ids [3,B,T] (time, height, width) or [B,T] (all equal), inv_freq [R/2] fp32.
// Frequency i takes axis 1 if i % 3 == 1 and i < 3 section[1], axis 2 if i % 3 == 2 and i < 3 section[2], else axis 0.
// cos, sin [B,T,R]: angle = float(position) * inv_freq in fp32, times scaling, both halves equal, rounded to their
// type.
void mrope_cos_sin(const TensorView& position_ids, const TensorView& inv_freq, const std::int64_t section[3],
                   double scaling, const TensorView& cos, const TensorView& sin);

}  // namespace tidegate
