// The quantised products in plain loops: the definition.
#include "ops/grouped_matmul_quant/reference.h"

#include <cmath>
#include <vector>

#include "base/element.h"

namespace tidegate::quant_products {

void reference_product(const GroupedQuantInputs& in, const std::int64_t* offsets, WeightAxes axes, float* y) {
  const int n_axis = axes == WeightAxes::kNK ? 1 : 2;
  const std::int64_t N = in.weight.sizes[n_axis];
  for (std::int64_t g = 0; g < in.weight.sizes[0]; ++g) {
    for (std::int64_t j = offsets[g]; j < offsets[g + 1]; ++j) {
      for (std::int64_t n = 0; n < N; ++n) {
        std::int32_t total = 0;
        for (std::int64_t k = 0; k < in.x.sizes[1]; ++k) {
          const std::int64_t at =
              g * in.weight.strides[0] + n * in.weight.strides[n_axis] + k * in.weight.strides[3 - n_axis];
          total +=
              std::int32_t{in.x.as<const std::int8_t>()[offset_of(in.x, j, k)]} * in.weight.as<const std::int8_t>()[at];
        }
        y[j * N + n] = static_cast<float>(total) * in.weight_scale.as<const float>()[offset_of(in.weight_scale, g, n)] *
                       in.x_scale.as<const float>()[offset_of(in.x_scale, j)];
      }
    }
  }
}

void reference_swiglu(const GroupedQuantInputs& in, const std::int64_t* offsets, WeightAxes axes,
                      const TensorView& smooth_scale, float* s) {
  const std::int64_t N = in.weight.sizes[axes == WeightAxes::kNK ? 1 : 2];
  std::vector<float> y(static_cast<std::size_t>(in.x.sizes[0] * N));
  reference_product(in, offsets, axes, y.data());
  for (std::int64_t g = 0; g < in.weight.sizes[0]; ++g) {
    for (std::int64_t j = offsets[g]; j < offsets[g + 1]; ++j) {
      for (std::int64_t i = 0; i < N / 2; ++i) {
        const double gate = y[static_cast<std::size_t>(j * N + i)];
        double v = gate / (1.0 + std::exp(-gate)) * y[static_cast<std::size_t>(j * N + N / 2 + i)];
        if (smooth_scale.defined()) {
          v *= smooth_scale.as<const float>()[offset_of(smooth_scale, g, i)];
        }
        s[j * (N / 2) + i] = static_cast<float>(v);
      }
    }
  }
}

}  // namespace tidegate::quant_products
