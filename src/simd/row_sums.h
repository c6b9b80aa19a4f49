// Sums over a row that several norms need. Fixed order: it depends on the length and the instruction set only.
#pragma once

#include "simd/lanes.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

template <class T>
[[gnu::always_inline]] inline float sum_squares(const T* p, int64_t n) {
  F32 even = zero();
  F32 odd = zero();
  int64_t c = 0;
  for (; c + 2 * kLanes <= n; c += 2 * kLanes) {
    const F32 x0 = load(p + c);
    const F32 x1 = load(p + c + kLanes);
    even = fma(x0, x0, even);
    odd = fma(x1, x1, odd);
  }
  for_lanes(n - c, [&](int64_t i, auto lanes) {
    const F32 x = lanes.get(p + c + i);
    even = fma(x, x, even);
  });
  return sum(even + odd);
}

// bf16 rows go through the pair product: half the instructions, and exact products of 16-bit factors.
[[gnu::always_inline]] inline float sum_squares(const bf16* p, int64_t n) {
  F32 even = zero();
  F32 odd = zero();
  int64_t c = 0;
  for (; c + 4 * kLanes <= n; c += 4 * kLanes) {
    const Bf16Pairs x0 = load_pairs(p + c);
    const Bf16Pairs x1 = load_pairs(p + c + 2 * kLanes);
    even = dot(even, x0, x0);
    odd = dot(odd, x1, x1);
  }
  for_lanes(n - c, [&](int64_t i, auto lanes) {
    const F32 x = lanes.get(p + c + i);
    even = fma(x, x, even);
  });
  return sum(even + odd);
}

// apply(r, scale) for rows [first, last), where scale = (squares(r) / count + eps)^-1/2. The scales of several rows
// come first, in vectors: a sum, a root and two divisions wait for each other, and short rows leave nothing to do
// meanwhile.
template <class Squares, class Apply>
[[gnu::always_inline]] inline void for_scaled_rows(int64_t first, int64_t last, float count, float eps, Squares squares,
                                                   Apply apply) {
  constexpr int64_t kRows = 16;
  for (int64_t r0 = first; r0 < last; r0 += kRows) {
    const int64_t n = last - r0 < kRows ? last - r0 : kRows;
    float scales[kRows] = {};
    for (int64_t i = 0; i < n; ++i) {
      scales[i] = squares(r0 + i);
    }
    for (int64_t i = 0; i < kRows; i += kLanes) {
      store(scales + i, set1(1.0f) / sqrt(load(scales + i) / set1(count) + set1(eps)));
    }
    for (int64_t i = 0; i < n; ++i) {
      apply(r0 + i, scales[i]);
    }
  }
}

// sum of f(c, lanes) over the row.
template <class F>
[[gnu::always_inline]] inline float sum_lanes(int64_t n, F f) {
  F32 total = zero();
  for_lanes(n, [&](int64_t c, auto lanes) { total = total + f(c, lanes); });
  return sum(total);
}

template <class T>
TIDEGATE_INLINE bool all_zero(const T* x, int64_t n) {
  F32 largest = zero();
  for_lanes(n, [&](int64_t c, auto lanes) {
    const F32 v = lanes.get(x + c);
    largest = select(equal(v, zero()), largest, set1(1.0f));  // NaN is not zero either
  });
  return sum(largest) == 0.0f;
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
