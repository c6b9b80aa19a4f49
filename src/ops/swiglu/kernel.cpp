// y = silu(gate) up;  dgate = dy up silu'(gate), dup = dy silu(gate).
#include "ops/swiglu/kernel.h"

#include "simd/lanes.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using swiglu::Args;

// kPairs groups of 2 * kLanes elements: their gates are computed together.
template <int kPairs, class T>
TIDEGATE_INLINE void fwd_group(const T* gate, const T* up, T* y, bool streamed) {
  F32 g[2 * kPairs];
  for (int i = 0; i < kPairs; ++i) {
    const F32x2 v = load2(gate + i * 2 * kLanes);
    g[2 * i] = v.a;
    g[2 * i + 1] = v.b;
  }
  gate_group<true>(g, gate);
  for (int i = 0; i < kPairs; ++i) {
    const F32x2 v = load2(up + i * 2 * kLanes);
    const F32x2 out = {g[2 * i] * v.a, g[2 * i + 1] * v.b};
    streamed ? stream2(y + i * 2 * kLanes, out) : store2(y + i * 2 * kLanes, out);
  }
}

template <class T>
void fwd(const Args& a, int64_t first, int64_t last) noexcept {
  for (int64_t r = first; r < last; ++r) {
    const T* gate = row_of<const T>(a.gate, r);
    const T* up = row_of<const T>(a.up, r);
    T* y = row_of<T>(a.y, r);
    int64_t c = 0;
    for (; c + 4 * kLanes <= a.width; c += 4 * kLanes) {
      fwd_group<2>(gate + c, up + c, y + c, a.stream);
    }
    for_pairs(
        a.width - c, [&](int64_t i) { fwd_group<1>(gate + c + i, up + c + i, y + c + i, a.stream); },
        [&](int64_t i, auto lanes) {
          F32 g[1] = {lanes.get(gate + c + i)};
          gate_group<true>(g, gate);
          lanes.put(y + c + i, g[0] * lanes.get(up + c + i));
        });
  }
  if (a.stream) {
    stream_fence();
  }
}

template <class T>
void bwd(const Args& a, int64_t first, int64_t last) noexcept {
  for (int64_t r = first; r < last; ++r) {
    const T* gate = row_of<const T>(a.gate, r);
    const T* up = row_of<const T>(a.up, r);
    const T* dy = row_of<const T>(a.y, r);
    T* dgate = a.dgate.data != nullptr ? row_of<T>(a.dgate, r) : nullptr;
    T* dup = a.dup.data != nullptr ? row_of<T>(a.dup, r) : nullptr;
    for_lanes(a.width, [&](int64_t c, auto lanes) {
      const F32 g = lanes.get(gate + c);
      const F32 grad = lanes.get(dy + c);
      if (dgate != nullptr) {
        lanes.put(dgate + c, grad * lanes.get(up + c) * silu_slope(g, sigmoid(g)));
      }
      if (dup != nullptr) {
        lanes.put(dup + c, grad * silu(g));
      }
    });
  }
}

}  // namespace

extern const swiglu::Kernels swiglu_kernels = {{fwd<float>, fwd<bf16>, fwd<f16>}, {bwd<float>, bwd<bf16>, bwd<f16>}};

}  // namespace tidegate::TIDEGATE_ISA
