// What moe_routing.cpp hands to the kernels.
#pragma once

#include <stdint.h>

#include "base/dispatch.h"

namespace tidegate::moe_routing {

// Rows of `width` neighbouring elements, `row` elements apart. y has a row for every place, out for every token.
struct Args {
  void *y, *out;  // backward: out = dout
  int64_t y_row, out_row;
  void* dy;  // may be absent
  int64_t dy_row;
  int64_t width, slots;
  const int32_t* pos;    // [T][slots]
  const float* weights;  // [T][slots]; absent: 1
  float* dweights;       // the same; may be absent
};

// Indexed by the type of all rows. For the tokens [first, last).
struct Kernels {
  void (*unpermute[kDataTypes])(const Args&, int64_t first, int64_t last) noexcept;
  void (*bwd[kDataTypes])(const Args&, int64_t first, int64_t last) noexcept;
};

}  // namespace tidegate::moe_routing

TIDEGATE_KERNEL_TABLE(moe_routing::Kernels, moe_routing_kernels)
