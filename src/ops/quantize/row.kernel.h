// One row of numbers as int8 and a scale. Shared with the operators that quantise what they have computed.
#pragma once

#include "simd/lanes.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

// The scale of numbers whose largest magnitude is `most`. Numbers too small for a scale are zeros.
inline float int8_scale(float most) {
  const float scale = most / 127.0f;
  return scale == 0.0f ? 1.0f : scale;
}

// round(x / scale), ties to even, within [-127, 127]; 0 if it is NaN.
TIDEGATE_INLINE F32 to_int8_range(F32 x, F32 scale) {
  const F32 v = x / scale;
  return round(max(min(select(equal(v, v), v, zero()), set1(127.0f)), set1(-127.0f)));
}

template <class Lanes>
[[gnu::always_inline]] inline void put_int8(int8_t* to, F32 v, Lanes) {
  float whole[kLanes];
  store(whole, v);
  for (int i = 0; i < kLanes; ++i) {
    to[i] = static_cast<int8_t>(static_cast<int32_t>(whole[i]));
  }
}
[[gnu::always_inline]] inline void put_int8(int8_t* to, F32 v, FirstLanes lanes) {
  float whole[kLanes];
  store(whole, v);
  for (int64_t i = 0; i < lanes.n; ++i) {
    to[i] = static_cast<int8_t>(static_cast<int32_t>(whole[i]));
  }
}

inline float largest(F32 a) {
  float lane[kLanes];
  store(lane, a);
  float most = 0.0f;
  for (int i = 0; i < kLanes; ++i) {
    most = lane[i] > most ? lane[i] : most;
  }
  return most;
}

// A row with NaN or Inf has no scale: it becomes NaN, and so does what is computed from the row.
template <class T>
inline float quantize_row(const T* x, int64_t n, int8_t* q) {
  F32 most = zero();
  F32 broken = zero();
  for_lanes(n, [&](int64_t c, auto lanes) {
    const F32 v = lanes.get(x + c);
    most = max(abs(v), most);
    broken = broken + v * zero();
  });
  const float scale = int8_scale(largest(most)) + sum(broken);
  for_lanes(n, [&](int64_t c, auto lanes) { put_int8(q + c, to_int8_range(lanes.get(x + c), set1(scale)), lanes); });
  return scale;
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
