// Row norms over the last dimension: l2norm, gated RMSNorm, zero-centred RMSNorm.
//
// Tensors are [..., D] with equal leading sizes and any leading strides, so a head-major input may have a token-major
// output. Statistics and sums are fp32. rstd has the leading shape.
#pragma once

#include "tidegate/conv.h"
#include "tidegate/tensor.h"

namespace tidegate {

// Computes: rstd = (sum x^2 + eps)^-1/2, y = x * rstd. y may have another float type than x.
void l2norm_fwd(const TensorView& x, const TensorView& y, const TensorView& rstd, double eps = 1e-6);

// dx = rstd * (dy - n <dy, n>) with n = x * rstd. zero_row_safe: a row of zeros gets gradient 0 instead of rstd * dy.
void l2norm_bwd(const TensorView& dy, const TensorView& x, const TensorView& rstd, const TensorView& dx,
                bool zero_row_safe = false);

// kHf repeats Transformers' roundings: n = round(x * rstd), m = round(weight * n) in the promoted type, y = round(m *
// act(z)). kFp32 rounds once.
enum class Rounding : std::uint8_t { kHf, kFp32 };
// "hf", "fp32"; argument: what the caller calls it
Rounding parse_rounding(std::string_view op, std::string_view name, std::string_view argument = "rounding");

struct RmsNormGatedOptions {
  double eps = 1e-6;
  Activation activation = Activation::kSilu;  // silu or sigmoid
  Rounding rounding = Rounding::kHf;
};

// Computes: rstd = (mean x^2 + eps)^-1/2, y = weight * x * rstd * act(z). weight [D], absent = 1.
void rms_norm_gated_fwd(const TensorView& x, const TensorView& z, const TensorView& weight, const TensorView& y,
                        const TensorView& rstd, const RmsNormGatedOptions& options = {});

// With n = x rstd, e = dy weight act(z): dx = rstd (e - n mean(e n)); dz = dy weight n act'(z);
// dweight = sum over rows of dy n act(z), fp32. Any output may be absent. Both rounding modes share this gradient.
void rms_norm_gated_bwd(const TensorView& dy, const TensorView& x, const TensorView& z, const TensorView& weight,
                        const TensorView& rstd, const TensorView& dx, const TensorView& dz, const TensorView& dweight,
                        const RmsNormGatedOptions& options = {});

// Zero-centred RMSNorm of the block norms: y = x * rstd * (1 + weight), fp32 throughout, rounded once.
void rms_norm_fwd(const TensorView& x, const TensorView& weight, const TensorView& y, const TensorView& rstd,
                  double eps = 1e-6);
void rms_norm_bwd(const TensorView& dy, const TensorView& x, const TensorView& weight, const TensorView& rstd,
                  const TensorView& dx, const TensorView& dweight);

}  // namespace tidegate
