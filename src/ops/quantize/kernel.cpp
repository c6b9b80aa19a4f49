// q = round(x / scale), scale = max |x| / 127 along one axis.
#include "ops/quantize/kernel.h"

#include "ops/quantize/row.kernel.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using quantize_int8::Columns;

template <class T>
float row(const void* x, int64_t n, int8_t* q) noexcept {
  return quantize_row(static_cast<const T*>(x), n, q);
}

template <class T>
void columns(const Columns& a, int64_t first, int64_t last) noexcept {
  const T* x = static_cast<const T*>(a.x) + first;
  for_lanes(last - first, [&](int64_t c, auto lanes) {
    F32 most = zero();
    F32 broken = zero();
    for (int64_t k = 0; k < a.n; ++k) {
      const F32 v = lanes.get(x + k * a.x_row + c);
      most = max(abs(v), most);
      broken = broken + v * zero();
    }
    const F32 part = most / set1(127.0f);
    const F32 scale = select(equal(part, zero()), set1(1.0f), part) + broken;
    float lane[kLanes];
    store(lane, scale);
    for (int64_t i = 0; i < kLanes && c + i < last - first; ++i) {
      a.scale[(first + c + i) * a.scale_step] = lane[i];
    }
    for (int64_t k = 0; k < a.n; ++k) {
      put_int8(a.q + k * a.q_row + first + c, to_int8_range(lanes.get(x + k * a.x_row + c), scale), lanes);
    }
  });
}

}  // namespace

extern const quantize_int8::Kernels quantize_kernels = {{row<float>, row<bf16>, row<f16>},
                                                        {columns<float>, columns<bf16>, columns<f16>}};

}  // namespace tidegate::TIDEGATE_ISA
