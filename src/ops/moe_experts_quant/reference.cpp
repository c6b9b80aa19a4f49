// The quantised experts token by token, slot by slot: the definition.
#include "ops/moe_experts_quant/reference.h"

#include <vector>

#include "base/element.h"
#include "ops/grouped_matmul_quant/reference.h"
#include "ops/quantize/reference.h"

namespace tidegate::quant_experts {
namespace {

// The weights of one expert as a group of their own.
TensorView expert(const TensorView& t, std::int64_t e) {
  TensorView v = t;
  v.data = static_cast<char*>(t.data) + e * t.strides[0] * dtype_bytes(t.dtype);
  v.sizes[0] = 1;
  return v;
}

}  // namespace

void reference(const MoeExpertsQuantInputs& in, WeightAxes axes, double* out) {
  const std::int64_t H = in.x.sizes[1];
  const std::int64_t I = in.down.sizes[axes == WeightAxes::kNK ? 2 : 1];
  std::vector<float> x(static_cast<std::size_t>(H)), s(static_cast<std::size_t>(I)), y(x.size());
  std::vector<std::int8_t> xq(x.size()), sq(s.size());
  constexpr std::int64_t kOneRow[] = {0, 1};
  for (std::int64_t t = 0; t < in.x.sizes[0]; ++t) {
    for (std::int64_t h = 0; h < H; ++h) {
      x[static_cast<std::size_t>(h)] = static_cast<float>(read_element(in.x, offset_of(in.x, t, h)));
      out[t * H + h] = 0.0;
    }
    const float x_scale = quantize_int8::reference_row(x.data(), H, xq.data());
    for (std::int64_t slot = 0; slot < in.ids.sizes[1]; ++slot) {
      const auto e = static_cast<std::int64_t>(read_element(in.ids, offset_of(in.ids, t, slot)));
      if (e < 0) {
        continue;
      }
      GroupedQuantInputs g{contiguous(xq.data(), DType::kI8, {1, H}),
                           contiguous(&x_scale, DType::kF32, {1}),
                           expert(in.gate_up, e),
                           expert(in.gate_up_scale, e),
                           {}};
      quant_products::reference_swiglu(g, kOneRow, axes, {}, s.data());
      const float s_scale = quantize_int8::reference_row(s.data(), I, sq.data());
      g = {contiguous(sq.data(), DType::kI8, {1, I}),
           contiguous(&s_scale, DType::kF32, {1}),
           expert(in.down, e),
           expert(in.down_scale, e),
           {}};
      quant_products::reference_product(g, kOneRow, axes, y.data());
      const double w = read_element(in.weights, offset_of(in.weights, t, slot));
      for (std::int64_t h = 0; h < H; ++h) {
        out[t * H + h] += w * y[static_cast<std::size_t>(h)];
      }
    }
  }
}

}  // namespace tidegate::quant_experts
