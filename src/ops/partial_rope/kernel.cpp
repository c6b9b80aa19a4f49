// y_i = x_i cos_i - x_j sin_i, y_j = x_j cos_j + x_i sin_j, j = i + R/2. Backward: the transposed rotation,
// dx_i = dy_i cos_i + dy_j sin_j, dx_j = dy_j cos_j - dy_i sin_i. hf rounds each product and their sum.
#include "ops/partial_rope/kernel.h"

#include "simd/lanes.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using partial_rope::Args;

template <bool kHf, bool kTranspose, class T, class U>
void rotate(const T* x, T* y, const U* cos, const U* sin, int64_t half) {
  const auto product = [&](F32 a, F32 b) { return kHf ? round_to(a * b, x) : a * b; };
  for_lanes(half, [&](int64_t i, auto lanes) {
    const F32 xi = lanes.get(x + i);
    const F32 xj = lanes.get(x + half + i);
    const F32 si = lanes.get(sin + (kTranspose ? half : 0) + i);
    const F32 sj = lanes.get(sin + (kTranspose ? 0 : half) + i);
    const F32 own_i = product(xi, lanes.get(cos + i));
    const F32 own_j = product(xj, lanes.get(cos + half + i));
    const F32 other_i = product(xj, si);
    const F32 other_j = product(xi, sj);
    lanes.put(y + i, kTranspose ? own_i + other_i : own_i - other_i);
    lanes.put(y + half + i, kTranspose ? own_j - other_j : own_j + other_j);
  });
}

template <class T, class U>
void run(const Args& a, int64_t first, int64_t last) noexcept {
  const auto turn = a.hf ? (a.transpose ? rotate<true, true, T, U> : rotate<true, false, T, U>)
                         : (a.transpose ? rotate<false, true, T, U> : rotate<false, false, T, U>);
  for (int64_t r = first; r < last; ++r) {
    const int64_t token = r / a.per_token % a.tokens;
    const int64_t row = r / a.per_row;
    const T* x = row_of<const T>(a.x, r);
    T* y = row_of<T>(a.y, r);
    turn(x, y, static_cast<const U*>(a.cos) + row * a.cos_row + token * a.cos_token,
         static_cast<const U*>(a.sin) + row * a.sin_row + token * a.sin_token, a.rotary / 2);
    if (a.copy && a.width > a.rotary) {
      memcpy(y + a.rotary, x + a.rotary, static_cast<size_t>(a.width - a.rotary) * sizeof(T));
    }
  }
}

}  // namespace

#define TIDEGATE_PAIRS(T) \
  { run<T, float>, run<T, bf16>, run<T, f16> }
extern const partial_rope::Kernels partial_rope_kernels = {
    {TIDEGATE_PAIRS(float), TIDEGATE_PAIRS(bf16), TIDEGATE_PAIRS(f16)}};

}  // namespace tidegate::TIDEGATE_ISA
