// recurrent_gated_delta_rule: values against fp64, gates and resets, long runs.
#include <gtest/gtest.h>

#include <limits>

#include "ops/recurrent_gated_delta_rule/test_case.h"

namespace tidegate::test {
namespace {

constexpr double kOutput = 5e-7, kState = 1e-6;  // relative rms error

struct Accuracies {
  Accuracy o, state;
  void add(const Recurrence& r) {
    const RuleResult got = forward(r), loops = plain(r), truth = forward(wide(r));
    o.add(got.o, loops.o, truth.o, kOutput);
    state.add(got.ht, loops.ht, truth.ht, kState);
  }
  void expect(DType dtype) const {
    o.expect("o", stored(dtype, kOutput));
    state.expect("state", kState);
  }
};

TEST(RecurrentGatedDeltaRule, Accuracy) {
  for_each_isa([] {
    for (const DType dtype : kKernelTypes) {
      for (const bool v_first : {false, true}) {
        Accuracies all;
        Random random;
        for (const auto& [K, V] :
             {std::pair<std::int64_t, std::int64_t>{128, 128}, {20, 36}, {60, 100}, {1, 3}, {33, 130}}) {
          const RuleCase c{.lengths = {1, 3, 0, 16, 9, 11}, .HK = 2, .G = 2, .K = K, .V = V, .dtype = dtype};
          Recurrence r = make_recurrence(random, c);
          r.options.state_v_first = v_first;
          r.h0 = v_first ? copied(exchanged(r.h0, 2, 3)) : r.h0;
          all.add(r);
        }
        all.expect(dtype);
      }
    }
  });
}

// Everything formed inside, gates per key channel, one beta per value channel, no gate at all.
TEST(RecurrentGatedDeltaRule, Options) {
  for_each_isa([] {
    for (const bool v_first : {false, true}) {
      Accuracies all;
      Random random;
      for (const Layout layout : {Layout::kTND, Layout::kNTD, Layout::kBSND, Layout::kBNSD}) {
        for (int kind = 0; kind < 4; ++kind) {
          const RuleCase c{.lengths = {11, 11}, .HK = 2, .G = 3, .K = 40, .V = 44, .layout = layout};
          Recurrence r = make_recurrence(random, c, kind == 1 || kind == 2);
          const Tensor A_log = normal(random, DType::kBF16, {6}), dt_bias = normal(random, DType::kF32, {6});
          r.options.state_v_first = v_first;
          r.h0 = v_first ? copied(exchanged(r.h0, 2, 3)) : r.h0;
          r.options.scale = 0.7;
          r.options.use_qk_l2norm = kind != 3;
          if (kind == 0 || kind == 2) {
            r.options.A_log = A_log;
            r.options.dt_bias = kind == 0 ? dt_bias.view() : TensorView{};
            r.options.beta_sigmoid = true;
            r.options.beta_scale = 2.0;
          } else {
            r.g = {};
          }
          all.add(r);
        }
      }
      all.expect(DType::kF32);
    }
  });
}

TEST(RecurrentGatedDeltaRule, FourThousandSteps) {
  for (const bool v_first : {false, true}) {
    Random random;
    Recurrence r =
        make_recurrence(random, {.lengths = {4096}, .K = 128, .V = 32, .dtype = DType::kBF16, .slowest = 1e-3});
    // One beta per channel keeps a long sequence in the recurrence.
    Tensor betas(DType::kBF16, r.c.heads(1, 32));
    betas.fill([&](std::int64_t i) { return r.beta.get(i / 32); });
    r.beta = betas;
    r.options.state_v_first = v_first;
    r.h0 = v_first ? copied(exchanged(r.h0, 2, 3)) : r.h0;
    Accuracies all;
    all.add(r);
    all.expect(DType::kBF16);
  }
}

// A gate of -104 and below forgets everything, whatever is there, NaN included.
TEST(RecurrentGatedDeltaRule, Resets) {
  for_each_isa([] {
    for (const bool v_first : {false, true}) {
      for (const double gate : {-104.0, -1e3, -1e38, -std::numeric_limits<double>::infinity()}) {
        Random random;
        Recurrence r = make_recurrence(random, {.lengths = {12}, .G = 2, .K = 20, .V = 36});
        r.options.state_v_first = v_first;
        r.h0 = {};
        r.g.set(5 * 2, gate).set(5 * 2 + 1, gate);
        const RuleResult want = forward(wide(r)), got = forward(r);
        Accuracy o;
        o.add(got.o, plain(r).o, want.o, kOutput);
        o.expect("o", kOutput);
        // A run that starts at the reset has the same bits, and NaN before it does not pass.
        r.v.set(3 * 2 * 36 + 4, std::numeric_limits<double>::quiet_NaN());
        const RuleResult after = forward(r);
        EXPECT_TRUE(same_bits(after.ht, got.ht));
        EXPECT_TRUE(same_bits(part(after.o, 0, 5, 12), part(got.o, 0, 5, 12)));
        EXPECT_TRUE(same_bits(part(after.o, 0, 0, 3), part(got.o, 0, 0, 3)));
      }
    }
  });
}

// A gate of one key channel forgets that row of the state, NaN included.
TEST(RecurrentGatedDeltaRule, ResetOfOneChannel) {
  for_each_isa([] {
    for (const bool v_first : {false, true}) {
      Random random;
      Recurrence r = make_recurrence(random, {.lengths = {3}, .K = 20, .V = 36}, true);
      r.options.state_v_first = v_first;
      r.h0 = v_first ? copied(exchanged(r.h0, 2, 3)) : r.h0;
      r.gk.set(7, -200.0);
      const RuleResult want = forward(wide(r)), got = forward(r);
      Accuracy o;
      o.add(got.o, plain(r).o, want.o, kOutput);
      o.expect("o", kOutput);
      for (std::int64_t v = 0; v < 36; ++v) {
        r.h0.set(v_first ? v * 20 + 7 : 7 * 36 + v, std::numeric_limits<double>::quiet_NaN());
      }
      const RuleResult after = forward(r);
      EXPECT_TRUE(same_bits(after.o, got.o));
      EXPECT_TRUE(same_bits(after.ht, got.ht));
    }
  });
}

// NaN touches the tokens from its own on, of the heads and columns that read it.
TEST(RecurrentGatedDeltaRule, NanStaysCausal) {
  for_each_isa([] {
    Random random;
    Recurrence r = make_recurrence(random, {.lengths = {6, 6}, .HK = 2, .G = 2, .K = 20, .V = 36});
    const RuleResult clean = forward(r);
    r.k.set((2 * 2 + 1) * 20 + 3, std::numeric_limits<double>::quiet_NaN());  // token 2, key head 1
    const RuleResult got = forward(r);
    for (std::int64_t t = 0; t < 12; ++t) {
      for (std::int64_t h = 0; h < 4; ++h) {
        const bool touched = t >= 2 && t < 6 && h >= 2;
        for (std::int64_t c = 0; c < 36; ++c) {
          const std::int64_t i = (t * 4 + h) * 36 + c;
          EXPECT_EQ(std::isnan(got.o.get(i)), touched) << t << " " << h;
          if (!touched) {
            EXPECT_EQ(got.o.get(i), clean.o.get(i));
          }
        }
      }
    }
    EXPECT_TRUE(same_bits(part(got.ht, 0, 1, 2), part(clean.ht, 0, 1, 2)));
  });
}

}  // namespace
}  // namespace tidegate::test
