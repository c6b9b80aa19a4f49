// What the plain loops of the forward and of the backward share.
#pragma once

#include "base/delta_reference.h"
#include "ops/chunk_gated_delta_rule/problem.h"

namespace tidegate::chunk_gated_delta_rule {

// The gate of one token: g = log_decay, and with A_log what it is made of: g = -rate open, open = softplus(raw).
template <class Acc>
struct Gate {
  Acc log_decay, raw, rate, open;
};
template <class Acc>
Gate<Acc> read_gate(const Tensors& t, const Heads& g, const ChunkGatedDeltaRuleOptions& options, std::int64_t row,
                    std::int64_t token, std::int64_t head) {
  Gate<Acc> x{static_cast<Acc>(read_element(t.g, offset(g, row, token, head))), 0, 0, 0};
  if (options.A_log.defined()) {
    x.rate = std::exp(static_cast<Acc>(read_element(options.A_log, head * options.A_log.strides[0])));
    x.raw = x.log_decay;
    if (options.dt_bias.defined()) {
      x.raw += static_cast<Acc>(read_element(options.dt_bias, head * options.dt_bias.strides[0]));
    }
    x.open = softplus(x.raw);
    x.log_decay = x.open == 0 && std::isinf(x.rate) ? Acc(0) : -x.rate * x.open;
  }
  return x;
}

template <class Acc>
Acc read_strength(const Tensors& t, const Heads& beta, const ChunkGatedDeltaRuleOptions& options, std::int64_t row,
                  std::int64_t token, std::int64_t head) {
  const Acc x = static_cast<Acc>(read_element(t.beta, offset(beta, row, token, head)));
  return options.beta_sigmoid ? static_cast<Acc>(options.beta_scale) * sigmoid(x) : x;
}

}  // namespace tidegate::chunk_gated_delta_rule
