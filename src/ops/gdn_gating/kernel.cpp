// g = -rate softplus(a + dt_bias), beta = beta_scale sigmoid(b), and their gradients. One exponential serves both
// softplus and its slope.
#include "ops/gdn_gating/kernel.h"

#include "simd/lanes.h"
#include "simd/simd.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using gdn_gating::Args;
using gdn_gating::kSumBlock;

// softplus(x) and its derivative sigmoid(x).
struct Gate {
  F32 value, slope;
};
TIDEGATE_INLINE Gate gate(F32 x) {
  const F32 e = exp(zero() - abs(x));
  return {max(zero(), x) + log1p_unit(e), select(less(x, zero()), e, set1(1.0f)) / (set1(1.0f) + e)};
}

// The head parameters at element c of row r: a vector of neighbouring heads, or one head for the whole row.
struct Head {
  const float* rate;
  const float* dt_bias;
  bool one;
  Head(const Args& a, int64_t r) : rate(a.rate), dt_bias(a.dt_bias), one(a.head_major) {
    if (one) {
      rate += r % a.heads;
      dt_bias += r % a.heads;
    }
  }
  template <class Lanes>
  [[gnu::always_inline]] F32 get(const float* p, int64_t c, Lanes lanes) const {
    return one ? set1(*p) : lanes.get(p + c);
  }
};

template <int N, class T, class U, class Lanes>
TIDEGATE_INLINE void fwd_vectors(const Args& a, const Head& head, const T* pa, const T* pb, float* pg, U* pbeta,
                                 int64_t c, Lanes lanes) {
  F32 x[N];
  F32 s[N];
  for (int i = 0; i < N; ++i) {
    x[i] = lanes.get(pa + c + i * kLanes) + head.get(head.dt_bias, c + i * kLanes, lanes);
    s[i] = lanes.get(pb + c + i * kLanes);
  }
  softplus_group(x);
  gate_group<false>(s, pbeta);
  for (int i = 0; i < N; ++i) {
    const F32 rate = head.get(head.rate, c + i * kLanes, lanes);
    lanes.put(pg + c + i * kLanes, zero() - (a.finite_rates ? rate * x[i] : times_rate(rate, x[i])));
    lanes.put(pbeta + c + i * kLanes, set1(a.beta_scale) * s[i]);
  }
}

template <class T, class U>
void fwd(const Args& a, int64_t first, int64_t last) noexcept {
  for (int64_t r = first; r < last; ++r) {
    const T* pa = row_of<const T>(a.a, r);
    const T* pb = row_of<const T>(a.b, r);
    float* pg = row_of<float>(a.g, r);
    U* pbeta = row_of<U>(a.beta, r);
    const Head head(a, r);
    int64_t c = 0;
    for (; a.stream && c + 2 * kLanes <= a.width; c += 2 * kLanes) {
      fwd_vectors<2>(a, head, pa, pb, pg, pbeta, c, StreamedLanes{});
    }
    for (; c + 2 * kLanes <= a.width; c += 2 * kLanes) {
      fwd_vectors<2>(a, head, pa, pb, pg, pbeta, c, AllLanes{});
    }
    for_lanes(a.width - c, [&](int64_t i, auto lanes) { fwd_vectors<1>(a, head, pa, pb, pg, pbeta, c + i, lanes); });
  }
  if (a.stream) {
    stream_fence();
  }
}

// da, db of one vector; returns the terms of dA_log and ddt_bias.
struct Terms {
  F32 rate, bias;
};
template <class T, class U, class Lanes>
TIDEGATE_INLINE Terms bwd_vector(const Args& a, const Head& head, const T* pa, const T* pb, const float* pdg,
                                 const U* pdbeta, T* pda, T* pdb, int64_t c, Lanes lanes) {
  const F32 rate = head.get(head.rate, c, lanes);
  const F32 dg = lanes.get(pdg + c);
  const Gate s = gate(lanes.get(pa + c) + head.get(head.dt_bias, c, lanes));
  const F32 infinity = set1(__builtin_inff());
  // Where exp(A_log) overflows, g is 0 or a reset: neither moves with a or A_log.
  const F32 slope = select(equal(rate, infinity), zero(), rate * s.slope);
  const F32 finite = select(equal(rate * s.value, infinity), zero(), rate * s.value);
  const F32 decay = select(equal(rate, infinity), zero(), finite);
  const F32 da = zero() - dg * slope;
  if (pda != nullptr) {
    lanes.put(pda + c, da);
  }
  if (pdb != nullptr) {
    const F32 beta = sigmoid(lanes.get(pb + c));
    lanes.put(pdb + c, lanes.get(pdbeta + c) * set1(a.beta_scale) * beta * (set1(1.0f) - beta));
  }
  return {zero() - dg * decay, da};
}

template <class T, class U>
void bwd(const Args& a, int64_t first, int64_t last, double* sums) noexcept {
  // Token-major: this many columns at a time, so that their fp32 sums stay on the stack.
  constexpr int64_t kColumns = 128;
  for (int64_t r0 = first; r0 < last; r0 += a.head_major ? 1 : kSumBlock) {
    const int64_t r1 = a.head_major ? r0 + 1 : (r0 + kSumBlock < last ? r0 + kSumBlock : last);
    const int64_t step = a.head_major ? kSumBlock * kLanes : kColumns;
    for (int64_t c0 = 0; c0 < a.width; c0 += step) {
      const int64_t n = a.width - c0 < step ? a.width - c0 : step;
      float rate_sums[kColumns + kLanes] = {};
      float bias_sums[kColumns + kLanes] = {};
      for (int64_t r = r0; r < r1; ++r) {
        const Head head(a, r);
        const T* pa = row_of<const T>(a.a, r);
        const T* pb = row_of<const T>(a.b, r);
        const float* pdg = row_of<const float>(a.g, r);
        const U* pdbeta = row_of<const U>(a.beta, r);
        T* pda = a.da.data != nullptr ? row_of<T>(a.da, r) : nullptr;
        T* pdb = a.db.data != nullptr ? row_of<T>(a.db, r) : nullptr;
        for_lanes(n, [&](int64_t i, auto lanes) {
          const Terms t = bwd_vector(a, head, pa, pb, pdg, pdbeta, pda, pdb, c0 + i, lanes);
          const int64_t at = a.head_major ? 0 : i;  // head-major: every vector belongs to the same head
          lanes.put(rate_sums + at, lanes.get(rate_sums + at) + t.rate);
          lanes.put(bias_sums + at, lanes.get(bias_sums + at) + t.bias);
        });
      }
      for (int64_t i = 0; i < (a.head_major ? kLanes : n); ++i) {
        const int64_t h = a.head_major ? 0 : c0 + i;
        sums[h] += static_cast<double>(rate_sums[i]);
        sums[(a.head_major ? 1 : a.heads) + h] += static_cast<double>(bias_sums[i]);
      }
    }
  }
}

}  // namespace

#define TIDEGATE_PAIRS(fn, T) \
  { fn<T, float>, fn<T, bf16>, fn<T, f16> }
#define TIDEGATE_ENTRY(fn) \
  { TIDEGATE_PAIRS(fn, float), TIDEGATE_PAIRS(fn, bf16), TIDEGATE_PAIRS(fn, f16) }
extern const gdn_gating::Kernels gdn_gating_kernels = {TIDEGATE_ENTRY(fwd), TIDEGATE_ENTRY(bwd)};

}  // namespace tidegate::TIDEGATE_ISA
