// y = n (1 + weight), n = x rstd, rstd = (mean x^2 + eps)^-1/2.
// Backward, e = dy (1 + weight): dx = rstd (e - n mean(e n)); dweight = sum dy n.
#include "ops/rms_norm/kernel.h"

#include "simd/row_sums.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using rms_norm::Args;
using rms_norm::kSumRows;

template <class T>
void fwd(const Args& a, int64_t first, int64_t last) noexcept {
  for_scaled_rows(
      first, last, static_cast<float>(a.width), a.eps,
      [&](int64_t r) { return sum_squares(row_of<const T>(a.x, r), a.width); },
      [&](int64_t r, float scale) {
        const T* x = row_of<const T>(a.x, r);
        T* y = row_of<T>(a.y, r);
        *row_of<float>(a.rstd, r) = scale;
        const F32 rstd = set1(scale);
        for_pairs(
            a.width,
            [&](int64_t c) {
              const F32x2 v = load2(x + c);
              const F32x2 scaled = {v.a * rstd * load(a.scale + c), v.b * rstd * load(a.scale + c + kLanes)};
              a.stream ? stream2(y + c, scaled) : store2(y + c, scaled);
            },
            [&](int64_t c, auto lanes) { lanes.put(y + c, lanes.get(x + c) * rstd * lanes.get(a.scale + c)); });
      });
  if (a.stream) {
    stream_fence();
  }
}

template <class T>
void bwd(const Args& a, int64_t first, int64_t last, float* scratch, double* sums) noexcept {
  for (int64_t r0 = first; r0 < last; r0 += kSumRows) {
    const int64_t r1 = r0 + kSumRows < last ? r0 + kSumRows : last;
    if (sums != nullptr) {
      memset(scratch, 0, static_cast<size_t>(a.width) * sizeof(float));
    }
    for (int64_t r = r0; r < r1; ++r) {
      const T* x = row_of<const T>(a.x, r);
      const T* dy = row_of<const T>(a.y, r);
      const F32 rstd = set1(*row_of<const float>(a.rstd, r));
      const float along = sum_lanes(a.width, [&](int64_t c, auto lanes) {
        const F32 term = lanes.get(dy + c) * (lanes.get(x + c) * rstd);
        if (sums != nullptr) {
          lanes.put(scratch + c, lanes.get(scratch + c) + term);
        }
        return term * lanes.get(a.scale + c);
      });
      if (a.dx.data == nullptr) {
        continue;
      }
      T* dx = row_of<T>(a.dx, r);
      const F32 mean = set1(along / static_cast<float>(a.width));
      for_lanes(a.width, [&](int64_t c, auto lanes) {
        const F32 n = lanes.get(x + c) * rstd;
        lanes.put(dx + c, rstd * (lanes.get(dy + c) * lanes.get(a.scale + c) - n * mean));
      });
    }
    for (int64_t c = 0; c < a.width && sums != nullptr; ++c) {
      sums[c] += static_cast<double>(scratch[c]);
    }
  }
}

template <class T>
void pack(float* scale, int64_t n) noexcept {
  pair_parameters<T>(scale, n);
}

}  // namespace

extern const rms_norm::Kernels rms_norm_kernels = {
    {fwd<float>, fwd<bf16>, fwd<f16>}, {bwd<float>, bwd<bf16>, bwd<f16>}, {pack<float>, pack<bf16>, pack<f16>}};

}  // namespace tidegate::TIDEGATE_ISA
