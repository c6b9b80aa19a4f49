// chunk_gated_delta_rule_fwd against the fp64 token recurrence: shapes, types, layouts, gates, NaN.
#include <gtest/gtest.h>

#include <limits>
#include <map>

#include "ops/chunk_gated_delta_rule/plain_chunk.h"

namespace tidegate::test {
namespace {

constexpr std::int64_t kPackedList[] = {2049, 1011, 513, 256, 128, 65, 32, 16, 7, 4, 5, 1};

// 1e-6 before rounding; what storing in 16 bits makes of it.
void expect_accurate(const std::vector<RuleCase>& cases, const std::string& name) {
  for (const DType dtype : kKernelTypes) {
    std::map<Isa, Accuracy> o, state;
    Random random;
    for (RuleCase c : cases) {
      c.dtype = dtype;
      const Rule r = make_rule(random, c);
      const RuleResult truth = forward(wide(r));
      const RuleResult plain = plain_chunk(r);
      for_each_isa([&] {
        const RuleResult got = forward(r);
        o[active_isa()].add(got.o, plain.o, truth.o, 1e-6);
        state[active_isa()].add(got.ht, plain.ht, truth.ht, 1e-6);
        EXPECT_TRUE(got.o.gaps_untouched());
      });
    }
    for (const auto& [isa, a] : o) {
      const std::string tail = "_" + std::string(dtype_name(dtype)) + "_" + std::string(isa_name(isa));
      a.expect("o_" + name + tail, stored(dtype, 1e-6));
      state.at(isa).expect("state_" + name + tail, 1e-6);
    }
  }
}

TEST(ChunkGatedDeltaRule, HeadSizes) {
  std::vector<RuleCase> cases;
  for (const std::int64_t K : {1, 16, 60, 64, 100, 128, 256}) {
    for (const std::int64_t V : {1, 16, 60, 64, 100, 128, 256}) {
      const Layout layout = std::vector{Layout::kTND, Layout::kNTD}[cases.size() % 2];
      cases.push_back({.lengths = {70, 3},
                       .HK = 1,
                       .G = 1,
                       .K = K,
                       .V = V,
                       .layout = layout,
                       .initial = cases.size() % 3 != 0,
                       .form = cases.size() % 2 == 0 ? padded() : Form{}});
    }
  }
  expect_accurate(cases, "sizes");
}

TEST(ChunkGatedDeltaRule, LayoutsAndGroups) {
  std::vector<RuleCase> cases;
  for (const Layout layout : {Layout::kTND, Layout::kNTD, Layout::kBSND, Layout::kBNSD}) {
    for (const std::int64_t G : {1, 2, 3, 4, 7}) {
      cases.push_back({.lengths = {130, 130},
                       .HK = 2,
                       .G = G,
                       .K = 24,
                       .V = 40,
                       .layout = layout,
                       .form = G == 3 ? reversed() : Form{}});
    }
  }
  expect_accurate(cases, "layouts");
}

TEST(ChunkGatedDeltaRule, EveryLengthTo130) {
  RuleCase c{.lengths = {}, .HK = 1, .G = 2, .K = 16, .V = 16, .initial = true, .slowest = 0.001};
  for (std::int64_t n = 0; n <= 130; ++n) {
    c.lengths.push_back(n);
  }
  expect_accurate({c}, "lengths");
}

TEST(ChunkGatedDeltaRule, PackedList) {
  RuleCase c{.lengths = {std::begin(kPackedList), std::end(kPackedList)}, .HK = 1, .G = 2, .K = 32, .V = 48};
  c.slowest = 0.0005;
  expect_accurate({c}, "packed");
}

TEST(ChunkGatedDeltaRule, ReferenceIsTheDefinition) {
  Random random;
  const Rule r = wide(make_rule(random, {.lengths = {2}, .K = 3, .V = 2}));
  const RuleResult out = forward(r);
  double S[3][2];
  for (int i = 0; i < 6; ++i) {
    S[i / 2][i % 2] = r.h0.get(i);
  }
  for (int t = 0; t < 2; ++t) {
    for (int j = 0; j < 2; ++j) {
      double seen = 0.0;
      for (int i = 0; i < 3; ++i) {
        S[i][j] *= std::exp(r.g.get(t));
        seen += S[i][j] * r.k.get(t * 3 + i);
      }
      double read = 0.0;
      for (int i = 0; i < 3; ++i) {
        S[i][j] += r.k.get(t * 3 + i) * r.beta.get(t) * (r.v.get(t * 2 + j) - seen);
        read += S[i][j] * r.q.get(t * 3 + i);
      }
      EXPECT_NEAR(out.o.get(t * 2 + j), read / std::sqrt(3.0), 1e-14);
    }
  }
}

// Lengths, gates and beta formed inside, from raw projections.
TEST(ChunkGatedDeltaRule, NormsAndGatesInside) {
  for (const DType dtype : kKernelTypes) {
    Random random;
    Rule r = make_rule(random, {.lengths = {67, 130}, .HK = 2, .G = 2, .K = 48, .V = 32, .dtype = dtype});
    r.q = normal(random, dtype, r.q.sizes(), {}, 3.0);
    r.k = normal(random, dtype, r.k.sizes(), {}, 0.2);
    r.g = normal(random, dtype, r.g.sizes());
    r.beta = normal(random, dtype, r.beta.sizes());
    const Tensor A_log = uniform(random, DType::kF32, {4}, -4.0, 1.0);
    const Tensor dt_bias = normal(random, DType::kBF16, {4});
    r.options.use_qk_l2norm = true;
    r.options.A_log = A_log;
    r.options.beta_sigmoid = true;
    for (const double scale : {1.0, 2.0}) {
      for (const bool biased : {false, true}) {
        r.options.beta_scale = scale;
        r.options.dt_bias = biased ? dt_bias.view() : TensorView{};
        const RuleResult truth = forward(wide(r));
        const RuleResult plain = plain_chunk(r);
        for_each_isa([&] {
          Accuracy o, state;
          const RuleResult got = forward(r);
          o.add(got.o, plain.o, truth.o, 1e-6);
          state.add(got.ht, plain.ht, truth.ht, 1e-6);
          o.expect("o", stored(dtype, 1e-6));
          state.expect("state", 1e-6);
        });
      }
    }
  }
}

// Gates of every size at random tokens: finite, and equal to the recurrence.
TEST(ChunkGatedDeltaRule, GatesFromZeroToMinusInfinity) {
  for (const double value :
       {0.0, -20.0, -88.0, -103.9, -104.0, -1e3, -1e38, -std::numeric_limits<double>::infinity()}) {
    Random random;
    Rule r = make_rule(random, {.lengths = {3, 130, 200}, .HK = 1, .G = 2, .K = 32, .V = 32, .slowest = 0.02});
    r.g.fill([&](std::int64_t) { return random.uniform() < 0.1 ? value : -0.05 * random.uniform(); });
    const RuleResult truth = forward(wide(r));
    const RuleResult plain = plain_chunk(r);
    for_each_isa([&] {
      Accuracy o, state;
      const RuleResult got = forward(r);
      o.add(got.o, plain.o, truth.o, 1e-6);
      state.add(got.ht, plain.ht, truth.ht, 1e-6);
      o.expect("o", 1e-6);
      state.expect("state", 1e-6);
    });
  }
}

// A NaN in any input of token t reaches tokens from t on of its own sequence and heads, and nothing else. A reset stops
// it.
TEST(ChunkGatedDeltaRule, NaNStaysCausal) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for_each_isa([&] {
    for (const std::int64_t turn : {0, 1, 37, 63, 64, 100, 101, 10, 11}) {
      const std::int64_t at = turn;
      for (const int which : {0, 1, 2, 3, 4}) {
        Random random;
        const bool narrow = turn % 2 == 1;
        const RuleCase c{.lengths = {20, 130, 40},
                         .HK = 2,
                         .G = 2,
                         .K = 21,
                         .V = 24,
                         .dtype = narrow ? DType::kBF16 : DType::kF32,
                         .precision = narrow ? Precision::kBf16 : Precision::kFp32};
        Rule r = make_rule(random, c);
        const std::int64_t reset = at + 3 + at % 4;  // of value head 0, at an even or odd token of some chunk
        r.g.set((20 + reset) * 4, -200.0);
        const RuleResult clean = forward(r);
        Tensor* const inputs[] = {&r.q, &r.k, &r.v, &r.g, &r.beta};
        const std::int64_t heads = which < 2 ? 2 : 4;
        const std::int64_t width = which < 2 ? c.K : which == 2 ? c.V : 1;
        inputs[which]->set((20 + at) * heads * width, nan);  // head 0, channel 0
        const RuleResult got = forward(r);
        for (std::int64_t t = 0; t < 190; ++t) {
          for (std::int64_t h = 0; h < 4; ++h) {
            const bool group = h < (which < 2 ? 2 : 1);
            const bool inside = t >= 20 + at && t < 150 && group;
            const bool cut = h == 0 && t >= 20 + reset;
            for (std::int64_t j = 0; j < c.V; ++j) {
              const std::int64_t i = (t * 4 + h) * c.V + j;
              if (!inside) {
                ASSERT_EQ(got.o.get(i), clean.o.get(i)) << which << " " << at << " token " << t << " head " << h;
              } else if (cut) {
                ASSERT_EQ(got.o.get(i), clean.o.get(i)) << which << " " << at << " after the reset, token " << t;
              } else if (t == 20 + at && (which != 2 || j == 0)) {
                ASSERT_TRUE(std::isnan(got.o.get(i))) << which << " " << at << " token " << t << " head " << h;
              }
            }
          }
        }
        EXPECT_TRUE(same_bits(part(got.ht, 0, 0, 1), part(clean.ht, 0, 0, 1)));
        EXPECT_TRUE(same_bits(part(got.ht, 0, 2, 3), part(clean.ht, 0, 2, 3)));
      }
    }
  });
}

// A closed gate does not hide that its rate is NaN. fp64 runs the reference.
TEST(ChunkGatedDeltaRule, NaNRateFillsItsHead) {
  for_each_isa([] {
    Random random;
    Rule r = make_rule(random, {.lengths = {40}, .HK = 2, .G = 2, .K = 8, .V = 8});
    Tensor A_log = uniform(random, DType::kF32, {4}, -4.0, 1.0);
    A_log.set(1, std::nan(""));
    r.options.A_log = A_log;
    r.g.fill(-1000.0);
    for (const RuleResult& got : {forward(r), forward(wide(r))}) {
      for (std::int64_t i = 0; i < got.o.view().numel(); ++i) {
        ASSERT_EQ(std::isnan(got.o.get(i)), i / 8 % 4 == 1) << i;
      }
    }
  });
}

// Dot products of bf16 where the CPU has them: within 4e-3, and off by no more than the same steps in bf16. Elsewhere
// the option changes nothing.
TEST(ChunkGatedDeltaRule, Bf16Precision) {
  for_each_isa([] {
    Random random;
    double error = 0.0, size = 0.0, state_error = 0.0, state_size = 0.0;
    for (const std::int64_t K : {128, 100, 31}) {
      for (const bool l2norm : {false, true}) {
        Rule r = make_rule(random, {.lengths = {300, 33, 1, 0, 64},
                                    .HK = 1,
                                    .G = 2,
                                    .K = K,
                                    .V = 40,
                                    .dtype = DType::kBF16,
                                    .slowest = 0.002});
        r.options.use_qk_l2norm = l2norm;
        const RuleResult wide_products = forward(r);
        const RuleResult truth = forward(wide(r));
        r.options.precision = Precision::kBf16;
        const RuleResult got = forward(r);
        if (active_isa() != Isa::kAvx512Bf16) {
          EXPECT_TRUE(same_bits(got.o, wide_products.o));
          EXPECT_TRUE(same_bits(got.ht, wide_products.ht));
        }
        for (std::int64_t i = 0; i < got.o.view().numel(); ++i) {
          error += std::pow(got.o.get(i) - truth.o.get(i), 2);
          size += std::pow(truth.o.get(i), 2);
        }
        for (std::int64_t i = 0; i < got.ht.view().numel(); ++i) {
          state_error += std::pow(got.ht.get(i) - truth.ht.get(i), 2);
          state_size += std::pow(truth.ht.get(i), 2);
        }
      }
    }
    const std::string isa(isa_name(active_isa()));
    ::testing::Test::RecordProperty("o_" + isa, std::to_string(std::sqrt(error / size)));
    ::testing::Test::RecordProperty("state_" + isa, std::to_string(std::sqrt(state_error / state_size)));
    EXPECT_LE(std::sqrt(error / size), 4e-3);
    EXPECT_LE(std::sqrt(state_error / state_size), 3.2e-3);
  });
}

}  // namespace
}  // namespace tidegate::test
