// What rms_norm.cpp hands to the kernels.
#pragma once

#include <stdint.h>

#include "base/dispatch.h"
#include "base/rows.h"

namespace tidegate::rms_norm {

struct Args {
  Rows x, y, rstd;     // backward: y = dy
  Rows dx;             // data null if not wanted
  const float* scale;  // [D], 1 + weight
  int64_t width;
  float eps;
  bool stream;
};

// The backward adds this many rows in fp32 before the sum goes on in fp64.
inline constexpr int64_t kSumRows = 64;

// Indexed by the type of x. scratch: width floats, sums: [width] fp64, both null if dweight is not wanted.
struct Kernels {
  void (*fwd[kDataTypes])(const Args&, int64_t first, int64_t last) noexcept;
  void (*bwd[kDataTypes])(const Args&, int64_t first, int64_t last, float* scratch, double* sums) noexcept;
  void (*pack[kDataTypes])(float* scale, int64_t width) noexcept;  // the order that fwd wants
};

}  // namespace tidegate::rms_norm

TIDEGATE_KERNEL_TABLE(rms_norm::Kernels, rms_norm_kernels)
