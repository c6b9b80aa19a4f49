// A gate problem of the tests: the numbers that describe it, its tensors, and the calls on them.
#pragma once

#include <algorithm>
#include <cmath>

#include "ops/gdn_gating/problem.h"
#include "tidegate/gating.h"
#include "toolkit.h"

namespace tidegate::test {

struct GatingCase {
  std::int64_t B = 1, T = 1, H = 1;
  DType dtype = DType::kF32;
  DType beta_type = DType::kF32;
  Layout layout = Layout::kBSND;
  bool dt_bias = true;
  double beta_scale = 1.0;
  Form form = {};

  Sizes sizes() const {
    Sizes s = is_head_major(layout) ? Sizes{H, T} : Sizes{T, H};
    s.insert(s.begin(), has_batch(layout) ? 1 : 0, B);
    return s;
  }
  GdnGatingOptions options() const { return {beta_scale, layout}; }
  gdn_gating::Problem problem() const { return {has_batch(layout) ? B : 1, T, H, is_head_major(layout)}; }
  DType sum_type() const { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }
};

struct Gating {
  GatingCase c;
  Tensor a, b, A_log, dt_bias, dg, dbeta;
};
struct GatingForward {
  Tensor g, beta;
};
struct GatingBackward {
  Tensor da, db, dA_log, ddt_bias;
};

// Rates from 0.01 to 16, as in the models.
inline Gating make_gating(Random& random, const GatingCase& c) {
  Gating v;
  v.c = c;
  v.a = normal(random, c.dtype, c.sizes(), c.form, 2.0);
  v.b = normal(random, c.dtype, c.sizes(), c.form, 2.0);
  v.A_log = uniform(random, DType::kF32, {c.H}, std::log(0.01), std::log(16.0));
  if (c.dt_bias) v.dt_bias = normal(random, c.dtype, {c.H});
  v.dg = normal(random, c.sum_type(), c.sizes(), c.form);
  v.dbeta = normal(random, c.beta_type, c.sizes(), c.form);
  return v;
}

inline Gating wide(const Gating& v) {
  Gating w{v.c, wide(v.a), wide(v.b), wide(v.A_log), wide(v.dt_bias), wide(v.dg), wide(v.dbeta)};
  w.c.form = {};
  w.c.dtype = DType::kF64;
  w.c.beta_type = DType::kF64;
  return w;
}

inline GatingForward outputs_of(const Gating& v) {
  return {Tensor(v.c.sum_type(), v.c.sizes(), v.c.form), Tensor(v.c.beta_type, v.c.sizes(), v.c.form)};
}
inline void run_forward(const Gating& v, const GatingForward& out) {
  gdn_gating_fwd(v.a, v.b, v.A_log, v.dt_bias, out.g, out.beta, v.c.options());
}
inline GatingForward forward(const Gating& v) {
  GatingForward out = outputs_of(v);
  run_forward(v, out);
  return out;
}
// Plain loops in fp32 on the same types.
inline GatingForward plain_forward(const Gating& v) {
  GatingForward out = outputs_of(v);
  gdn_gating::reference_fwd<float>(v.c.problem(), v.a, v.b, v.A_log, v.dt_bias, out.g, out.beta, v.c.beta_scale);
  return out;
}

inline GatingBackward gradients_of(const Gating& v) {
  return {Tensor(v.c.dtype, v.c.sizes(), v.c.form), Tensor(v.c.dtype, v.c.sizes(), v.c.form),
          Tensor(v.c.sum_type(), {v.c.H}), Tensor(v.c.sum_type(), {v.c.H})};
}
inline void run_backward(const Gating& v, const GatingBackward& out) {
  gdn_gating_bwd(v.dg, v.dbeta, v.a, v.b, v.A_log, v.dt_bias, out.da, out.db, out.dA_log, out.ddt_bias, v.c.options());
}
inline GatingBackward backward(const Gating& v) {
  GatingBackward out = gradients_of(v);
  run_backward(v, out);
  return out;
}
inline GatingBackward plain_backward(const Gating& v) {
  GatingBackward out = gradients_of(v);
  std::vector<double> unused(static_cast<std::size_t>(2 * v.c.H), 0.0);  // the reference adds in fp64 always
  gdn_gating::reference_bwd<float>(v.c.problem(), v.dg, v.dbeta, v.a, v.b, v.A_log, v.dt_bias, out.da, out.db,
                                   unused.data(), v.c.beta_scale);
  std::vector<float> sums(unused.size(), 0.0f);
  for (std::int64_t i = 0; i < v.a.view().numel(); ++i) {
    const std::int64_t h = is_head_major(v.c.layout) ? i / v.c.T % v.c.H : i % v.c.H;
    const float rate = std::exp(static_cast<float>(v.A_log.get(h)));
    const float x = static_cast<float>(v.a.get(i)) + (v.c.dt_bias ? static_cast<float>(v.dt_bias.get(h)) : 0.0f);
    const float e = std::exp(-std::abs(x));
    const float dg = static_cast<float>(v.dg.get(i));
    sums[static_cast<std::size_t>(h)] -= dg * (rate * (std::max(x, 0.0f) + std::log1p(e)));
    sums[static_cast<std::size_t>(v.c.H + h)] -= dg * (rate * ((x < 0.0f ? e : 1.0f) / (1.0f + e)));
  }
  out.dA_log.fill([&](std::int64_t h) { return sums[static_cast<std::size_t>(h)]; });
  out.ddt_bias.fill([&](std::int64_t h) { return sums[static_cast<std::size_t>(v.c.H + h)]; });
  return out;
}

}  // namespace tidegate::test
