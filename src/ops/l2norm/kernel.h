// What l2norm.cpp hands to the kernels.
#pragma once

#include <stdint.h>

#include "base/dispatch.h"
#include "base/rows.h"

namespace tidegate::l2norm {

struct Args {
  Rows x, y, rstd;  // backward: x, y = dy, rstd
  Rows dx;
  int64_t width;
  float eps;
  bool zero_row_safe;
  bool stream;
};

// Indexed by the type of x (and dx), then by the type of y (or dy).
struct Kernels {
  void (*fwd[kDataTypes][kDataTypes])(const Args&, int64_t first, int64_t last) noexcept;
  void (*bwd[kDataTypes][kDataTypes])(const Args&, int64_t first, int64_t last) noexcept;
};

}  // namespace tidegate::l2norm

TIDEGATE_KERNEL_TABLE(l2norm::Kernels, l2norm_kernels)
