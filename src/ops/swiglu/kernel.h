// What swiglu.cpp hands to the kernels.
#pragma once

#include <stdint.h>

#include "base/dispatch.h"
#include "base/rows.h"

namespace tidegate::swiglu {

struct Args {
  Rows gate, up, y;  // backward: y = dy
  Rows dgate, dup;   // backward outputs, data null if not wanted
  int64_t width;
  bool stream;
};

// Indexed by the type of all tensors.
struct Kernels {
  void (*fwd[kDataTypes])(const Args&, int64_t first, int64_t last) noexcept;
  void (*bwd[kDataTypes])(const Args&, int64_t first, int64_t last) noexcept;
};

}  // namespace tidegate::swiglu

TIDEGATE_KERNEL_TABLE(swiglu::Kernels, swiglu_kernels)
