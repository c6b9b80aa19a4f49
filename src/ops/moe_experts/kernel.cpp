// silu(gate) * up and its gradient, and sums over slots.
#include "ops/moe_experts/kernel.h"

#include "simd/lanes.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using namespace moe_experts;

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
// needs is w a, rounded once.
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
        lanes.put(static_cast<T*>(v.a) + r * v.a_row + c, w * a);
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
void combine(const Combine& v, int64_t first, int64_t last) noexcept {
  const T* like = nullptr;
  for (int64_t t = first; t < last; ++t) {
    T* out = static_cast<T*>(v.out) + t * v.out_row;
    for_lanes(v.columns, [&](int64_t c, auto lanes) {
      const auto get = [&](const float* from) {
        const F32 y = lanes.get(from + c);
        return v.round_y ? round_to(y, like) : y;
      };
      F32 total = zero();
      for (int64_t s = t * v.slots; s < (t + 1) * v.slots; ++s) {
        if (v.rows[s] >= 0) {
          const F32 y = get(v.y + v.rows[s] * v.pitch);
          total = v.weights != nullptr ? fma(set1(v.weights[s]), y, total) : total + y;
        }
      }
      if (v.shared != nullptr) {
        const F32 y = get(v.shared + t * v.pitch);
        total = v.shared_weights != nullptr ? fma(set1(v.shared_weights[t]), y, total) : total + y;
      }
      if (v.direction != nullptr) {
        total = fma(set1(v.steps[t]), lanes.get(v.direction + c), total);
      }
      lanes.put(out + c, total);
    });
  }
}

}  // namespace

extern const moe_experts::Kernels moe_experts_kernels = {{forward<float>, forward<bf16>, forward<f16>},
                                                         {backward<float>, backward<bf16>, backward<f16>},
                                                         {combine<float>, combine<bf16>, combine<f16>}};

}  // namespace tidegate::TIDEGATE_ISA
