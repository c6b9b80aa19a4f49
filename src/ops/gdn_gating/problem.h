// The gates' arguments after checking, and the reference over them.
#pragma once

#include "tidegate/gating.h"

namespace tidegate::gdn_gating {

struct Problem {
  std::int64_t rows, tokens, heads;
  bool head_major;
};

template <class Acc>
void reference_fwd(const Problem& p, const TensorView& a, const TensorView& b, const TensorView& A_log,
                   const TensorView& dt_bias, const TensorView& g, const TensorView& beta, double beta_scale);
// sums [2][heads]: dA_log and ddt_bias are added.
template <class Acc>
void reference_bwd(const Problem& p, const TensorView& dg, const TensorView& dbeta, const TensorView& a,
                   const TensorView& b, const TensorView& A_log, const TensorView& dt_bias, const TensorView& da,
                   const TensorView& db, double* sums, double beta_scale);

}  // namespace tidegate::gdn_gating
