#pragma once

#include "tidegate/swiglu.h"

namespace tidegate::swiglu {

// The definition in plain loops, in float or double.
template <class Acc>
void reference_fwd(const TensorView& gate, const TensorView& up, const TensorView& y);
template <class Acc>
void reference_bwd(const TensorView& dy, const TensorView& gate, const TensorView& up, const TensorView& dgate,
                   const TensorView& dup);

}  // namespace tidegate::swiglu
