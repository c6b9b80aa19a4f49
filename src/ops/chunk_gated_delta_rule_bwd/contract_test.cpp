// chunk_gated_delta_rule_bwd: equal bits whatever the batch, only what is wanted, bounded memory.
#include <gtest/gtest.h>

#include <limits>

#include "base/arena.h"
#include "ops/chunk_gated_delta_rule_bwd/test_case.h"

namespace tidegate::test {
namespace {

void expect_same(const GradientResult& a, const GradientResult& b) {
  const auto x = a.all(), y = b.all();
  for (std::size_t i = 0; i < x.size(); ++i) {
    EXPECT_TRUE(same_bits(*x[i].second, *y[i].second)) << x[i].first;
  }
}

// Sequence n of a packed result, alone. Sums over all tokens stay as they are.
struct Cut {
  const RuleCase& c;
  std::int64_t n;
  std::int64_t begin() const {
    std::int64_t sum = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      sum += c.lengths[static_cast<std::size_t>(i)];
    }
    return sum;
  }
  std::int64_t length() const { return c.lengths[static_cast<std::size_t>(n)]; }
  Tensor tokens(const Tensor& t) const { return copied(tokens_of(t, c.layout, begin(), begin() + length())); }
  Tensor state(const Tensor& t) const { return t.defined() ? copied(part(t, 0, n, n + 1)) : Tensor(); }
  Training training(const Training& t) const {
    Training one{t.rule, tokens(t.d_o), state(t.dfinal), t.A_log, t.dt_bias};
    one.rule.c.lengths = {length()};
    Rule& r = one.rule;
    for (Tensor* x : {&r.q, &r.k, &r.v, &r.g, &r.beta}) {
      *x = tokens(*x);
    }
    r.h0 = state(r.h0);
    return one;
  }
  void expect(const GradientResult& all, const GradientResult& one) const {
    EXPECT_TRUE(same_bits(tokens(all.dq), one.dq)) << n;
    EXPECT_TRUE(same_bits(tokens(all.dk), one.dk)) << n;
    EXPECT_TRUE(same_bits(tokens(all.dv), one.dv)) << n;
    EXPECT_TRUE(same_bits(tokens(all.dg), one.dg)) << n;
    EXPECT_TRUE(same_bits(tokens(all.dbeta), one.dbeta)) << n;
    EXPECT_TRUE(same_bits(state(all.dh0), one.dh0)) << n;
  }
};

TEST(ChunkGatedDeltaRuleBwd, PackedHasTheBitsOfSeparateCalls) {
  for_each_isa([] {
    for (const Layout layout : {Layout::kTND, Layout::kNTD}) {
      Random random;
      const RuleCase c{.lengths = {65, 0, 1, 530, 64, 7},
                       .HK = 2,
                       .G = 2,
                       .K = 40,
                       .V = 24,
                       .dtype = DType::kBF16,
                       .layout = layout};
      const Training t = make_raw_training(random, c);
      const GradientResult all = backward(t, states_for(t));
      for (std::int64_t n = 0; n < 6; ++n) {
        const Cut cut{c, n};
        const Training one = cut.training(t);
        cut.expect(all, backward(one, states_for(one)));
      }
    }
  });
}

// Other sequences may hold anything, NaN too: not a bit moves.
TEST(ChunkGatedDeltaRuleBwd, SequencesDoNotMeet) {
  for_each_isa([] {
    Random random;
    const RuleCase c{.lengths = {40, 70, 33}, .HK = 1, .G = 3, .K = 20, .V = 36};
    const Training t = make_training(random, c);
    const GradientResult want = backward(t);
    Training changed = t;
    for (std::int64_t i = 40 * 20; i < 110 * 20; ++i) {
      changed.rule.k.set(i, std::numeric_limits<double>::quiet_NaN());
      changed.rule.q.set(i, random.normal());
    }
    for (std::int64_t i = 40 * 3 * 36; i < 110 * 3 * 36; ++i) {
      changed.d_o.set(i, std::numeric_limits<double>::infinity());
    }
    const GradientResult got = backward(changed);
    for (const std::int64_t n : {0, 2}) {
      const Cut cut{c, n};
      cut.expect(got, backward(cut.training(t)));
      cut.expect(want, backward(cut.training(t)));
    }
    EXPECT_FALSE(same_bits(got.dk, want.dk));
  });
}

TEST(ChunkGatedDeltaRuleBwd, ThreadsDoNotChangeBits) {
  Random random;
  const Training t = make_raw_training(
      random, {.lengths = {150, 300, 20, 1, 0, 90}, .HK = 3, .G = 2, .K = 32, .V = 100, .dtype = DType::kBF16});
  for_each_isa([&] {
    set_num_threads(1);
    const GradientResult want = backward(t, states_for(t));
    for_each_thread_count([&] { expect_same(backward(t, states_for(t)), want); });
  });
}

TEST(ChunkGatedDeltaRuleBwd, LayoutsHaveTheSameBits) {
  for_each_isa([] {
    Random random;
    const RuleCase c{.lengths = {300}, .HK = 2, .G = 2, .K = 20, .V = 36, .layout = Layout::kTND};
    const Training t = make_raw_training(random, c);
    const GradientResult want = backward(t);
    Training moved = t;
    moved.rule.c.layout = moved.rule.options.layout = Layout::kNTD;
    Rule& r = moved.rule;
    for (Tensor* x : {&r.q, &r.k, &r.v, &r.g, &r.beta, &moved.d_o}) {
      *x = copied(exchanged(*x, 0, 1));
    }
    GradientResult got = backward(moved);
    for (Tensor* x : {&got.dq, &got.dk, &got.dv, &got.dg, &got.dbeta}) {
      *x = copied(exchanged(*x, 0, 1));
    }
    expect_same(got, want);
    // The gradient of o in the layout that the forward was told to write.
    moved.rule.options.out_layout = Layout::kTND;
    moved.d_o = t.d_o;
    EXPECT_TRUE(same_bits(exchanged(backward(moved).dv, 0, 1), want.dv));
  });
}

// States from the forward, or computed again.
TEST(ChunkGatedDeltaRuleBwd, StatesGivenOrNot) {
  for_each_isa([] {
    for (const bool v_first : {false, true}) {
      Random random;
      Training t = make_training(random, {.lengths = {700, 256, 257, 0}, .HK = 1, .G = 2, .K = 20, .V = 20});
      t.rule.options.state_v_first = v_first;
      const Tensor states = states_for(t);
      EXPECT_EQ(states.sizes()[0], 3);
      if (v_first) {  // the helper made them K-first from the same numbers
        t.rule.h0 = copied(exchanged(t.rule.h0, 2, 3));
        t.dfinal = copied(exchanged(t.dfinal, 2, 3));
      }
      expect_same(backward(t), backward(t, states));
    }
  });
}

TEST(ChunkGatedDeltaRuleBwd, AbsentGradientsAreZero) {
  for_each_isa([] {
    Random random;
    Training t = make_training(random, {.lengths = {70, 0}, .HK = 1, .G = 2, .K = 20, .V = 36});
    Training zeros = t;
    zeros.d_o.fill(0.0);
    t.d_o = {};
    expect_same(backward(t), backward(zeros));
    t = zeros;
    t.dfinal = {};
    const GradientResult none = backward(t);
    for (const auto& [name, x] : none.all()) {
      for (const double value : x->defined() ? values(*x) : std::vector<double>{}) {
        EXPECT_EQ(value, 0.0) << name;
      }
    }
    // An empty sequence hands the gradient of its state on.
    EXPECT_TRUE(same_bits(part(backward(zeros).dh0, 0, 1, 2), part(zeros.dfinal, 0, 1, 2)));
  });
}

// Each gradient alone, and all but one, have the bits of all together.
TEST(ChunkGatedDeltaRuleBwd, OnlyWhatIsWanted) {
  for_each_isa([] {
    Random random;
    const Training t = make_raw_training(random, {.lengths = {300, 40}, .HK = 1, .G = 2, .K = 20, .V = 36});
    const GradientResult want = backward(t);
    const Rule& r = t.rule;
    for (std::size_t i = 0; i < want.all().size(); ++i) {
      for (const bool alone : {true, false}) {
        GradientResult d = empty_gradients(t);
        Tensor* const all[] = {&d.dq, &d.dk, &d.dv, &d.dg, &d.dbeta, &d.dh0, &d.dA_log, &d.ddt_bias};
        for (std::size_t j = 0; j < std::size(all); ++j) {
          if ((i == j) != alone) {
            *all[j] = {};
          }
        }
        chunk_gated_delta_rule_bwd(t.d_o, t.dfinal, r.q, r.k, r.v, r.g, r.beta, r.h0, {}, views(d), r.c.seq(),
                                   options_of(t));
        for (std::size_t j = 0; j < std::size(all); ++j) {
          if (all[j]->defined()) {
            EXPECT_TRUE(same_bits(*all[j], *want.all()[j].second)) << want.all()[j].first;
          }
        }
      }
    }
  });
}

// bf16 gates get gradients of their own type, rounded once.
TEST(ChunkGatedDeltaRuleBwd, GateGradientsInAnyType) {
  for_each_isa([] {
    Random random;
    const Training t = make_training(random, {.lengths = {40}, .HK = 1, .G = 2, .K = 20, .V = 16});
    const GradientResult want = backward(t);
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      GradientResult d = empty_gradients(t);
      d.dg = like(want.dg, dtype);
      d.dbeta = like(want.dbeta, dtype, padded());
      const Rule& r = t.rule;
      chunk_gated_delta_rule_bwd(t.d_o, t.dfinal, r.q, r.k, r.v, r.g, r.beta, r.h0, {}, views(d), r.c.seq(), r.options);
      EXPECT_TRUE(same_bits(d.dg, converted(want.dg, dtype)));
      EXPECT_TRUE(same_bits(d.dbeta, converted(want.dbeta, dtype)));
    }
  });
}

// The workspace of a thread: the states and values of one group of chunks, whatever the number of tokens.
TEST(ChunkGatedDeltaRuleBwd, MemoryIsBounded) {
  on_eight_callers([](int) {
    Random random;
    const std::int64_t K = 64, V = 64, G = 2;
    const auto run = [&](std::int64_t tokens) {
      const Training t = make_training(random, {.lengths = {tokens}, .HK = 1, .G = G, .K = K, .V = V});
      backward(t, states_for(t));
      return arena_capacity();
    };
    const std::size_t one_group = run(256);
    EXPECT_EQ(run(3000), one_group);
    EXPECT_LE(one_group, 4u << 20);
  });
}

TEST(ChunkGatedDeltaRuleBwd, EightCallersAtOnce) {
  Random random;
  const Training t = make_raw_training(random, {.lengths = {90, 20}, .HK = 2, .G = 2, .K = 24, .V = 40});
  const GradientResult want = backward(t);
  on_eight_callers([&](int) { expect_same(backward(t), want); });
}

}  // namespace
}  // namespace tidegate::test
