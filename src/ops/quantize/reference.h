#pragma once

#include "tidegate/tensor.h"

namespace tidegate::quantize_int8 {

// As quantize, axis >= 0.
void reference(const TensorView& x, const TensorView& q, const TensorView& scale, int axis);
// One row of numbers.
float reference_row(const float* x, std::int64_t n, std::int8_t* q);

}  // namespace tidegate::quantize_int8
