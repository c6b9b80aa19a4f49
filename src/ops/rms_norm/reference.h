#pragma once

#include "tidegate/norm.h"

namespace tidegate::rms_norm {

template <class Acc>
void reference_fwd(const TensorView& x, const TensorView& weight, const TensorView& y, const TensorView& rstd,
                   double eps);
template <class Acc>
void reference_bwd(const TensorView& dy, const TensorView& x, const TensorView& weight, const TensorView& rstd,
                   const TensorView& dx, const TensorView& dweight);

}  // namespace tidegate::rms_norm
