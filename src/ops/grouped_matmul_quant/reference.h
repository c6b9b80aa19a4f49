#pragma once

#include "tidegate/quant.h"

namespace tidegate::quant_products {

// y [M,N] fp32, exact sums; offsets [G + 1].
void reference_product(const GroupedQuantInputs& in, const std::int64_t* offsets, WeightAxes axes, float* y);
// s [M,I] before it is quantised: the activation in fp64, the rest in fp32 as it is defined.
void reference_swiglu(const GroupedQuantInputs& in, const std::int64_t* offsets, WeightAxes axes,
                      const TensorView& smooth_scale, float* s);

}  // namespace tidegate::quant_products
