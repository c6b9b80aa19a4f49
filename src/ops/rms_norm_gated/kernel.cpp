// y = weight n act(z), n = x rstd, rstd = (mean x^2 + eps)^-1/2.
// Backward, e = dy weight act(z): dx = rstd (e - n mean(e n)); dz = dy weight n act'(z); dweight = sum dy n act(z).
#include "ops/rms_norm_gated/kernel.h"

#include "simd/row_sums.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using rms_norm_gated::Args;
using rms_norm_gated::kSumRows;

// weight * (x rstd), rounded as the mode says. V: F32 or F32x2.
template <bool kHf, class V, class T>
TIDEGATE_INLINE V weighted(const Args& a, V x, V rstd, V weight, const T* type) {
  V n = x * rstd;
  if (kHf) {
    n = round_to(n, type);
  }
  n = n * weight;
  return kHf && a.round_product ? round_to(n, type) : n;
}

// hf mode promises Transformers' bits, so its gate takes the more accurate of the two 16-bit forms.
template <bool kHf, class T>
struct Gate {
  using Type = T;
};
template <>
struct Gate<true, bf16> {
  using Type = f16;
};

// kPairs groups of 2 * kLanes channels: their gates are computed together.
template <int kPairs, bool kHf, bool kSigmoid, class T>
TIDEGATE_INLINE void fwd_group(const Args& a, const T* x, const T* z, T* y, F32 rstd, int64_t c) {
  F32 gate[2 * kPairs];
  for (int i = 0; i < kPairs; ++i) {
    const F32x2 v = load2(z + c + i * 2 * kLanes);
    gate[2 * i] = v.a;
    gate[2 * i + 1] = v.b;
  }
  gate_group<!kSigmoid>(gate, static_cast<const typename Gate<kHf, T>::Type*>(nullptr));
  for (int i = 0; i < kPairs; ++i) {
    const int64_t at = c + i * 2 * kLanes;
    const F32x2 weight = {load(a.weight + at), load(a.weight + at + kLanes)};
    const F32x2 out =
        weighted<kHf>(a, load2(x + at), F32x2{rstd, rstd}, weight, x) * F32x2{gate[2 * i], gate[2 * i + 1]};
    a.stream ? stream2(y + at, out) : store2(y + at, out);
  }
}

template <bool kHf, bool kSigmoid, class T, class Lanes>
TIDEGATE_INLINE void fwd_vector(const Args& a, const T* x, const T* z, T* y, F32 rstd, int64_t c, Lanes lanes) {
  F32 gate[1] = {lanes.get(z + c)};
  gate_group<!kSigmoid>(gate, static_cast<const typename Gate<kHf, T>::Type*>(nullptr));
  lanes.put(y + c, weighted<kHf>(a, lanes.get(x + c), rstd, lanes.get(a.weight + c), x) * gate[0]);
}

template <bool kHf, bool kSigmoid, class T>
TIDEGATE_INLINE void fwd_row(const Args& a, int64_t r, float scale) {
  const T* x = row_of<const T>(a.x, r);
  const T* z = row_of<const T>(a.z, r);
  T* y = row_of<T>(a.y, r);
  const F32 rstd = set1(scale);
  int64_t c = 0;
  for (; c + 4 * kLanes <= a.width; c += 4 * kLanes) {
    fwd_group<2, kHf, kSigmoid>(a, x, z, y, rstd, c);
  }
  for_pairs(
      a.width - c, [&](int64_t i) { fwd_group<1, kHf, kSigmoid>(a, x, z, y, rstd, c + i); },
      [&](int64_t i, auto lanes) { fwd_vector<kHf, kSigmoid>(a, x, z, y, rstd, c + i, lanes); });
}

template <bool kHf, bool kSigmoid, class T>
void fwd_rows(const Args& a, int64_t first, int64_t last) {
  for_scaled_rows(
      first, last, static_cast<float>(a.width), a.eps,
      [&](int64_t r) { return sum_squares(row_of<const T>(a.x, r), a.width); },
      [&](int64_t r, float rstd) {
        *row_of<float>(a.rstd, r) = rstd;
        fwd_row<kHf, kSigmoid, T>(a, r, rstd);
      });
  if (a.stream) {
    stream_fence();
  }
}

template <class T>
void fwd(const Args& a, int64_t first, int64_t last) noexcept {
  const auto run = a.hf ? (a.sigmoid ? fwd_rows<true, true, T> : fwd_rows<true, false, T>)
                        : (a.sigmoid ? fwd_rows<false, true, T> : fwd_rows<false, false, T>);
  run(a, first, last);
}

template <bool kSigmoid, class T>
void bwd_row(const Args& a, int64_t r, float* e_row, float* dweight) {
  const T* x = row_of<const T>(a.x, r);
  const T* z = row_of<const T>(a.z, r);
  const T* dy = row_of<const T>(a.y, r);
  T* dx = a.dx.data != nullptr ? row_of<T>(a.dx, r) : nullptr;
  T* dz = a.dz.data != nullptr ? row_of<T>(a.dz, r) : nullptr;
  const F32 rstd = set1(*row_of<const float>(a.rstd, r));
  const float along = sum_lanes(a.width, [&](int64_t c, auto lanes) {
    const F32 n = lanes.get(x + c) * rstd;
    const F32 gate = lanes.get(z + c);
    const F32 s = sigmoid(gate);
    const F32 act = kSigmoid ? s : gate * s;
    const F32 slope = kSigmoid ? s * (set1(1.0f) - s) : silu_slope(gate, s);
    const F32 grad = lanes.get(dy + c);
    const F32 weighted = grad * lanes.get(a.weight + c);
    const F32 e = weighted * act;
    lanes.put(e_row + c, e);
    if (dz != nullptr) {
      lanes.put(dz + c, weighted * n * slope);
    }
    if (a.want_dweight) {
      lanes.put(dweight + c, fma(grad * n, act, lanes.get(dweight + c)));
    }
    return e * n;
  });
  if (dx != nullptr) {
    const F32 mean = set1(along / static_cast<float>(a.width));
    for_lanes(a.width, [&](int64_t c, auto lanes) {
      const F32 n = lanes.get(x + c) * rstd;
      lanes.put(dx + c, rstd * (lanes.get(e_row + c) - n * mean));
    });
  }
}

template <class T>
void bwd(const Args& a, int64_t first, int64_t last, float* scratch, double* sums) noexcept {
  float* dweight = scratch + a.width;
  for (int64_t r0 = first; r0 < last; r0 += kSumRows) {
    const int64_t r1 = r0 + kSumRows < last ? r0 + kSumRows : last;
    memset(dweight, 0, static_cast<size_t>(a.width) * sizeof(float));
    for (int64_t r = r0; r < r1; ++r) {
      (a.sigmoid ? bwd_row<true, T> : bwd_row<false, T>)(a, r, scratch, dweight);
    }
    for (int64_t c = 0; c < a.width; ++c) {
      sums[c] += static_cast<double>(dweight[c]);
    }
  }
}

template <class T>
void pack(float* weight, int64_t n) noexcept {
  pair_parameters<T>(weight, n);
}

}  // namespace

extern const rms_norm_gated::Kernels rms_norm_gated_kernels = {
    {fwd<float>, fwd<bf16>, fwd<f16>}, {bwd<float>, bwd<bf16>, bwd<f16>}, {pack<float>, pack<bf16>, pack<f16>}};

}  // namespace tidegate::TIDEGATE_ISA
