#pragma once

#include "tidegate/rope.h"

namespace tidegate::partial_rope {

// transpose: the backward. Always without intermediate rounding.
template <class Acc>
void reference(const TensorView& x, const TensorView& cos, const TensorView& sin, const TensorView& y, Layout layout,
               bool transpose);

}  // namespace tidegate::partial_rope
