// An update problem of the tests, and what every mode does to a row: written down column by column.
#pragma once

#include <cmath>

#include "ops/causal_conv1d/kernel.h"
#include "tidegate/conv.h"
#include "toolkit.h"

namespace tidegate::test {

using causal_conv1d::StateMode;

struct Update {
  StateMode mode = StateMode::kTail;
  Tensor x, pool, weight, bias;
  Sizes lengths;
  Sizes slots = {};   // empty: identity
  Sizes counts = {};  // of the mode, for every sequence
  std::vector<std::uint8_t> has_state = {};
  bool silu = true;

  SeqLens seq() const { return SeqLens::from_lengths(lengths); }
  CausalConv1dUpdateOptions options() const {
    CausalConv1dUpdateOptions o;
    o.activation = silu ? Activation::kSilu : Activation::kNone;
    o.cache_indices = slots;
    o.has_initial_state = has_state;
    o.state_anchor_head = mode == StateMode::kHead;
    if (mode == StateMode::kCircular) o.cache_seqlens = counts;
    if (mode == StateMode::kSpeculative) o.num_accepted_tokens = counts;
    return o;
  }
};

// Runs the operator; the pool of u changes.
inline Tensor run(const Update& u) {
  Tensor y = like(u.x);
  causal_conv1d_update(u.x, u.pool, u.weight, u.bias, y, u.seq(), u.options());
  return y;
}

// The columns of a row that are the history, and what every column becomes: >= 0 a token of the call, else -k the
// column k-1 of the row itself.
struct Plan {
  Sizes history, columns;
};
inline Plan plan_of(StateMode mode, std::int64_t S, std::int64_t W, std::int64_t L, std::int64_t count) {
  Plan plan;
  for (std::int64_t i = 0; i < W - 1; ++i) {
    plan.history.push_back(mode == StateMode::kTail          ? S - (W - 1) + i
                           : mode == StateMode::kHead        ? i
                           : mode == StateMode::kSpeculative ? count - 1 + i
                                                             : (count + S * W - (W - 1) + i) % S);
  }
  Sizes samples;  // (history, tokens)
  for (const std::int64_t column : plan.history) {
    samples.push_back(-column - 1);
  }
  for (std::int64_t i = 0; i < L; ++i) {
    samples.push_back(i);
  }
  for (std::int64_t column = 0; column < S; ++column) {
    plan.columns.push_back(-column - 1);
  }
  const auto at = [](Sizes& v, std::int64_t i) -> std::int64_t& { return v[static_cast<std::size_t>(i)]; };
  if (mode == StateMode::kTail) {
    for (std::int64_t column = 0; column < S; ++column) {
      at(plan.columns, column) = column + L < S ? -(column + L) - 1 : column + L - S;
    }
  } else if (mode == StateMode::kHead) {
    for (std::int64_t i = 0; i < W - 1; ++i) {
      at(plan.columns, i) = at(samples, L + i);
    }
  } else if (mode == StateMode::kSpeculative) {
    for (std::int64_t i = 0; i < W - 2 + L; ++i) {
      at(plan.columns, i) = at(samples, 1 + i);
    }
  } else {
    for (std::int64_t i = 0; i < L; ++i) {
      at(plan.columns, (count + i) % S) = i;
    }
  }
  return plan;
}

// y by the forward with the history as initial state; the pool as the plans say. Returns y, changes u.pool.
inline Tensor expected(Update& u) {
  const SeqLens seq = u.seq();
  const std::int64_t D = u.weight.view().size(0);
  const std::int64_t W = u.weight.view().size(1);
  const std::int64_t S = u.pool.view().size(2);
  const auto column_of = [&](std::int64_t slot, std::int64_t c, std::int64_t column) {
    return (slot * D + c) * S + column;
  };
  Tensor y = like(u.x);
  for (std::int64_t n = 0; n < seq.count(); ++n) {
    const auto i = static_cast<std::size_t>(n);
    const std::int64_t slot = u.slots.empty() ? n : u.slots[i];
    const Sequence& s = seq[n];
    for (std::int64_t k = s.begin * D; k < s.end * D && slot < 0; ++k) {
      y.set(k, 0.0);
    }
    if (slot < 0 || s.length() == 0) {
      continue;
    }
    for (std::int64_t k = 0; k < D * S && !u.has_state.empty() && u.has_state[i] == 0; ++k) {
      u.pool.set(slot * D * S + k, 0.0);
    }
    const Plan plan = plan_of(u.mode, S, W, s.length(), u.counts.empty() ? 0 : u.counts[i]);
    const Tensor before = u.pool;
    Tensor history(u.x.view().dtype, {1, D, W - 1});
    history.fill([&](std::int64_t k) {
      return before.get(column_of(slot, k / (W - 1), plan.history[static_cast<std::size_t>(k % (W - 1))]));
    });
    causal_conv1d_fwd(part(u.x, 0, s.begin, s.end), u.weight, u.bias, history, part(y, 0, s.begin, s.end), {},
                      SeqLens::dense(1, s.length()), {u.options().activation, 0, Layout::kTND});
    for (std::int64_t k = 0; k < D * S; ++k) {
      const std::int64_t from = plan.columns[static_cast<std::size_t>(k % S)];
      u.pool.set(slot * D * S + k,
                 from >= 0 ? u.x.get((s.begin + from) * D + k / S) : before.get(column_of(slot, k / S, -from - 1)));
    }
  }
  return y;
}

inline Update random_update(Random& random, StateMode mode, DType dtype, std::int64_t D, std::int64_t W, std::int64_t S,
                            const Form& pool_form) {
  Update u;
  u.mode = mode;
  const std::int64_t longest = mode == StateMode::kSpeculative ? S - W + 2 : 7;
  u.slots = {4, 0, -1, 6, 2, 7};
  for (std::size_t n = 0; n < u.slots.size(); ++n) {
    u.lengths.push_back(n == 1 ? 0 : n == 3 ? longest : random.integer(1, longest));
    u.counts.push_back(mode == StateMode::kSpeculative ? random.integer(1, S - W + 2) : random.integer(0, 40));
    u.has_state.push_back(n == 4 ? 0 : 1);
  }
  u.x = normal(random, dtype, {u.seq().tokens(), D});
  u.weight = normal(random, dtype, {D, W});
  u.bias = normal(random, dtype, {D});
  u.pool = Tensor(dtype, {9, D, S}, pool_form);  // slots that no sequence uses stay NaN
  u.pool.fill([&](std::int64_t i) {
    const std::int64_t slot = i / (D * S);
    return slot == 1 || slot == 3 || slot == 5 || slot == 8 ? std::nan("") : random.normal();
  });
  return u;
}

}  // namespace tidegate::test
