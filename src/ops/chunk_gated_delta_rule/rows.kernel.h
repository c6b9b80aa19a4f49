// Between tensors of any type and layout and the fp32 matrices of a chunk.
#pragma once

#include "ops/chunk_gated_delta_rule/kernel.h"
#include "simd/lanes.h"
#include "simd/panels.h"
#include "simd/row_sums.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using chunk_gated_delta_rule::States;

constexpr float kEps = 1e-6f;  // inside the root of the l2norm

// rows of `width` elements to fp32 rows `pitch` apart; inverse[r] = 1 / length of the row, or 1.
template <class T>
inline void load_rows(const T* from, int64_t step, int64_t rows, int64_t width, float* to, int64_t pitch,
                      float* inverse, bool normalise) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* x = from + r * step;
    float* y = to + r * pitch;
    for_lanes(width, [&](int64_t c, auto lanes) { lanes.put(y + c, lanes.get(x + c)); });
    inverse[r] = normalise ? 1.0f / __builtin_sqrtf(sum_squares(y, width) + kEps) : 1.0f;
  }
}

// The columns of one panel of a state [K][V]. Rows of V that lie in a row of memory go by vectors.
template <class T>
inline void load_state(const T* from, const States& s, int64_t K, int64_t c0, int64_t V, float* panel) {
  if (s.value == 1) {
    load_panel(from, s.key, K, c0, V, panel);
    return;
  }
  const int64_t n = V - c0 < kPanel ? V - c0 : kPanel;
  for (int64_t k = 0; k < K; ++k) {
    for (int64_t c = 0; c < kPanel; ++c) {
      panel[k * kPanel + c] = c < n ? widen(from[k * s.key + (c0 + c) * s.value]) : 0.0f;
    }
  }
}

template <class T>
inline void store_state(const float* panel, const States& s, int64_t K, int64_t c0, int64_t V, T* to) {
  if (s.value == 1) {
    store_panel(panel, K, c0, V, to, s.key);
    return;
  }
  const int64_t n = V - c0 < kPanel ? V - c0 : kPanel;
  for (int64_t c = 0; c < n; ++c) {
    for (int64_t k = 0; k < K; ++k) {
      narrow(panel[k * kPanel + c], to + k * s.key + (c0 + c) * s.value);
    }
  }
}

// Calls f with a typed pointer to a state. Types are numbered as DType: float, bf16, f16.
template <class F>
[[gnu::always_inline]] inline void with_state(const States& s, int64_t slot, int64_t head, F f) {
  const int64_t offset = slot * s.slot + head * s.head;
  if (s.type == 0) {
    f(static_cast<float*>(s.data) + offset);
  } else if (s.type == 1) {
    f(static_cast<bf16*>(s.data) + offset);
  } else {
    f(static_cast<f16*>(s.data) + offset);
  }
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
