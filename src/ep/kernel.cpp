// Sums of rows that lie anywhere, copies past the caches, and rows times factors.
#include "ep/kernel.h"

#include "simd/lanes.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

// Terms stand in the outer loop of a block, so that few rows are read at a time: more streams than that and the
// hardware stops asking for them in advance. 8 vectors a block: as many accumulators.
template <class T>
void sum(const ep::Sum& s) noexcept {
  const auto row = [&](int64_t i) { return static_cast<const T*>(s.rows[i]); };
  T* out = static_cast<T*>(s.out);
  constexpr int kPairs = 4;
  constexpr int64_t kBlock = 2 * kPairs * kLanes;
  int64_t c = 0;
  for (; c + kBlock <= s.width; c += kBlock) {
    F32x2 total[kPairs];
    for (int p = 0; p < kPairs; ++p) {
      total[p] = {zero(), zero()};
    }
    for (int64_t i = 0; i < s.count; ++i) {
      const F32 w = set1(s.weights[i]);
      const T* y = row(i) + c;
      for (int p = 0; p < kPairs; ++p) {
        const F32x2 v = load2(y + 2 * p * kLanes);
        total[p] = {fma(w, v.a, total[p].a), fma(w, v.b, total[p].b)};
      }
    }
    for (int p = 0; p < kPairs; ++p) {
      store2(out + c + 2 * p * kLanes, total[p]);
    }
  }
  for_lanes(s.width - c, [&](int64_t j, auto lanes) {
    F32 total = zero();
    for (int64_t i = 0; i < s.count; ++i) {
      total = fma(set1(s.weights[i]), lanes.get(row(i) + c + j), total);
    }
    lanes.put(out + c + j, total);
  });
}

void stream_row(void* to, const void* from, int64_t bytes) noexcept {
  float* out = static_cast<float*>(to);
  const float* in = static_cast<const float*>(from);
  for (int64_t i = 0; i < bytes / static_cast<int64_t>(sizeof(float)); i += kLanes) {
    stream(out + i, load(in + i));
  }
}

void fence() noexcept { stream_fence(); }

template <class T>
void scale_row(const void* x, const float* factors, float* out, int64_t width) noexcept {
  const T* in = static_cast<const T*>(x);
  for_lanes(width, [&](int64_t c, auto lanes) { lanes.put(out + c, lanes.get(in + c) * lanes.get(factors + c)); });
}

}  // namespace

extern const ep::Kernels ep_kernels = {
    {sum<float>, sum<bf16>, sum<f16>}, stream_row, fence, {scale_row<float>, scale_row<bf16>, scale_row<f16>}};

}  // namespace tidegate::TIDEGATE_ISA
