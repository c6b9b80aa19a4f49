// What grouped_matmul_quant.cpp (and the quantised experts) hand to the kernels.
#pragma once

#include <stdint.h>

#include "base/dispatch.h"

namespace tidegate::quant_products {

// Rows of one group times columns of its weight. weight(c, i) stands at c * column + i * inner; one of the two is 1.
struct Block {
  const int8_t* const* rows;
  const float* row_scales;
  int64_t row_count, width;
  const int8_t* weight;
  int64_t column, inner;
  const float* weight_scales;  // of the columns, neighbours
  int64_t columns;
  float* out;  // out[r * pitch + c]
  int64_t pitch;
  char* room;             // room_bytes() of scratch
  const uint8_t* packed;  // what pack() made of the rows; absent: the kernel packs them itself
};

// out = silu(gate) * up (* smooth): gate is the block's weight, the up columns follow `up_first` columns later.
struct SwigluBlock {
  Block gate;
  int64_t up_first;
  const float* smooth;  // absent: 1
};

struct Kernels {
  int64_t (*room_bytes)(int64_t rows, int64_t width) noexcept;
  // For rows that meet several blocks of columns of weights whose inner stride is 1. packed_bytes is 0 where such a
  // product reads rows as they are.
  int64_t (*packed_bytes)(int64_t rows, int64_t width) noexcept;
  void (*pack)(const int8_t* const* rows, int64_t row_count, int64_t width, uint8_t* to) noexcept;
  void (*product)(const Block&) noexcept;
  void (*swiglu)(const SwigluBlock&) noexcept;
};

}  // namespace tidegate::quant_products

TIDEGATE_KERNEL_TABLE(quant_products::Kernels, grouped_matmul_quant_kernels)
