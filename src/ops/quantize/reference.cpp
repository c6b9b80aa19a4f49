// Quantisation in plain loops: the definition. The scale and the quotient are fp32, so that nothing is left to choose.
#include "ops/quantize/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/element.h"

namespace tidegate::quantize_int8 {

float reference_row(const float* x, std::int64_t n, std::int8_t* q) {
  float most = 0.0f;
  bool finite = true;
  for (std::int64_t i = 0; i < n; ++i) {
    most = std::max(most, std::abs(x[i]));
    finite = finite && std::isfinite(x[i]);
  }
  float scale = most / 127.0f;
  scale = scale == 0.0f ? 1.0f : scale;
  for (std::int64_t i = 0; i < n; ++i) {
    q[i] = finite ? static_cast<std::int8_t>(std::clamp(std::nearbyint(x[i] / scale), -127.0f, 127.0f)) : 0;
  }
  return finite ? scale : std::numeric_limits<float>::quiet_NaN();
}

void reference(const TensorView& x, const TensorView& q, const TensorView& scale, int axis) {
  const std::int64_t n = x.sizes[axis];
  std::vector<float> row(static_cast<std::size_t>(n));
  std::vector<std::int8_t> out(row.size());
  for (std::int64_t i = 0; i < scale.numel(); ++i) {
    std::int64_t rest = i;
    std::int64_t from = 0;
    std::int64_t to = 0;
    std::int64_t at = 0;
    for (int d = x.rank - 1; d >= 0; --d) {
      if (d != axis) {
        const std::int64_t index = rest % x.sizes[d];
        rest /= x.sizes[d];
        from += index * x.strides[d];
        to += index * q.strides[d];
        at += index * scale.strides[d < axis ? d : d - 1];
      }
    }
    for (std::int64_t k = 0; k < n; ++k) {
      row[static_cast<std::size_t>(k)] = static_cast<float>(read_element(x, from + k * x.strides[axis]));
    }
    scale.as<float>()[at] = reference_row(row.data(), n, out.data());
    for (std::int64_t k = 0; k < n; ++k) {
      q.as<std::int8_t>()[to + k * q.strides[axis]] = out[static_cast<std::size_t>(k)];
    }
  }
}

}  // namespace tidegate::quantize_int8
