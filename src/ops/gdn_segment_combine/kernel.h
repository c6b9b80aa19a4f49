// What gdn_segment_combine.cpp hands to the kernels.
#pragma once

#include <stdint.h>

#include "base/dispatch.h"

namespace tidegate::segment_combine {

// One fp32 matrix in rows; inner stride 1.
struct Matrix {
  float* data;
  int64_t pitch;
};

// out = phi2 x (+ add, if its data is not null): phi2 [K,K], x, add, out [K,width]. scratch: K panels' rows.
struct Args {
  Matrix phi2, x, add, out;
  int64_t K, width;
};

struct Kernels {
  int64_t panel;
  void (*combine)(const Args&, float* scratch) noexcept;
};

}  // namespace tidegate::segment_combine

TIDEGATE_KERNEL_TABLE(segment_combine::Kernels, gdn_segment_combine_kernels)
