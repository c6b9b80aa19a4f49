#pragma once

#include "tidegate/norm.h"

namespace tidegate::rms_norm_gated {

template <class Acc>
void reference_fwd(const TensorView& x, const TensorView& z, const TensorView& weight, const TensorView& y,
                   const TensorView& rstd, const RmsNormGatedOptions& options);
template <class Acc>
void reference_bwd(const TensorView& dy, const TensorView& x, const TensorView& z, const TensorView& weight,
                   const TensorView& rstd, const TensorView& dx, const TensorView& dz, const TensorView& dweight,
                   const RmsNormGatedOptions& options);

// Whether the hf rule rounds weight * n: where the promoted type of (weight, x) is x's own 16-bit type.
inline bool rounds_product(DType x, const TensorView& weight) {
  return (x == DType::kBF16 || x == DType::kF16) && weight.defined() && weight.dtype == x;
}

}  // namespace tidegate::rms_norm_gated
