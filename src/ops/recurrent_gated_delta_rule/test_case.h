// Problems, runs and comparisons that the tests of the recurrence share.
#pragma once

#include <vector>

#include "ops/chunk_gated_delta_rule/test_case.h"
#include "ops/recurrent_gated_delta_rule/problem.h"
#include "tidegate/recurrent.h"
#include "toolkit.h"

namespace tidegate::test {

struct Recurrence {
  RuleCase c;
  Tensor q, k, v, g, gk, beta, h0;
  RecurrentGatedDeltaRuleOptions options;
};

// The fused operator's problem; gk and one beta per channel on request.
inline Recurrence make_recurrence(Random& random, const RuleCase& c, bool channels = false) {
  Rule rule = make_rule(random, c);
  Recurrence r{c, rule.q, rule.k, rule.v, rule.g, {}, rule.beta, rule.h0, {}};
  if (channels) {
    r.gk = uniform(random, DType::kF32, c.heads(c.HK * c.G, c.K), -0.5, 0.0);
    r.beta = uniform(random, c.dtype, c.heads(c.HK * c.G, c.V), 0.0, 1.0);
  }
  r.options.layout = c.layout;
  return r;
}

inline Recurrence wide(const Recurrence& r) {
  Recurrence w{r.c, wide(r.q), wide(r.k), wide(r.v), wide(r.g), wide(r.gk), wide(r.beta), wide(r.h0), r.options};
  w.c.dtype = DType::kF64;
  return w;
}

inline Sizes state_sizes(const Recurrence& r, std::int64_t count) {
  Sizes s = r.c.states(count);
  if (r.options.state_v_first) {
    std::swap(s[2], s[3]);
  }
  return s;
}

inline RuleResult forward(const Recurrence& r) {
  RuleResult out;
  const DType state = r.c.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  out.o = Tensor(r.c.dtype, r.c.heads(r.c.HK * r.c.G, r.c.V), r.c.form);
  out.ht = Tensor(state, state_sizes(r, r.c.seq().count()));
  recurrent_gated_delta_rule_fwd(r.q, r.k, r.v, r.g, r.gk, r.beta, r.h0, out.o, out.ht, r.c.seq(), r.options);
  return out;
}

// The plain loops in fp32.
inline RuleResult plain(const Recurrence& r) {
  RuleResult out;
  out.o = Tensor(r.c.dtype, r.c.heads(r.c.HK * r.c.G, r.c.V));
  out.ht = Tensor(DType::kF32, state_sizes(r, r.c.seq().count()));
  Scratch scratch;
  const recurrence::Tensors t{r.q, r.k, r.v, r.g, r.gk, r.beta, r.h0, out.ht, out.o};
  const SeqLens seq = r.c.seq();
  recurrence::reference<float>(recurrence::check_fwd("plain", t, seq, r.options, scratch), t, seq, r.options);
  return out;
}

// Tokens [begin, end) of the problem, on a pool. o is written in place.
inline void run_pool(const Recurrence& r, const Tensor& pool, const Tensor& o, std::int64_t begin, std::int64_t end,
                     const SeqLens& seq, const RecurrentGatedDeltaRuleOptions& options) {
  const auto cut = [&](const Tensor& t) { return t.defined() ? tokens_of(t, r.c.layout, begin, end) : TensorView{}; };
  recurrent_gated_delta_rule(cut(r.q), cut(r.k), cut(r.v), cut(r.g), cut(r.gk), cut(r.beta), pool, cut(o), seq,
                             options);
}

using Indices = std::vector<std::int64_t>;

// A pool of random states of a type; V-first or not.
inline Tensor make_pool(Random& random, const Recurrence& r, std::int64_t slots, DType dtype, const Form& form = {}) {
  return normal(random, dtype, state_sizes(r, slots), form);
}
inline TensorView slot_of(const Tensor& pool, std::int64_t slot) { return part(pool, 0, slot, slot + 1); }

// Storage types and orders of a pool.
template <class F>
void for_each_pool(F f) {
  for_each_isa([&] {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const bool v_first : {false, true}) {
        f(dtype, v_first);
      }
    }
  });
}

}  // namespace tidegate::test
