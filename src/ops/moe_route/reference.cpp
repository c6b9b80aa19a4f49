// The router in plain loops: the definition, and the fp64 path of the operator.
#include "ops/moe_route/reference.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/element.h"

namespace tidegate::moe_route {
namespace {

template <class Acc>
std::vector<Acc> logits_of(const TensorView& logits, std::int64_t t, const MoeRouteOptions& options) {
  std::vector<Acc> z(static_cast<std::size_t>(logits.sizes[1]));
  for (std::size_t e = 0; e < z.size(); ++e) {
    const double value = read_element(logits, offset_of(logits, t, e));
    const DType type = options.logits_rounding.value_or(DType::kF64);
    const auto narrow = static_cast<float>(value);
    z[e] = static_cast<Acc>(type == DType::kBF16  ? widen(narrow_bf16(narrow))
                            : type == DType::kF16 ? widen(narrow_f16(narrow))
                            : type == DType::kF32 ? narrow
                                                  : value);
  }
  return z;
}

template <class Acc>
struct Softmax {
  std::vector<Acc> p, w;
};
template <class Acc>
Softmax<Acc> softmax(const std::vector<Acc>& z, const std::int32_t* chosen, std::int64_t k, bool renormalise) {
  Softmax<Acc> s{std::vector<Acc>(z.size()), std::vector<Acc>(static_cast<std::size_t>(k))};
  const Acc top = z.empty() ? Acc(0) : *std::max_element(z.begin(), z.end());
  Acc total = 0;
  for (std::size_t e = 0; e < z.size(); ++e) {
    s.p[e] = std::exp(z[e] - top);
    total += s.p[e];
  }
  for (Acc& p : s.p) {
    p /= total;
  }
  Acc chosen_top = -INFINITY;
  for (std::int64_t i = 0; i < k; ++i) {
    chosen_top = chosen[i] >= 0 ? std::max(chosen_top, z[static_cast<std::size_t>(chosen[i])]) : chosen_top;
  }
  Acc chosen_total = 0;
  for (std::int64_t i = 0; i < k; ++i) {
    Acc& w = s.w[static_cast<std::size_t>(i)];
    if (chosen[i] >= 0) {
      const auto e = static_cast<std::size_t>(chosen[i]);
      w = renormalise ? std::exp(z[e] - chosen_top) : s.p[e];
    }
    chosen_total += w;
  }
  for (Acc& w : s.w) {
    w = renormalise && chosen_total > 0 ? w / chosen_total : w;
  }
  return s;
}

}  // namespace

template <class Acc>
void reference_choose(const TensorView& logits, std::int64_t k, const MoeRouteOptions& options, std::int32_t* chosen) {
  for (std::int64_t t = 0; t < logits.sizes[0]; ++t) {
    std::vector<Acc> z = logits_of<Acc>(logits, t, options);
    for (std::int64_t i = 0; i < k; ++i) {
      const auto best = std::max_element(z.begin(), z.end());  // the first of equal ones
      chosen[t * k + i] = static_cast<std::int32_t>(best - z.begin());
      *best = -INFINITY;
    }
  }
}

template <class Acc>
void reference_weigh(const TensorView& logits, const std::int32_t* chosen, const TensorView& weights,
                     const TensorView& probs, const MoeRouteOptions& options) {
  const std::int64_t k = weights.sizes[1];
  for (std::int64_t t = 0; t < logits.sizes[0]; ++t) {
    const auto s = softmax(logits_of<Acc>(logits, t, options), chosen + t * k, k, options.renormalise);
    for (std::int64_t i = 0; i < k; ++i) {
      write_element(weights, offset_of(weights, t, i), s.w[static_cast<std::size_t>(i)]);
    }
    for (std::int64_t e = 0; probs.defined() && e < logits.sizes[1]; ++e) {
      write_element(probs, offset_of(probs, t, e), s.p[static_cast<std::size_t>(e)]);
    }
  }
}

template <class Acc>
void reference_bwd(const TensorView& dweights, const TensorView& dprobs, const TensorView& logits,
                   const std::int32_t* chosen, std::int64_t k, const TensorView& dlogits,
                   const MoeRouteOptions& options) {
  const auto experts = static_cast<std::size_t>(logits.sizes[1]);
  for (std::int64_t t = 0; t < logits.sizes[0]; ++t) {
    const std::int32_t* ids = chosen + t * k;
    const auto s = softmax(logits_of<Acc>(logits, t, options), ids, k, options.renormalise);
    std::vector<Acc> dp(experts), dz(experts), dw(static_cast<std::size_t>(k));
    for (std::size_t e = 0; dprobs.defined() && e < experts; ++e) {
      dp[e] = static_cast<Acc>(read_element(dprobs, offset_of(dprobs, t, e)));
    }
    Acc along_w = 0;
    for (std::size_t i = 0; i < dw.size(); ++i) {
      const bool used = dweights.defined() && ids[i] >= 0;
      dw[i] = used ? static_cast<Acc>(read_element(dweights, offset_of(dweights, t, i))) : Acc(0);
      along_w += s.w[i] * dw[i];
      if (used && !options.renormalise) {
        dp[static_cast<std::size_t>(ids[i])] += dw[i];
      }
    }
    Acc along_p = 0;
    for (std::size_t e = 0; e < experts; ++e) {
      along_p += s.p[e] * dp[e];
    }
    for (std::size_t e = 0; e < experts; ++e) {
      dz[e] = s.p[e] * (dp[e] - along_p);
    }
    for (std::size_t i = 0; i < dw.size() && options.renormalise; ++i) {
      if (ids[i] >= 0) {
        dz[static_cast<std::size_t>(ids[i])] += s.w[i] * (dw[i] - along_w);
      }
    }
    for (std::size_t e = 0; e < experts; ++e) {
      write_element(dlogits, offset_of(dlogits, t, e), dz[e]);
    }
  }
}

#define TIDEGATE_INSTANCES(Acc)                                                                                    \
  template void reference_choose<Acc>(const TensorView&, std::int64_t, const MoeRouteOptions&, std::int32_t*);     \
  template void reference_weigh<Acc>(const TensorView&, const std::int32_t*, const TensorView&, const TensorView&, \
                                     const MoeRouteOptions&);                                                      \
  template void reference_bwd<Acc>(const TensorView&, const TensorView&, const TensorView&, const std::int32_t*,   \
                                   std::int64_t, const TensorView&, const MoeRouteOptions&);
TIDEGATE_INSTANCES(float)
TIDEGATE_INSTANCES(double)

}  // namespace tidegate::moe_route
