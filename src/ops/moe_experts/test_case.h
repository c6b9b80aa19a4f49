// Problems for the tests of the experts.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "ops/moe_experts/reference.h"
#include "toolkit.h"

namespace tidegate::test {

struct Experts {
  std::int64_t T = 0, H = 0, I = 0, E = 0, k = 0;
  std::int64_t J = 0;  // width of the shared expert; 0: there is none
  DType dtype = DType::kF32;
  DType weight_type = DType::kF32;
  bool turned = false;  // weights [E,K,N] in memory, and called so
  MoeExpertsOptions options{};
  std::int64_t only = -1;  // all pairs go to this expert
  std::int64_t gap = 0;    // elements between rows: odd addresses
  std::int64_t rank = 0;   // of the low-rank additions; 0: there are none
};

struct ExpertsCase {
  Experts c;
  Tensor x, ids, weights, gate_up, down, dout;
  Tensor shared_gate, shared_up, shared_down, shared_router;
  Tensor lora[4];  // a and b of gate_up, of down
  // Memory is turned; the view is what the options say.
  TensorView weight(const Tensor& t) const {
    return c.options.weight_axes == WeightAxes::kKN ? exchanged(t, 1, 2) : t.view();
  }
  MoeExpertsInputs inputs() const {
    return {x,           ids,           weights, weight(gate_up), weight(down), shared_gate, shared_up,
            shared_down, shared_router, lora[0], lora[1],         lora[2],      lora[3]};
  }
  std::vector<std::int32_t> id_list() const {
    const auto* p = ids.view().as<const std::int32_t>();
    return {p, p + ids.view().numel()};
  }
};

inline Form weight_form(const Experts& c) { return c.turned ? permuted({0, 2, 1}, c.gap) : padded(c.gap); }

inline ExpertsCase make_experts(Random& random, const Experts& c) {
  ExpertsCase e;
  e.c = c;
  e.x = normal(random, c.dtype, {c.T, c.H}, padded(c.gap));
  e.dout = normal(random, c.dtype, {c.T, c.H}, padded(c.gap));
  e.ids = Tensor(DType::kI32, {c.T, c.k});
  for (std::int64_t i = 0; i < c.T * c.k; ++i) {
    const std::int64_t id = c.only >= 0 ? c.only : random.integer(i % 5 == 0 ? -1 : 0, c.E - 1);
    e.ids.view().as<std::int32_t>()[i] = static_cast<std::int32_t>(id);
  }
  e.weights = uniform(random, DType::kF32, {c.T, c.k}, 0.0, 1.0);
  const double scale = 1.0 / std::sqrt(static_cast<double>(std::max<std::int64_t>(c.H, 1)));
  const double inner = 1.0 / std::sqrt(static_cast<double>(std::max<std::int64_t>(c.I, 1)));
  e.gate_up = normal(random, c.weight_type, {c.E, 2 * c.I, c.H}, weight_form(c), scale);
  e.down = normal(random, c.weight_type, {c.E, c.H, c.I}, weight_form(c), inner);
  if (c.J > 0) {
    e.shared_gate = normal(random, c.weight_type, {c.J, c.H}, padded(c.gap), scale);
    e.shared_up = normal(random, c.weight_type, {c.J, c.H}, {}, scale);
    e.shared_down = normal(random, c.weight_type, {c.H, c.J}, {}, inner);
    e.shared_router = normal(random, c.weight_type, {c.H}, {}, scale);
  }
  if (c.rank > 0) {
    const double narrow = 1.0 / std::sqrt(static_cast<double>(c.rank));
    e.lora[0] = normal(random, c.weight_type, {c.E, c.rank, c.H}, padded(c.gap), scale);
    e.lora[1] = normal(random, c.weight_type, {c.E, 2 * c.I, c.rank},
                       c.options.interleaved ? Form{} : permuted({0, 2, 1}), narrow);
    e.lora[2] = normal(random, c.weight_type, {c.E, c.rank, c.I}, {}, inner);
    e.lora[3] = normal(random, c.weight_type, {c.E, c.H, c.rank}, {}, narrow);
    e.c.options.gate_up_lora_scale = 0.75;
    e.c.options.down_lora_scale = -1.5;
  }
  return e;
}
inline ExpertsCase wide(const ExpertsCase& e) {
  ExpertsCase w = e;
  for (Tensor* t : {&w.x, &w.weights, &w.gate_up, &w.down, &w.dout, &w.shared_gate, &w.shared_up, &w.shared_down,
                    &w.shared_router, &w.lora[0], &w.lora[1], &w.lora[2], &w.lora[3]}) {
    *t = wide(*t);
  }
  w.c.dtype = w.c.weight_type = DType::kF64;
  w.c.turned = false;
  return w;
}

inline Tensor forward(const ExpertsCase& e) {
  Tensor out = like(e.x);
  moe_experts_fwd(e.inputs(), out, e.c.options);
  return out;
}
inline Tensor plain_forward(const ExpertsCase& e) {
  Tensor out = like(e.x);
  moe_experts::reference_fwd<float>(e.inputs(), e.id_list().data(), out, e.c.options);
  return out;
}

constexpr int kGradients = 12;
constexpr const char* kGradientNames[kGradients] = {
    "dx",           "dweights",       "dgate_up",        "ddown",           "dshared_gate", "dshared_up",
    "dshared_down", "dshared_router", "dgate_up_lora_a", "dgate_up_lora_b", "ddown_lora_a", "ddown_lora_b"};
struct ExpertsGradients {
  Tensor g[kGradients];
  bool has(int i) const { return g[i].defined(); }
  MoeExpertsGradients views(const ExpertsCase& e) const {
    return {g[0], g[1], e.weight(g[2]), e.weight(g[3]), g[4], g[5], g[6], g[7], g[8], g[9], g[10], g[11]};
  }
};
inline ExpertsGradients empty_gradients(const ExpertsCase& e) {
  return {{like(e.x), like(e.weights), Tensor(e.c.weight_type, e.gate_up.sizes(), weight_form(e.c)),
           Tensor(e.c.weight_type, e.down.sizes(), weight_form(e.c)), like(e.shared_gate), like(e.shared_up),
           like(e.shared_down), like(e.shared_router), like(e.lora[0]), like(e.lora[1]), like(e.lora[2]),
           like(e.lora[3])}};
}
inline ExpertsGradients backward(const ExpertsCase& e) {
  ExpertsGradients g = empty_gradients(e);
  moe_experts_bwd(e.dout, e.inputs(), g.views(e), e.c.options);
  return g;
}
inline ExpertsGradients plain_backward(const ExpertsCase& e) {
  ExpertsGradients g = empty_gradients(e);
  moe_experts::reference_bwd<float>(e.dout, e.inputs(), e.id_list().data(), g.views(e), e.c.options);
  return g;
}

}  // namespace tidegate::test
