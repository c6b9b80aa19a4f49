// silu(gate) * up and its gradient, and sums over the experts of a token.
#include "ops/moe_experts/kernel.h"

#include "simd/lanes.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using namespace moe_experts;

constexpr int64_t kRowsAhead = 4;

template <class T>
void forward(const Activation& v) noexcept {
  for (int64_t r = 0; r < v.rows; ++r) {
    T* a = static_cast<T*>(v.a) + r * v.a_row;
    const int64_t at = r * v.pitch;
    for_lanes(v.columns, [&](int64_t c, auto lanes) {
      lanes.put(a + c, silu(lanes.get(v.gate + at + c)) * lanes.get(v.up + at + c));
    });
  }
}

// With da = w da': dup = da silu(gate), dgate = da up silu'(gate), dw = <da', a> with a as it was rounded. What ddown
// needs is w a, rounded once, if the type has the range for it.
template <class T>
void backward(const Activation& v) noexcept {
  for (int64_t r = 0; r < v.rows; ++r) {
    const int64_t at = r * v.pitch;
    const F32 w = set1(v.factors[r]);
    F32 total = zero();
    for_lanes(v.columns, [&](int64_t c, auto lanes) {
      const F32 g = lanes.get(v.gate + at + c);
      const F32 u = lanes.get(v.up + at + c);
      const F32 s = sigmoid(g);
      const F32 a = silu(g) * u;
      if (v.a != nullptr) {
        lanes.put(static_cast<T*>(v.a) + r * v.a_row + c, v.weighted ? w * a : a);
      }
      if (v.da == nullptr) {
        return;
      }
      const F32 da = lanes.get(v.da + r * v.da_pitch + c);
      total = fma(da, round_to(a, static_cast<const T*>(nullptr)), total);
      if (v.dgate != nullptr) {
        const int64_t to = r * v.dh_row + c;
        lanes.put(static_cast<T*>(v.dgate) + to, w * da * u * silu_slope(g, s));
        lanes.put(static_cast<T*>(v.dup) + to, w * da * silu(g));
      }
    });
    if (v.dfactors != nullptr) {
      v.dfactors[r * v.dfactors_step] = sum(total);
    }
  }
}

template <class T>
void add(const Addition& v) noexcept {
  const T* like = nullptr;
  for (int64_t r = 0; r < v.rows; ++r) {
    const auto sums_of = [&](int64_t row) { return v.sums + (v.pairs[row] / v.slots - v.first_token) * v.sums_pitch; };
    float* sums = sums_of(r);
    const float* y = v.y + r * v.pitch;
    const float* later = sums_of(r + kRowsAhead < v.rows ? r + kRowsAhead : r);  // tokens lie anywhere
    const F32 weight = set1(v.weights != nullptr ? v.weights[r] : 1.0f);
    for_lanes(v.columns, [&](int64_t c, auto lanes) {
      prefetch(later + c);
      const F32 one = lanes.get(y + c);
      lanes.put(sums + c, fma(weight, v.round_y ? round_to(one, like) : one, lanes.get(sums + c)));
    });
  }
}

template <class T>
void finish(const Result& v) noexcept {
  for (int64_t t = 0; t < v.tokens; ++t) {
    T* out = static_cast<T*>(v.out) + t * v.out_row;
    for_lanes(v.columns, [&](int64_t c, auto lanes) {
      const F32 total = lanes.get(v.sums + t * v.pitch + c);
      lanes.put(out + c, v.direction != nullptr ? fma(set1(v.steps[t]), lanes.get(v.direction + c), total) : total);
    });
  }
}

}  // namespace

extern const moe_experts::Kernels moe_experts_kernels = {{forward<float>, forward<bf16>, forward<f16>},
                                                         {backward<float>, backward<bf16>, backward<f16>},
                                                         {add<float>, add<bf16>, add<f16>},
                                                         {finish<float>, finish<bf16>, finish<f16>}};

}  // namespace tidegate::TIDEGATE_ISA
