// What rms_norm_gated.cpp hands to the kernels.
#pragma once

#include <stdint.h>

#include "base/dispatch.h"
#include "base/rows.h"

namespace tidegate::rms_norm_gated {

struct Args {
  Rows x, z, y, rstd;   // backward: y = dy
  Rows dx, dz;          // backward outputs, data null if not wanted
  const float* weight;  // [D], ones if there is none
  int64_t width;
  float eps;
  bool sigmoid;        // gate sigmoid(z) instead of silu(z)
  bool hf;             // round after the norm ...
  bool round_product;  // ... and after the weight, where the promoted type is x's
  bool want_dweight;
  bool stream;
};

// The backward adds this many rows in fp32 before the sum goes on in fp64.
inline constexpr int64_t kSumRows = 64;

// Indexed by the type of x. scratch: 2 * width floats of the task's own; sums: [width] fp64 of dweight.
struct Kernels {
  void (*fwd[kDataTypes])(const Args&, int64_t first, int64_t last) noexcept;
  void (*bwd[kDataTypes])(const Args&, int64_t first, int64_t last, float* scratch, double* sums) noexcept;
  void (*pack[kDataTypes])(float* weight, int64_t width) noexcept;  // the order that fwd wants
};

}  // namespace tidegate::rms_norm_gated

TIDEGATE_KERNEL_TABLE(rms_norm_gated::Kernels, rms_norm_gated_kernels)
