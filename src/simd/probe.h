// The vocabulary as functions over arrays, once per instruction set, so that tests can call every word of it.
// Part of test builds only. n is a multiple of `lanes` unless said otherwise.
#pragma once

#include <stdint.h>

#include "base/dispatch.h"

namespace tidegate {

struct SimdProbe {
  using Unary = void (*)(const float* a, float* out, int64_t n);
  using Binary = void (*)(const float* a, const float* b, float* out, int64_t n);
  using Load = void (*)(const void* from, float* out, int64_t n);
  using Store = void (*)(void* to, const float* a, int64_t n);

  int lanes;

  Unary exp, sigmoid, silu, silu_slope, softplus, log1p_unit;
  Unary abs, sqrt, round;
  Unary round_to[kDataTypes], round_to2[kDataTypes];  // two vectors at a time: n is a multiple of 2 * lanes
  Binary add, subtract, multiply, divide, min, max, scale_by_power;
  Binary select_less, select_equal;  // a < b ? a : b and a == b ? a : b
  void (*fma)(const float* a, const float* b, const float* c, float* out, int64_t n);

  // Memory of float, bf16, f16.
  Load load[kDataTypes];
  Store store[kDataTypes];
  Store stream[kDataTypes];
  Store store2[kDataTypes], stream2[kDataTypes];  // n is a multiple of 2 * lanes
  // One vector of which n elements exist in memory, 0 <= n <= lanes; the float side always has `lanes` elements.
  Load load_n[kDataTypes];
  Store store_n[kDataTypes];

  float (*sum)(const float* a);  // of one vector
  // out[i] = acc[i] + a[2i] b[2i] + a[2i+1] b[2i+1] over bf16 bits, n floats in acc and out.
  void (*dot)(const float* acc, const uint16_t* a, const uint16_t* b, float* out, int64_t n);
};

}  // namespace tidegate

TIDEGATE_KERNEL_TABLE(SimdProbe, simd_probe)
