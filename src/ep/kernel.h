// What the code of expert parallelism hands to the kernels.
#pragma once

#include <stdint.h>

#include "base/dispatch.h"

namespace tidegate::ep {

// out = sum of weights[i] * rows[i] in fp32, in order, rounded once.
struct Sum {
  const void* const* rows;
  const float* weights;
  int64_t count;
  void* out;
  int64_t width;
};

struct Kernels {
  void (*sum[kDataTypes])(const Sum&) noexcept;  // indexed by the type of all rows
  // Copies a row past the caches: both ends aligned to 64 bytes, and so is their number. Then a fence.
  void (*stream_row)(void* to, const void* from, int64_t bytes) noexcept;
  void (*fence)() noexcept;
  // out = x * factors in fp32; indexed by the type of x.
  void (*scale_row[kDataTypes])(const void* x, const float* factors, float* out, int64_t width) noexcept;
};

}  // namespace tidegate::ep

TIDEGATE_KERNEL_TABLE(ep::Kernels, ep_kernels)
