// Problems, runs and comparisons that the tests of the backward share.
#pragma once

#include <cmath>
#include <string>

#include "ops/chunk_gated_delta_rule/test_case.h"
#include "toolkit.h"

namespace tidegate::test {

// Gradients that come in, and the parameters of gates that are formed inside.
struct Training {
  Rule rule;
  Tensor d_o, dfinal;
  Tensor A_log, dt_bias;
};

inline Training make_training(Random& random, const RuleCase& c) {
  Training t{make_rule(random, c), {}, {}, {}, {}};
  t.d_o = normal(random, c.dtype, c.heads(c.HK * c.G, c.V), c.form);
  t.dfinal = normal(random, DType::kF32, c.states(c.seq().count()), {}, 0.3);
  return t;
}

// Raw projections instead of unit rows and gates: norms, gating and beta formed inside.
inline Training make_raw_training(Random& random, const RuleCase& c) {
  Training t = make_training(random, c);
  t.rule.q = normal(random, c.dtype, t.rule.q.sizes(), {}, 3.0);
  t.rule.k = normal(random, c.dtype, t.rule.k.sizes(), {}, 0.2);
  t.rule.g = normal(random, c.dtype, t.rule.g.sizes());
  t.rule.beta = normal(random, c.dtype, t.rule.beta.sizes());
  t.A_log = uniform(random, DType::kF32, {c.HK * c.G}, -4.0, 1.0);
  t.dt_bias = normal(random, DType::kF32, {c.HK * c.G});
  t.rule.options.use_qk_l2norm = true;
  t.rule.options.beta_sigmoid = true;
  t.rule.options.beta_scale = 2.0;
  return t;
}

struct GradientResult {
  Tensor dq, dk, dv, dg, dbeta, dh0, dA_log, ddt_bias;
  std::vector<std::pair<std::string, const Tensor*>> all() const {
    return {{"dq", &dq},       {"dk", &dk},   {"dv", &dv},         {"dg", &dg},
            {"dbeta", &dbeta}, {"dh0", &dh0}, {"dA_log", &dA_log}, {"ddt_bias", &ddt_bias}};
  }
};

inline ChunkGatedDeltaRuleOptions options_of(const Training& t) {
  ChunkGatedDeltaRuleOptions o = t.rule.options;
  o.A_log = t.A_log;
  o.dt_bias = t.dt_bias;
  return o;
}

inline GradientResult empty_gradients(const Training& t) {
  const Rule& r = t.rule;
  const DType wide = r.c.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  GradientResult d;
  d.dq = like(r.q, r.c.dtype, r.c.form);
  d.dk = like(r.k, r.c.dtype, r.c.form);
  d.dv = like(r.v, r.c.dtype, r.c.form);
  d.dg = like(r.g, wide);
  d.dbeta = like(r.beta, wide);
  if (r.h0.defined()) {
    d.dh0 = like(r.h0, wide);
  }
  if (t.A_log.defined()) {
    d.dA_log = Tensor(wide, {r.c.HK * r.c.G});
    d.ddt_bias = Tensor(wide, {r.c.HK * r.c.G});
  }
  return d;
}

inline ChunkGatedDeltaRuleGradients views(const GradientResult& d) {
  return {d.dq, d.dk, d.dv, d.dg, d.dbeta, d.dh0, d.dA_log, d.ddt_bias};
}

// The states that the forward leaves for the backward.
inline Tensor states_for(const Training& t) {
  const auto points = saved_states(t.rule.c.seq());
  Rule r = t.rule;
  r.options = options_of(t);
  r.options.state_v_first = false;
  r.options.snapshot_at = points;
  return points.empty() ? Tensor(r.c.dtype == DType::kF64 ? DType::kF64 : DType::kF32, r.c.states(0))
                        : forward(r).snapshots;
}

inline GradientResult backward(const Training& t, const Tensor& states = {}) {
  GradientResult d = empty_gradients(t);
  const Rule& r = t.rule;
  chunk_gated_delta_rule_bwd(t.d_o, t.dfinal, r.q, r.k, r.v, r.g, r.beta, r.h0, states, views(d), r.c.seq(),
                             options_of(t));
  return d;
}

inline Training wide(const Training& t) {
  return {wide(t.rule), wide(t.d_o), wide(t.dfinal), wide(t.A_log), wide(t.dt_bias)};
}

// Rms error relative to the rms of the truth, or to `floor` where that is larger; also no element further away than 30
// times the bound of the largest one, so that a wrong corner cannot hide.
inline double expect_close(const std::string& name, const TensorView& got, const TensorView& truth, double bound,
                           double floor = 0.0) {
  const std::vector<double> x = values(got), y = values(truth);
  double error = 0.0, norm = floor * floor * static_cast<double>(x.size()), worst = 0.0, largest = floor;
  double squares = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double e = x[i] - y[i];
    error += e * e;
    squares += y[i] * y[i];
    worst = std::isnan(e) ? INFINITY : std::max(worst, std::abs(e));
    largest = std::max(largest, std::abs(y[i]));
  }
  norm = std::max(norm, squares);
  const double relative = norm == 0.0 ? std::sqrt(error) : std::sqrt(error / norm);
  EXPECT_LE(relative, bound) << name;
  EXPECT_LE(worst, 30.0 * bound * largest) << name;
  return relative;
}

// What storing does to perfect values.
inline double rounding_error(const Tensor& truth, DType dtype) {
  double error = 0.0, norm = 0.0;
  const Tensor stored = converted(truth, dtype);
  for (std::int64_t i = 0; i < truth.view().numel(); ++i) {
    error += std::pow(stored.get(i) - truth.get(i), 2);
    norm += std::pow(truth.get(i), 2);
  }
  return norm == 0.0 ? 0.0 : std::sqrt(error / norm);
}

// 3e-6 before rounding, for every gradient; dq, dk and dv are stored in the type of the data.
inline void expect_gradients(const std::string& name, const GradientResult& got, const GradientResult& truth,
                             DType dtype, double bound = 3e-6, double floor = 0.0) {
  const auto mine = got.all(), theirs = truth.all();
  for (std::size_t i = 0; i < mine.size(); ++i) {
    if (mine[i].second->defined()) {
      const double e = expect_close(name + " " + mine[i].first, *mine[i].second, *theirs[i].second,
                                    bound + (i < 3 ? rounding_error(*theirs[i].second, dtype) : 0.0), floor);
      testing::Test::RecordProperty(name + "_" + mine[i].first, std::to_string(e));
      EXPECT_TRUE(mine[i].second->gaps_untouched()) << name;
    }
  }
}

}  // namespace tidegate::test
