// What partial_rope.cpp hands to the kernels.
#pragma once

#include <stdint.h>

#include "base/dispatch.h"
#include "base/rows.h"

namespace tidegate::partial_rope {

// Row r of x and y is one head of one token. Its angles stand in row (r / per_token % tokens, r / per_row) of cos and
// sin.
struct Args {
  Rows x, y;
  const void* cos;
  const void* sin;
  int64_t cos_row, cos_token, sin_row, sin_token;
  int64_t per_token;  // rows from one token to the next: the heads, or 1 when tokens run fastest
  int64_t tokens;
  int64_t per_row;  // rows from one batch row to the next
  int64_t width, rotary;
  bool transpose;  // backward
  bool hf;
  bool copy;  // y is other memory than x: pass the remaining channels through
};

// Indexed by the type of x, then by the type of cos and sin.
struct Kernels {
  void (*run[kDataTypes][kDataTypes])(const Args&, int64_t first, int64_t last) noexcept;
};

}  // namespace tidegate::partial_rope

TIDEGATE_KERNEL_TABLE(partial_rope::Kernels, partial_rope_kernels)
