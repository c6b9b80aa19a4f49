#pragma once

#include "tidegate/norm.h"

namespace tidegate::l2norm {

template <class Acc>
void reference_fwd(const TensorView& x, const TensorView& y, const TensorView& rstd, double eps);
template <class Acc>
void reference_bwd(const TensorView& dy, const TensorView& x, const TensorView& rstd, const TensorView& dx,
                   bool zero_row_safe);

}  // namespace tidegate::l2norm
