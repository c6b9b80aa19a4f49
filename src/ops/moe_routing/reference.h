#pragma once

#include "tidegate/moe.h"

namespace tidegate::moe_routing {

// pos [T][k], dense.
template <class Acc>
void reference_unpermute(const TensorView& y, const std::int32_t* pos, std::int64_t k, const TensorView& weights,
                         const TensorView& out);
template <class Acc>
void reference_bwd(const TensorView& dout, const TensorView& y, const std::int32_t* pos, std::int64_t k,
                   const TensorView& weights, const TensorView& dy, const TensorView& dweights);

}  // namespace tidegate::moe_routing
