// The gates in plain loops: the definition, and the fp64 path of the operator.
#include <cmath>

#include "base/element.h"
#include "ops/gdn_gating/problem.h"

namespace tidegate::gdn_gating {
namespace {

template <class Acc>
Acc sigmoid(Acc x) {
  const Acc e = std::exp(-std::abs(x));
  return (x < 0 ? e : Acc(1)) / (1 + e);
}
template <class Acc>
Acc softplus(Acc x) {
  return std::max(x, Acc(0)) + std::log1p(std::exp(-std::abs(x)));
}
template <class Acc>
Acc times_rate(Acc rate, Acc value) {
  return value == 0 && std::isinf(rate) ? Acc(0) : rate * value;
}

// Calls f(row, t, h) for every token and head.
template <class F>
void for_each(const Problem& p, F f) {
  for (std::int64_t row = 0; row < p.rows; ++row) {
    for (std::int64_t t = 0; t < p.tokens; ++t) {
      for (std::int64_t h = 0; h < p.heads; ++h) {
        f(row, t, h);
      }
    }
  }
}

std::int64_t at(const Problem& p, const TensorView& v, std::int64_t row, std::int64_t t, std::int64_t h) {
  const std::int64_t inner = p.head_major ? h * v.stride(-2) + t * v.stride(-1) : t * v.stride(-2) + h * v.stride(-1);
  return inner + (v.rank == 3 ? row * v.stride(0) : 0);
}

template <class Acc>
Acc parameter(const TensorView& v, std::int64_t h) {
  return v.defined() ? static_cast<Acc>(read_element(v, h * v.strides[0])) : Acc(0);
}

}  // namespace

template <class Acc>
void reference_fwd(const Problem& p, const TensorView& a, const TensorView& b, const TensorView& A_log,
                   const TensorView& dt_bias, const TensorView& g, const TensorView& beta, double beta_scale) {
  for_each(p, [&](std::int64_t row, std::int64_t t, std::int64_t h) {
    const Acc rate = std::exp(parameter<Acc>(A_log, h));
    const Acc x = static_cast<Acc>(read_element(a, at(p, a, row, t, h))) + parameter<Acc>(dt_bias, h);
    write_element(g, at(p, g, row, t, h), -times_rate(rate, softplus(x)));
    const Acc s = sigmoid(static_cast<Acc>(read_element(b, at(p, b, row, t, h))));
    write_element(beta, at(p, beta, row, t, h), static_cast<Acc>(beta_scale) * s);
  });
}

template <class Acc>
void reference_bwd(const Problem& p, const TensorView& dg, const TensorView& dbeta, const TensorView& a,
                   const TensorView& b, const TensorView& A_log, const TensorView& dt_bias, const TensorView& da,
                   const TensorView& db, double* sums, double beta_scale) {
  for_each(p, [&](std::int64_t row, std::int64_t t, std::int64_t h) {
    const Acc rate = std::exp(parameter<Acc>(A_log, h));
    const Acc x = static_cast<Acc>(read_element(a, at(p, a, row, t, h))) + parameter<Acc>(dt_bias, h);
    const Acc grad = static_cast<Acc>(read_element(dg, at(p, dg, row, t, h)));
    const Acc dx = std::isinf(rate) ? Acc(0) : -grad * rate * sigmoid(x);
    const Acc decay = rate * softplus(x);
    if (da.defined()) {
      write_element(da, at(p, da, row, t, h), dx);
    }
    if (db.defined()) {
      const Acc s = sigmoid(static_cast<Acc>(read_element(b, at(p, b, row, t, h))));
      const Acc in = static_cast<Acc>(read_element(dbeta, at(p, dbeta, row, t, h)));
      write_element(db, at(p, db, row, t, h), in * static_cast<Acc>(beta_scale) * s * (1 - s));
    }
    sums[h] += std::isinf(rate) || std::isinf(decay) ? Acc(0) : -grad * decay;
    sums[p.heads + h] += dx;
  });
}

template void reference_fwd<double>(const Problem&, const TensorView&, const TensorView&, const TensorView&,
                                    const TensorView&, const TensorView&, const TensorView&, double);
template void reference_fwd<float>(const Problem&, const TensorView&, const TensorView&, const TensorView&,
                                   const TensorView&, const TensorView&, const TensorView&, double);
template void reference_bwd<double>(const Problem&, const TensorView&, const TensorView&, const TensorView&,
                                    const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                                    const TensorView&, double*, double);
template void reference_bwd<float>(const Problem&, const TensorView&, const TensorView&, const TensorView&,
                                   const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                                   const TensorView&, double*, double);

}  // namespace tidegate::gdn_gating
