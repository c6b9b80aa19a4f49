// A gated norm problem of the tests: its tensors, and the calls on them.
#pragma once

#include "ops/rms_norm_gated/reference.h"
#include "tidegate/norm.h"
#include "toolkit.h"

namespace tidegate::test {

struct GatedNorm {
  Tensor x, z, weight, dy, rstd;
  RmsNormGatedOptions options = {};

  DType dtype() const { return x.view().dtype; }
  DType sum_type() const { return dtype() == DType::kF64 ? DType::kF64 : DType::kF32; }
  Sizes leading() const {
    Sizes s = x.sizes();
    s.pop_back();
    return s;
  }
};
struct GatedForward {
  Tensor y, rstd;
};
struct GatedBackward {
  Tensor dx, dz, dweight;
};

inline GatedForward outputs_of(const GatedNorm& v) { return {like(v.x), Tensor(v.sum_type(), v.leading())}; }
inline GatedForward forward(const GatedNorm& v) {
  GatedForward out = outputs_of(v);
  rms_norm_gated_fwd(v.x, v.z, v.weight, out.y, out.rstd, v.options);
  return out;
}
// Plain loops in fp32 on the same types.
inline GatedForward plain_forward(const GatedNorm& v) {
  GatedForward out = outputs_of(v);
  rms_norm_gated::reference_fwd<float>(v.x, v.z, v.weight, out.y, out.rstd, v.options);
  return out;
}
inline GatedBackward gradients_of(const GatedNorm& v) {
  return {like(v.x), like(v.x), Tensor(v.sum_type(), {v.x.sizes().back()})};
}
inline GatedBackward backward(const GatedNorm& v) {
  GatedBackward out = gradients_of(v);
  rms_norm_gated_bwd(v.dy, v.x, v.z, v.weight, v.rstd, out.dx, out.dz, out.dweight, v.options);
  return out;
}
inline GatedBackward plain_backward(const GatedNorm& v) {
  GatedBackward out = gradients_of(v);
  rms_norm_gated::reference_bwd<float>(v.dy, v.x, v.z, v.weight, v.rstd, out.dx, out.dz, out.dweight, v.options);
  return out;
}

inline GatedNorm make_gated(Random& random, DType dtype, DType weight_type, const Sizes& sizes,
                            const RmsNormGatedOptions& options = {}) {
  GatedNorm v;
  v.options = options;
  v.x = normal(random, dtype, sizes);
  v.z = normal(random, dtype, sizes, {}, 2.0);
  v.dy = normal(random, dtype, sizes);
  v.weight = normal(random, weight_type, {sizes.back()});
  v.rstd = forward(v).rstd;
  return v;
}
inline GatedNorm wide(const GatedNorm& v) {
  return {wide(v.x), wide(v.z), wide(v.weight), wide(v.dy), wide(v.rstd), v.options};
}

}  // namespace tidegate::test
