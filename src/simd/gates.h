// Gates of one value head over some tokens: from tensors of any float type, raw or ready.
#pragma once

#include "simd/lanes.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

// n values of a gate tensor of any float type, one `step` after the other.
inline void read_gates(const void* data, int type, int64_t offset, int64_t step, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t at = offset + i * step;
    out[i] = type == 0   ? static_cast<const float*>(data)[at]
             : type == 1 ? widen(static_cast<const bf16*>(data)[at])
                         : widen(static_cast<const f16*>(data)[at]);
  }
}

// In place: the raw a of n tokens to the log decay -rate softplus(a + bias).
inline void open_decays(float* g, int64_t n, float rate, float bias) {
  for_lanes(n, [&](int64_t i, auto lanes) {
    lanes.put(g + i, zero() - times_rate(set1(rate), softplus(lanes.get(g + i) + set1(bias))));
  });
}

// In place: the raw b of n tokens to beta = scale sigmoid(b).
inline void open_betas(float* beta, int64_t n, float scale) {
  for_lanes(n, [&](int64_t i, auto lanes) { lanes.put(beta + i, set1(scale) * sigmoid(lanes.get(beta + i))); });
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
