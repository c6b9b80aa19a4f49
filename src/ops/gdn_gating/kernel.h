// What gdn_gating.cpp hands to the kernels.
#pragma once

#include <stdint.h>

#include "base/dispatch.h"
#include "base/rows.h"

namespace tidegate::gdn_gating {

// Token-major: a row is a token, its elements are the heads. Head-major: a row is a head of a batch row, its elements
// are tokens; then `heads` rows follow each other before the batch advances.
struct Args {
  Rows a, b, g, beta;    // forward outputs g, beta; backward inputs dg, dbeta
  Rows da, db;           // backward outputs, data null if not wanted
  const float* rate;     // [HV] exp(A_log)
  const float* dt_bias;  // [HV], zeros if there is none
  int64_t width, heads;
  float beta_scale;
  bool finite_rates;  // of all heads; false where nobody has looked
  bool head_major;
  bool stream;  // g and beta are larger than the caches and aligned: write past them
};

// The backward adds this many tokens in fp32 before the sum goes on in fp64.
inline constexpr int64_t kSumBlock = 64;

// Indexed by the type of a and b, then by the type of beta (dbeta). sums: fp64 [2][HV], dA_log and
// ddt_bias of the rows; head-major, where a task is one row, only [2][1].
struct Kernels {
  void (*fwd[kDataTypes][kDataTypes])(const Args&, int64_t first, int64_t last) noexcept;
  void (*bwd[kDataTypes][kDataTypes])(const Args&, int64_t first, int64_t last, double* sums) noexcept;
};

}  // namespace tidegate::gdn_gating

TIDEGATE_KERNEL_TABLE(gdn_gating::Kernels, gdn_gating_kernels)
