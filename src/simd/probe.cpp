#include "simd/probe.h"

#include "simd/simd.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

template <class F>
void map(const float* a, float* out, int64_t n, F f) {
  for (int64_t i = 0; i < n; i += kLanes) {
    store(out + i, f(load(a + i)));
  }
}
template <class F>
void map(const float* a, const float* b, float* out, int64_t n, F f) {
  for (int64_t i = 0; i < n; i += kLanes) {
    store(out + i, f(load(a + i), load(b + i)));
  }
}

template <class T>
void load_all(const void* from, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    store(out + i, load(static_cast<const T*>(from) + i));
  }
}
template <class T>
void store_all(void* to, const float* a, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    store(static_cast<T*>(to) + i, load(a + i));
  }
}
template <class T>
void stream_all(void* to, const float* a, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    stream(static_cast<T*>(to) + i, load(a + i));
  }
  stream_fence();
}
template <class T>
F32x2 pair_at(const float* a) {
  float group[2 * kLanes];
  for (int i = 0; i < 2 * kLanes; ++i) {
    group[i] = a[pair_element(i, static_cast<const T*>(nullptr))];
  }
  return {load(group), load(group + kLanes)};
}
template <class T>
void store2_all(void* to, const float* a, int64_t n) {
  for (int64_t i = 0; i < n; i += 2 * kLanes) {
    store2(static_cast<T*>(to) + i, pair_at<T>(a + i));
  }
}
template <class T>
void stream2_all(void* to, const float* a, int64_t n) {
  for (int64_t i = 0; i < n; i += 2 * kLanes) {
    stream2(static_cast<T*>(to) + i, pair_at<T>(a + i));
  }
  stream_fence();
}
template <class T>
void load_part(const void* from, float* out, int64_t n) {
  store(out, load_n(static_cast<const T*>(from), n));
}
template <class T>
void store_part(void* to, const float* a, int64_t n) {
  store_n(static_cast<T*>(to), load(a), n);
}
template <class T>
void round_all(const float* a, float* out, int64_t n) {
  map(a, out, n, [](F32 x) { return round_to(x, static_cast<const T*>(nullptr)); });
}
template <class T>
void round2_all(const float* a, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += 2 * kLanes) {
    const F32x2 v = round_to(F32x2{load(a + i), load(a + i + kLanes)}, static_cast<const T*>(nullptr));
    store(out + i, v.a);
    store(out + i + kLanes, v.b);
  }
}

void fma_all(const float* a, const float* b, const float* c, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    store(out + i, fma(load(a + i), load(b + i), load(c + i)));
  }
}
float sum_lanes(const float* a) { return sum(load(a)); }
void dot_all(const float* acc, const uint16_t* a, const uint16_t* b, float* out, int64_t n) {
  const bf16* left = reinterpret_cast<const bf16*>(a);
  const bf16* right = reinterpret_cast<const bf16*>(b);
  for (int64_t i = 0; i < n; i += kLanes) {
    store(out + i, dot(load(acc + i), load_pairs(left + 2 * i), load_pairs(right + 2 * i)));
  }
}

}  // namespace

#define TIDEGATE_UNARY(expression) \
  [](const float* pa, float* out, int64_t n) { map(pa, out, n, [](F32 a) { return expression; }); }
#define TIDEGATE_BINARY(expression)                               \
  [](const float* pa, const float* pb, float* out, int64_t n) {   \
    map(pa, pb, out, n, [](F32 a, F32 b) { return expression; }); \
  }

const SimdProbe simd_probe = {
    .lanes = kLanes,
    .exp = TIDEGATE_UNARY(exp(a)),
    .sigmoid = TIDEGATE_UNARY(sigmoid(a)),
    .silu = TIDEGATE_UNARY(silu(a)),
    .silu_slope = TIDEGATE_UNARY(silu_slope(a, sigmoid(a))),
    .softplus = TIDEGATE_UNARY(softplus(a)),
    .log1p_unit = TIDEGATE_UNARY(log1p_unit(a)),
    .abs = TIDEGATE_UNARY(abs(a)),
    .sqrt = TIDEGATE_UNARY(sqrt(a)),
    .round = TIDEGATE_UNARY(round(a)),
    .round_to = {round_all<float>, round_all<bf16>, round_all<f16>},
    .round_to2 = {round2_all<float>, round2_all<bf16>, round2_all<f16>},
    .add = TIDEGATE_BINARY(a + b),
    .subtract = TIDEGATE_BINARY(a - b),
    .multiply = TIDEGATE_BINARY(a * b),
    .divide = TIDEGATE_BINARY(a / b),
    .min = TIDEGATE_BINARY(min(a, b)),
    .max = TIDEGATE_BINARY(max(a, b)),
    .scale_by_power = TIDEGATE_BINARY(scale_by_power(a, b)),
    .select_less = TIDEGATE_BINARY(select(less(a, b), a, b)),
    .select_equal = TIDEGATE_BINARY(select(equal(a, b), a, b)),
    .fma = fma_all,
    .load = {load_all<float>, load_all<bf16>, load_all<f16>},
    .store = {store_all<float>, store_all<bf16>, store_all<f16>},
    .stream = {stream_all<float>, stream_all<bf16>, stream_all<f16>},
    .store2 = {store2_all<float>, store2_all<bf16>, store2_all<f16>},
    .stream2 = {stream2_all<float>, stream2_all<bf16>, stream2_all<f16>},
    .load_n = {load_part<float>, load_part<bf16>, load_part<f16>},
    .store_n = {store_part<float>, store_part<bf16>, store_part<f16>},
    .sum = sum_lanes,
    .dot = dot_all,
};

}  // namespace tidegate::TIDEGATE_ISA
