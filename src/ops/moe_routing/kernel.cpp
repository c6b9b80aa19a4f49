// out[t] = sum over slots of w y[pos], and back.
#include "ops/moe_routing/kernel.h"

#include "simd/lanes.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using moe_routing::Args;

template <class T>
void unpermute(const Args& a, int64_t first, int64_t last) noexcept {
  for (int64_t t = first; t < last; ++t) {
    T* out = static_cast<T*>(a.out) + t * a.out_row;
    for_lanes(a.width, [&](int64_t c, auto lanes) {
      F32 total = zero();
      for (int64_t s = t * a.slots; s < (t + 1) * a.slots; ++s) {
        if (a.pos[s] >= 0) {
          const F32 y = lanes.get(static_cast<const T*>(a.y) + a.pos[s] * a.y_row + c);
          total = a.weights != nullptr ? fma(set1(a.weights[s]), y, total) : total + y;
        }
      }
      lanes.put(out + c, total);
    });
  }
}

template <class T>
void bwd(const Args& a, int64_t first, int64_t last) noexcept {
  for (int64_t s = first * a.slots; s < last * a.slots; ++s) {
    const T* dout = static_cast<const T*>(a.out) + s / a.slots * a.out_row;
    if (a.dweights != nullptr) {
      a.dweights[s] = 0.0f;
    }
    if (a.pos[s] < 0) {
      continue;
    }
    if (a.dy != nullptr) {
      T* dy = static_cast<T*>(a.dy) + a.pos[s] * a.dy_row;
      const F32 w = set1(a.weights != nullptr ? a.weights[s] : 1.0f);
      for_lanes(a.width, [&](int64_t c, auto lanes) { lanes.put(dy + c, w * lanes.get(dout + c)); });
    }
    if (a.dweights != nullptr) {
      const T* y = static_cast<const T*>(a.y) + a.pos[s] * a.y_row;
      F32 total = zero();
      for_lanes(a.width, [&](int64_t c, auto lanes) { total = fma(lanes.get(dout + c), lanes.get(y + c), total); });
      a.dweights[s] = sum(total);
    }
  }
}

}  // namespace

extern const moe_routing::Kernels moe_routing_kernels = {{unpermute<float>, unpermute<bf16>, unpermute<f16>},
                                                         {bwd<float>, bwd<bf16>, bwd<f16>}};

}  // namespace tidegate::TIDEGATE_ISA
