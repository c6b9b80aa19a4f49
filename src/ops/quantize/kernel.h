// What quantize.cpp hands to the kernels.
#pragma once

#include <stdint.h>

#include "base/dispatch.h"

namespace tidegate::quantize_int8 {

// rows: neighbours share a scale. columns: x[k * x_row + c], a scale for every column c of [first, last), n rows.
struct Columns {
  const void* x;
  int8_t* q;
  int64_t x_row, q_row, n;
  float* scale;  // [c * scale_step]
  int64_t scale_step;
};

// Indexed by the type of x.
struct Kernels {
  float (*row[kDataTypes])(const void* x, int64_t n, int8_t* q) noexcept;
  void (*columns[kDataTypes])(const Columns&, int64_t first, int64_t last) noexcept;
};

}  // namespace tidegate::quantize_int8

TIDEGATE_KERNEL_TABLE(quantize_int8::Kernels, quantize_kernels)
