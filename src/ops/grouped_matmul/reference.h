#pragma once

#include "tidegate/moe.h"

namespace tidegate::grouped_matmul {

// offsets [G + 1]: the rows of group g are offsets[g] .. offsets[g + 1].
template <class Acc>
void reference_fwd(const TensorView& x, const TensorView& weight, const std::int64_t* offsets, const TensorView& bias,
                   const TensorView& y, WeightAxes axes);
template <class Acc>
void reference_bwd(const TensorView& dy, const TensorView& x, const TensorView& weight, const std::int64_t* offsets,
                   std::int64_t groups, const TensorView& dx, const TensorView& dweight, const TensorView& dbias,
                   const GroupedMatmulOptions& options);

}  // namespace tidegate::grouped_matmul
