// y = x rstd, rstd = (sum x^2 + eps)^-1/2;  dx = rstd (dy - n <dy, n>), n = x rstd.
#include "ops/l2norm/kernel.h"

#include "simd/row_sums.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using l2norm::Args;

// y = x * scale. Equal types can go two vectors at a time; another type needs the elements in memory order.
template <class T>
TIDEGATE_INLINE void scale_row(const T* x, T* y, F32 scale, int64_t n, bool streamed) {
  for_pairs(
      n,
      [&](int64_t c) {
        const F32x2 v = load2(x + c);
        const F32x2 scaled = {v.a * scale, v.b * scale};
        streamed ? stream2(y + c, scaled) : store2(y + c, scaled);
      },
      [&](int64_t c, auto lanes) { lanes.put(y + c, lanes.get(x + c) * scale); });
}
template <class T, class U>
TIDEGATE_INLINE void scale_row(const T* x, U* y, F32 scale, int64_t n, bool) {
  for_lanes(n, [&](int64_t c, auto lanes) { lanes.put(y + c, lanes.get(x + c) * scale); });
}

template <class T, class U>
void fwd(const Args& a, int64_t first, int64_t last) noexcept {
  for_scaled_rows(
      first, last, 1.0f, a.eps, [&](int64_t r) { return sum_squares(row_of<const T>(a.x, r), a.width); },
      [&](int64_t r, float rstd) {
        *row_of<float>(a.rstd, r) = rstd;
        scale_row(row_of<const T>(a.x, r), row_of<U>(a.y, r), set1(rstd), a.width, a.stream);
      });
  if (a.stream) {
    stream_fence();
  }
}

template <class T, class U>
void bwd(const Args& a, int64_t first, int64_t last) noexcept {
  for (int64_t r = first; r < last; ++r) {
    const T* x = row_of<const T>(a.x, r);
    const U* dy = row_of<const U>(a.y, r);
    T* dx = row_of<T>(a.dx, r);
    const F32 rstd = set1(*row_of<const float>(a.rstd, r));
    if (a.zero_row_safe && all_zero(x, a.width)) {
      for_lanes(a.width, [&](int64_t c, auto lanes) { lanes.put(dx + c, zero()); });
      continue;
    }
    const F32 along =
        set1(sum_lanes(a.width, [&](int64_t c, auto lanes) { return lanes.get(dy + c) * (lanes.get(x + c) * rstd); }));
    for_lanes(a.width, [&](int64_t c, auto lanes) {
      const F32 n = lanes.get(x + c) * rstd;
      lanes.put(dx + c, rstd * (lanes.get(dy + c) - n * along));
    });
  }
}

}  // namespace

#define TIDEGATE_PAIRS(fn, T) \
  { fn<T, float>, fn<T, bf16>, fn<T, f16> }
#define TIDEGATE_ENTRY(fn) \
  { TIDEGATE_PAIRS(fn, float), TIDEGATE_PAIRS(fn, bf16), TIDEGATE_PAIRS(fn, f16) }
extern const l2norm::Kernels l2norm_kernels = {TIDEGATE_ENTRY(fwd), TIDEGATE_ENTRY(bwd)};

}  // namespace tidegate::TIDEGATE_ISA
