// The product inside a gated MLP.
//
// Tensors are [..., D] with equal sizes, any leading strides and inner stride 1, so that the two halves of one
// projection can be given as they stand. Arithmetic is fp32, rounded once.
#pragma once

#include "tidegate/tensor.h"

namespace tidegate {

// Computes: y = silu(gate) * up.
void swiglu_fwd(const TensorView& gate, const TensorView& up, const TensorView& y);

// dgate = dy up silu'(gate), dup = dy silu(gate). Either may be absent.
void swiglu_bwd(const TensorView& dy, const TensorView& gate, const TensorView& up, const TensorView& dgate,
                const TensorView& dup);

}  // namespace tidegate
