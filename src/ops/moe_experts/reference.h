#pragma once

#include "tidegate/moe.h"

namespace tidegate::moe_experts {

// ids [T][k], dense and checked.
template <class Acc>
void reference_fwd(const MoeExpertsInputs& in, const std::int32_t* ids, const TensorView& out,
                   const MoeExpertsOptions& options);
template <class Acc>
void reference_bwd(const TensorView& dout, const MoeExpertsInputs& in, const std::int32_t* ids,
                   const MoeExpertsGradients& out, const MoeExpertsOptions& options);

}  // namespace tidegate::moe_experts
