// chunk_gated_delta_rule_bwd against the fp64 token recurrence: shapes, types, layouts, gates.
#include <gtest/gtest.h>

#include <limits>

#include "ops/chunk_gated_delta_rule_bwd/test_case.h"

namespace tidegate::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

void expect_accurate(const std::string& name, const RuleCase& shape, bool raw = false, double floor = 0.0) {
  for (const DType dtype : kKernelTypes) {
    Random random;
    RuleCase c = shape;
    c.dtype = dtype;
    const Training t = raw ? make_raw_training(random, c) : make_training(random, c);
    const GradientResult truth = backward(wide(t));
    for_each_isa([&] {
      const std::string where = name + "_" + std::string(dtype_name(dtype)) + "_" + std::string(isa_name(active_isa()));
      expect_gradients(where, backward(t, states_for(t)), truth, dtype, floor > 0.0 ? 1e-5 : 3e-6, floor);
    });
  }
}

// The reference itself, against differences of the forward's fp64 path.
TEST(ChunkGatedDeltaRuleBwd, ReferenceIsTheDerivative) {
  Random random;
  for (const bool v_first : {false, true}) {
    Training t = wide(make_raw_training(random, {.lengths = {3, 0, 2}, .HK = 1, .G = 2, .K = 3, .V = 2}));
    if (v_first) {
      t.rule.options.state_v_first = true;
      t.rule.h0 = normal(random, DType::kF64, {3, 2, 2, 3});
      t.dfinal = normal(random, DType::kF64, {3, 2, 2, 3});
    }
    const GradientResult d = backward(t);
    const auto loss = [&] {
      Rule r = t.rule;
      r.options = options_of(t);
      const RuleResult out = forward(r);
      return dot(out.o, t.d_o) + dot(out.ht, t.dfinal);
    };
    expect_gradient(t.rule.q, d.dq, loss);
    expect_gradient(t.rule.k, d.dk, loss);
    expect_gradient(t.rule.v, d.dv, loss);
    expect_gradient(t.rule.g, d.dg, loss);
    expect_gradient(t.rule.beta, d.dbeta, loss);
    expect_gradient(t.rule.h0, d.dh0, loss);
    expect_gradient(t.A_log, d.dA_log, loss);
    expect_gradient(t.dt_bias, d.ddt_bias, loss);
  }
}

TEST(ChunkGatedDeltaRuleBwd, HeadSizes) {
  int i = 0;
  for (const std::int64_t K : {1, 16, 60, 128, 256}) {
    for (const std::int64_t V : {1, 16, 60, 128, 256}) {
      ++i;
      expect_accurate("K" + std::to_string(K) + "V" + std::to_string(V),
                      {.lengths = {70, 3},
                       .K = K,
                       .V = V,
                       .layout = i % 2 == 0 ? Layout::kTND : Layout::kNTD,
                       .initial = i % 3 != 0,
                       .form = i % 2 == 0 ? padded() : Form{}},
                      false,
                      // With one channel every write replaces the state: a gradient is a small rest of large terms
                      // then, and measured against these, sums over V of numbers around 1.
                      K == 1 ? std::sqrt(static_cast<double>(V)) : 0.0);
    }
  }
}

// Gates are summed over pairs of tokens of which most cancel, dA_log and ddt_bias over all tokens. Pairs that leave
// their rounding behind make these 1e-6 of their terms; pairs that cancel whole, 1e-7.
TEST(ChunkGatedDeltaRuleBwd, GatesKeepNoRoundingOfPairsThatCancel) {
  for_each_isa([&] {
    Random random;
    double A_log = 0.0, dt_bias = 0.0;
    constexpr int kTrials = 20;
    for (int i = 0; i < kTrials; ++i) {
      Training t = make_raw_training(random, {.lengths = {40}, .HK = 2, .G = 2, .initial = false});
      t.rule.options.beta_scale = 1.0;
      t.A_log.fill([&](std::int64_t) { return std::log(16.0 * random.uniform()); });  // as models begin
      t.dfinal = {};
      const GradientResult got = backward(t, states_for(t)), truth = backward(wide(t));
      for (std::int64_t h = 0; h < 4; ++h) {
        double rates = 0.0, biases = 0.0;  // the terms of both sums, without their signs
        for (std::int64_t token = 0; token < 40; ++token) {
          const double z = t.rule.g.get(token * 4 + h) + t.dt_bias.get(h), da = std::abs(truth.dg.get(token * 4 + h));
          biases += da;
          rates += da * std::log1p(std::exp(z)) * (1.0 + std::exp(-z));
        }
        A_log += std::pow((got.dA_log.get(h) - truth.dA_log.get(h)) / rates, 2) / 4 / kTrials;
        dt_bias += std::pow((got.ddt_bias.get(h) - truth.ddt_bias.get(h)) / biases, 2) / 4 / kTrials;
      }
    }
    EXPECT_LE(std::sqrt(A_log), 1.5e-7) << isa_name(active_isa());
    EXPECT_LE(std::sqrt(dt_bias), 1.5e-7) << isa_name(active_isa());
  });
}

// Gates of -31 to -69: dg is about 1e-14 and must not carry the rounding of what the last token of a chunk writes.
TEST(ChunkGatedDeltaRuleBwd, GatesThatForgetAlmostAll) {
  Random random;
  Training t = make_training(random, {.lengths = {75}, .HK = 2, .G = 2});
  t.rule.g.fill([&](std::int64_t) { return -31.0 - 38.0 * random.uniform(); });
  const GradientResult truth = backward(wide(t));
  for_each_isa([&] { expect_gradients("forget", backward(t, states_for(t)), truth, DType::kF32); });
}

TEST(ChunkGatedDeltaRuleBwd, LayoutsAndGroups) {
  for (const Layout layout : {Layout::kTND, Layout::kNTD, Layout::kBSND, Layout::kBNSD}) {
    for (const std::int64_t G : {1, 2, 3, 4}) {
      expect_accurate("G" + std::to_string(G), {.lengths = {100, 100},
                                                .HK = 2,
                                                .G = G,
                                                .K = 24,
                                                .V = 40,
                                                .layout = layout,
                                                .form = G == 3 ? reversed() : Form{}});
    }
  }
}

TEST(ChunkGatedDeltaRuleBwd, EveryLengthTo130) {
  RuleCase c{.lengths = {}, .HK = 1, .G = 2, .K = 16, .V = 16, .slowest = 0.001};
  for (std::int64_t n = 0; n <= 130; ++n) {
    c.lengths.push_back(n);
  }
  expect_accurate("lengths", c);
}

TEST(ChunkGatedDeltaRuleBwd, PackedList) {
  expect_accurate("packed", {.lengths = {2049, 1011, 513, 256, 128, 65, 32, 16, 7, 4, 5, 1},
                             .HK = 1,
                             .G = 2,
                             .K = 32,
                             .V = 48,
                             .slowest = 0.0005});
}

TEST(ChunkGatedDeltaRuleBwd, NormsAndGatesInside) {
  expect_accurate("raw", {.lengths = {67, 0, 300}, .HK = 2, .G = 2, .K = 48, .V = 32}, true);
}

// Gates of every size, resets among them: exact zeros for the resets themselves, and nothing that is not finite.
TEST(ChunkGatedDeltaRuleBwd, GatesFromZeroToMinusInfinity) {
  for (const double extreme : {0.0, -20.0, -88.0, -104.0, -1e3, -1e38, -kInfinity}) {
    Random random;
    Training t = make_training(random, {.lengths = {150, 40}, .HK = 1, .G = 2, .K = 32, .V = 32});
    for (std::int64_t i = 0; i < t.rule.g.view().numel(); ++i) {
      if (random.uniform() < 0.1) {
        t.rule.g.set(i, extreme);
      }
    }
    const GradientResult truth = backward(wide(t));
    for_each_isa([&] {
      const GradientResult got = backward(t);
      expect_gradients("g" + std::to_string(extreme), got, truth, DType::kF32);
      for (std::int64_t i = 0; i < t.rule.g.view().numel(); ++i) {
        EXPECT_TRUE(t.rule.g.get(i) > -104.0 || got.dg.get(i) == 0.0);
      }
    });
  }
}

// A write strength of 0 or 2, a key of zeros.
TEST(ChunkGatedDeltaRuleBwd, EdgesOfBetaAndKeys) {
  Random random;
  Training t = make_training(random, {.lengths = {90}, .HK = 1, .G = 2, .K = 32, .V = 32});
  for (std::int64_t i = 0; i < t.rule.beta.view().numel(); ++i) {
    t.rule.beta.set(i, i % 3 == 0 ? 0.0 : i % 3 == 1 ? 2.0 : 0.5);
  }
  for (std::int64_t i = 32 * 10; i < 32 * 12; ++i) {
    t.rule.k.set(i, 0.0);
  }
  const GradientResult truth = backward(wide(t));
  for_each_isa([&] { expect_gradients("edges", backward(t), truth, DType::kF32, 1e-5); });
}

// Rows of zeros are padding: their gradient is exactly 0 with the option, and 1000 times what came in without it.
TEST(ChunkGatedDeltaRuleBwd, ZeroRows) {
  for (const bool safe : {false, true}) {
    Random random;
    Training t = make_raw_training(random, {.lengths = {50}, .HK = 1, .G = 2, .K = 20, .V = 16});
    for (std::int64_t i = 20 * 40; i < 20 * 42; ++i) {
      t.rule.q.set(i, 0.0);
      t.rule.k.set(i, 0.0);
    }
    t.rule.options.zero_row_safe = safe;
    const GradientResult truth = backward(wide(t));
    for_each_isa([&] {
      const GradientResult got = backward(t);
      expect_gradients("zero rows", got, truth, DType::kF32);
      for (std::int64_t i = 20 * 40; i < 20 * 42; ++i) {
        EXPECT_EQ(got.dq.get(i) == 0.0, safe);
        EXPECT_EQ(got.dk.get(i) == 0.0, safe);
      }
    });
  }
}

// An infinite rate: the gate is shut or a reset, and nothing moves with it.
TEST(ChunkGatedDeltaRuleBwd, InfiniteRate) {
  Random random;
  Training t = make_raw_training(random, {.lengths = {40}, .HK = 1, .G = 2, .K = 16, .V = 16});
  t.A_log.set(0, 100.0);
  for (std::int64_t i = 0; i < 40; i += 2) {
    t.rule.g.set(i * 2, -200.0);
  }
  const GradientResult truth = backward(wide(t));
  for_each_isa([&] {
    const GradientResult got = backward(t);
    for (const auto& [name, x] : got.all()) {
      for (const double value : values(*x)) {
        EXPECT_TRUE(std::isfinite(value)) << name;
      }
    }
    EXPECT_EQ(got.dA_log.get(0), 0.0);
    EXPECT_EQ(got.ddt_bias.get(0), 0.0);
    expect_close("dv", got.dv, truth.dv, 3e-6);
  });
}

}  // namespace
}  // namespace tidegate::test
