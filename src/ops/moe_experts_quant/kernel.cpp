// The sum over the slots of a token.
#include "ops/moe_experts_quant/kernel.h"

#include "simd/lanes.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

template <class T>
void combine(const quant_experts::Combine& a, int64_t first, int64_t last) noexcept {
  for (int64_t t = first; t < last; ++t) {
    T* out = static_cast<T*>(a.out) + t * a.out_row;
    for_lanes(a.columns, [&](int64_t c, auto lanes) {
      F32 total = zero();
      for (int64_t s = t * a.slots; s < (t + 1) * a.slots; ++s) {
        if (a.pos[s] >= 0) {
          total = fma(set1(a.weights[s]), lanes.get(a.y + a.pos[s] * a.pitch + c), total);
        }
      }
      lanes.put(out + c, total);
    });
  }
}

}  // namespace

extern const quant_experts::Kernels moe_experts_quant_kernels = {{combine<float>, combine<bf16>, combine<f16>}};

}  // namespace tidegate::TIDEGATE_ISA
