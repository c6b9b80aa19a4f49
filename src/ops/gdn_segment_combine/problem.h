#pragma once

#include "tidegate/tensor.h"

namespace tidegate::segment_combine {

// out[m] = phi2[m] x[m] (+ add[m]) for every matrix m of the leading dimensions, in plain loops.
template <class Acc>
void reference(const TensorView& phi2, const TensorView& x, const TensorView& add, const TensorView& out);

}  // namespace tidegate::segment_combine
