// Problems, runs and comparisons that the tests of the fused operator share.
#pragma once

#include <cmath>
#include <vector>

#include "guarded.h"
#include "ops/chunk_gated_delta_rule/problem.h"
#include "tidegate/delta_rule.h"

namespace tidegate::test {

struct RuleCase {
  std::vector<std::int64_t> lengths;  // packed layouts; batched ones have one row per entry, all equal
  std::int64_t HK = 1, G = 1, K = 16, V = 16;
  DType dtype = DType::kF32;
  Layout layout = Layout::kTND;
  bool initial = true;
  Precision precision = Precision::kFp32;
  double slowest = 0.01;  // heads forget at rates from this to about 1
  Form form = {};
  std::int64_t tokens() const {
    std::int64_t sum = 0;
    for (const std::int64_t n : lengths) {
      sum += n;
    }
    return has_batch(layout) ? lengths.at(0) : sum;
  }
  std::int64_t rows() const { return has_batch(layout) ? static_cast<std::int64_t>(lengths.size()) : 1; }
  SeqLens seq() const { return has_batch(layout) ? SeqLens::dense(rows(), tokens()) : SeqLens::from_lengths(lengths); }
  Sizes heads(std::int64_t H, std::int64_t D) const {
    Sizes s = is_head_major(layout) ? Sizes{H, tokens()} : Sizes{tokens(), H};
    if (has_batch(layout)) {
      s.insert(s.begin(), rows());
    }
    if (D > 0) {
      s.push_back(D);
    }
    return s;
  }
  Sizes states(std::int64_t count) const { return {count, HK * G, K, V}; }
};

struct Rule {
  RuleCase c;
  Tensor q, k, v, g, beta, h0;
  ChunkGatedDeltaRuleOptions options;
};

// Keys share a common part, so that they correlate; gates and beta as models have them.
inline Rule make_rule(Random& random, const RuleCase& c) {
  Rule r{c, {}, {}, {}, {}, {}, {}, {}};
  const auto unit_rows = [&](std::int64_t H) {
    Tensor t = normal(random, c.dtype, c.heads(H, c.K), c.form);
    for (std::int64_t row = 0; row < t.view().numel() / c.K; ++row) {
      double squares = 0.0;
      for (std::int64_t i = 0; i < c.K; ++i) {
        const double x = t.get(row * c.K + i) + (i % 3 == 0 ? 0.7 : 0.0);
        t.set(row * c.K + i, x);
        squares += x * x;
      }
      for (std::int64_t i = 0; i < c.K; ++i) {
        t.set(row * c.K + i, t.get(row * c.K + i) / std::sqrt(squares));
      }
    }
    return t;
  };
  const std::int64_t HV = c.HK * c.G;
  r.q = unit_rows(c.HK);
  r.k = unit_rows(c.HK);
  r.v = normal(random, c.dtype, c.heads(HV, c.V), c.form);
  r.g = uniform(random, DType::kF32, c.heads(HV, 0), 0.0, 1.0);
  const std::int64_t inner = is_head_major(c.layout) ? c.tokens() : 1;
  r.g.fill([&](std::int64_t i) {
    const double head = static_cast<double>(i / inner % HV) / static_cast<double>(HV);
    return -c.slowest * std::pow(1.0 / c.slowest, head) * random.uniform();
  });
  r.beta = uniform(random, c.dtype, c.heads(HV, 0), 0.0, 1.0);
  if (c.initial) {
    r.h0 = normal(random, DType::kF32, c.states(c.seq().count()));
  }
  r.options.layout = c.layout;
  r.options.precision = c.precision;
  return r;
}

struct RuleResult {
  Tensor o, ht, snapshots;
};

inline RuleResult outputs(const Rule& r, DType o_type, DType state_type) {
  const RuleCase& c = r.c;
  RuleResult out;
  RuleCase like = c;
  like.layout = r.options.out_layout.value_or(c.layout);
  out.o = Tensor(o_type, like.heads(c.HK * c.G, c.V), c.form);
  Sizes state = c.states(c.seq().count());
  Sizes snapshot = c.states(static_cast<std::int64_t>(r.options.snapshot_at.size()));
  if (r.options.state_v_first) {
    std::swap(state[2], state[3]);
    std::swap(snapshot[2], snapshot[3]);
  }
  out.ht = Tensor(state_type, state);
  if (!r.options.snapshot_at.empty()) {
    out.snapshots = Tensor(state_type == DType::kF64 ? DType::kF64 : DType::kF32, snapshot);
  }
  return out;
}

inline RuleResult forward(const Rule& r) {
  RuleResult out = outputs(r, r.c.dtype, r.c.dtype == DType::kF64 ? DType::kF64 : DType::kF32);
  chunk_gated_delta_rule_fwd(r.q, r.k, r.v, r.g, r.beta, r.h0, out.o, out.ht, out.snapshots, r.c.seq(), r.options);
  return out;
}

// The same values in fp64: the reference answers.
inline Rule wide(const Rule& r) {
  Rule w{r.c, wide(r.q), wide(r.k), wide(r.v), wide(r.g), wide(r.beta), wide(r.h0), r.options};
  w.c.dtype = DType::kF64;
  w.c.form = {};
  return w;
}

// Tokens [begin, end) of a tensor of this case.
inline TensorView tokens_of(const Tensor& t, Layout layout, std::int64_t begin, std::int64_t end) {
  const int dimension = (is_head_major(layout) ? 1 : 0) + (has_batch(layout) ? 1 : 0);
  return part(t, dimension, begin, end);
}

}  // namespace tidegate::test
