#pragma once

#include "tidegate/quant.h"

namespace tidegate::quant_experts {

// out [T,H] as double, ids as int32 or int64 -1 .. E-1. Scales and quotients are fp32, as defined.
void reference(const MoeExpertsQuantInputs& in, WeightAxes axes, double* out);

}  // namespace tidegate::quant_experts
