// What lies between the products of an expert, for the kernels.
#pragma once

#include <stdint.h>

#include "base/dispatch.h"

namespace tidegate::moe_experts {

// gate and up: rows of fp32, `pitch` apart. Results are rows of a data type, `row` elements apart.
struct Activation {
  const float *gate, *up;
  const float* da;       // backward only: the gradient of silu(gate) * up before the routing weight, by da_pitch
  const float* factors;  // backward only: the routing weights of the rows
  bool weighted;         // backward only: a is multiplied by them
  int64_t rows, columns, pitch, da_pitch;
  void *a, *dgate, *dup;  // absent: not wanted
  int64_t a_row, dh_row;
  float* dfactors;  // [rows * dfactors_step]: <da, a>
  int64_t dfactors_step;
};

// Rows of results that are added to the sums of their tokens.
struct Addition {
  const float* y;  // [rows], `pitch` apart
  int64_t pitch, columns, rows;
  const int32_t* pairs;  // [rows]: pair / slots is the token
  int64_t slots, first_token;
  const float* weights;  // [rows]; absent: 1
  bool round_y;
  float* sums;  // of first_token and those after it, sums_pitch apart
  int64_t sums_pitch;
};

// Sums as results.
struct Result {
  const float* sums;  // `pitch` apart
  int64_t pitch, columns, tokens;
  // Plus steps[token] * direction; absent: nothing.
  const float* direction;
  const float* steps;
  void* out;
  int64_t out_row;
};

// Indexed by the type of the results.
struct Kernels {
  void (*forward[kDataTypes])(const Activation&) noexcept;
  void (*backward[kDataTypes])(const Activation&) noexcept;
  void (*add[kDataTypes])(const Addition&) noexcept;
  void (*finish[kDataTypes])(const Result&) noexcept;
};

}  // namespace tidegate::moe_experts

TIDEGATE_KERNEL_TABLE(moe_experts::Kernels, moe_experts_kernels)
