// Gates of the delta rule: raw projections to log decay g and write strength beta.
#pragma once

#include "tidegate/tensor.h"

namespace tidegate {

struct GdnGatingOptions {
  double beta_scale = 1.0;  // 2 for negative eigenvalues
  Layout layout = Layout::kBSND;
};

// Computes: g = -exp(A_log) * softplus(a + dt_bias), fp32;  beta = beta_scale * sigmoid(b).
//   a, b, g, beta  [B,T,HV] | [T,HV] | [B,HV,T] | [HV,T] by layout;  A_log, dt_bias [HV] any float type, dt_bias may be
//   absent exp(A_log) = inf with softplus = 0 gives g = 0.
void gdn_gating_fwd(const TensorView& a, const TensorView& b, const TensorView& A_log, const TensorView& dt_bias,
                    const TensorView& g, const TensorView& beta, const GdnGatingOptions& options = {});

// Gradients: da = -dg exp(A_log) sigmoid(a + dt_bias); db = dbeta beta_scale s (1 - s); dA_log = sum dg g;
// ddt_bias = sum da. da, db in the types of a, b; the sums fp32 in a fixed order. Any output may be absent.
void gdn_gating_bwd(const TensorView& dg, const TensorView& dbeta, const TensorView& a, const TensorView& b,
                    const TensorView& A_log, const TensorView& dt_bias, const TensorView& da, const TensorView& db,
                    const TensorView& dA_log, const TensorView& ddt_bias, const GdnGatingOptions& options = {});

}  // namespace tidegate
