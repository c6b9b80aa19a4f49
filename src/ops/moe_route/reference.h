#pragma once

#include "tidegate/moe.h"

namespace tidegate::moe_route {

// chosen [T][k]: the experts, made by reference_choose or replayed. The logits are refused before (see moe_route.cpp).
template <class Acc>
void reference_choose(const TensorView& logits, std::int64_t k, const MoeRouteOptions& options, std::int32_t* chosen);
template <class Acc>
void reference_weigh(const TensorView& logits, const std::int32_t* chosen, const TensorView& weights,
                     const TensorView& probs, const MoeRouteOptions& options);
template <class Acc>
void reference_bwd(const TensorView& dweights, const TensorView& dprobs, const TensorView& logits,
                   const std::int32_t* chosen, std::int64_t k, const TensorView& dlogits,
                   const MoeRouteOptions& options);

}  // namespace tidegate::moe_route
