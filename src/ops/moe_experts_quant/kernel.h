// What moe_experts_quant.cpp hands to its own kernel; the products are those of grouped_matmul_quant.
#pragma once

#include <stdint.h>

#include "base/dispatch.h"

namespace tidegate::quant_experts {

// out[t] = sum over slots of weights[t][s] * y[pos[t][s]], columns of a block, in the order of the slots.
struct Combine {
  const float* y;
  int64_t pitch, columns, slots;
  const int32_t* pos;  // -1: not routed
  const float* weights;
  void* out;
  int64_t out_row;
};

// Indexed by the type of out.
struct Kernels {
  void (*combine[kDataTypes])(const Combine&, int64_t first, int64_t last) noexcept;
};

}  // namespace tidegate::quant_experts

TIDEGATE_KERNEL_TABLE(quant_experts::Kernels, moe_experts_quant_kernels)
