// What lies between the products of an expert, for the kernels.
#pragma once

#include <stdint.h>

#include "base/dispatch.h"

namespace tidegate::moe_experts {

// gate and up: rows of fp32, `pitch` apart. Results are rows of a data type, `row` elements apart.
struct Activation {
  const float *gate, *up;
  const float* da;       // backward only: the gradient of silu(gate) * up before the routing weight, by da_pitch
  const float* factors;  // backward only: the routing weights of the rows, which a is multiplied by
  int64_t rows, columns, pitch, da_pitch;
  void *a, *dgate, *dup;  // absent: not wanted
  int64_t a_row, dh_row;
  float* dfactors;  // [rows * dfactors_step]: <da, a>
  int64_t dfactors_step;
};

// A sum over the slots of tokens [first, last), columns of a block.
struct Combine {
  const float* y;  // rows of `pitch` floats
  int64_t pitch, columns, slots;
  const int32_t* rows;   // [token][slot]: the row of y, -1: none
  const float* weights;  // the same; absent: 1
  // What is added afterwards, a row a token; absent: nothing.
  const float* shared;
  const float* shared_weights;  // absent: 1
  const float* direction;       // plus steps[token] * direction
  const float* steps;
  bool round_y;
  void* out;
  int64_t out_row;
};

// Indexed by the type of the results.
struct Kernels {
  void (*forward[kDataTypes])(const Activation&) noexcept;
  void (*backward[kDataTypes])(const Activation&) noexcept;
  void (*combine[kDataTypes])(const Combine&, int64_t first, int64_t last) noexcept;
};

}  // namespace tidegate::moe_experts

TIDEGATE_KERNEL_TABLE(moe_experts::Kernels, moe_experts_kernels)
