// recurrent_gated_delta_rule: equal bits whatever the batch and the form, memory, threads, the partition.
#include <gtest/gtest.h>

#include "base/arena.h"
#include "ops/recurrent_gated_delta_rule/partition.h"
#include "ops/recurrent_gated_delta_rule/test_case.h"

namespace tidegate::test {
namespace {

TEST(RecurrentGatedDeltaRule, GivenAndReturnedStates) {
  for_each_isa([] {
    for (const bool v_first : {false, true}) {
      Random random;
      Recurrence r = make_recurrence(random, {.lengths = {3, 0, 9}, .G = 2, .K = 20, .V = 36});
      r.options.state_v_first = v_first;
      r.h0 = v_first ? copied(exchanged(r.h0, 2, 3)) : r.h0;
      const RuleResult got = forward(r);
      Recurrence pool = r;
      const Indices slots = {0, 1, 2};
      pool.options.state_indices = slots;
      const Tensor states = r.h0, o = like(r.v);
      run_pool(pool, states, o, 0, 12, r.c.seq(), pool.options);
      EXPECT_TRUE(same_bits(got.o, o));
      EXPECT_TRUE(same_bits(got.ht, states));
      const Tensor alone = like(r.v);  // the last state is not wanted
      recurrent_gated_delta_rule_fwd(r.q, r.k, r.v, r.g, r.gk, r.beta, r.h0, alone, {}, r.c.seq(), r.options);
      EXPECT_TRUE(same_bits(alone, o));
      r.h0.fill(0.0);
      const RuleResult zeros = forward(r);
      r.h0 = {};
      EXPECT_TRUE(same_bits(forward(r).o, zeros.o));
      EXPECT_TRUE(same_bits(forward(r).ht, zeros.ht));
    }
  });
}

TEST(RecurrentGatedDeltaRule, BatchThreadsAndLayoutDoNotChangeBits) {
  for_each_isa([] {
    for (const bool v_first : {false, true}) {
      Random random;
      const RuleCase c{.lengths = {5, 1, 9, 2, 7}, .HK = 2, .G = 2, .K = 40, .V = 100, .dtype = DType::kBF16};
      Recurrence r = make_recurrence(random, c);
      r.options.state_v_first = v_first;
      r.h0 = v_first ? copied(exchanged(r.h0, 2, 3)) : r.h0;
      set_num_threads(1);
      const RuleResult want = forward(r);
      for_each_thread_count([&] {
        const RuleResult got = forward(r);
        EXPECT_TRUE(same_bits(got.o, want.o));
        EXPECT_TRUE(same_bits(got.ht, want.ht));
      });
      std::int64_t begin = 0;
      for (std::size_t n = 0; n < c.lengths.size(); ++n) {
        Recurrence one = r;
        const auto cut = [&](const Tensor& t) { return copied(tokens_of(t, c.layout, begin, begin + c.lengths[n])); };
        one.c.lengths = {c.lengths[n]};
        one.q = cut(r.q), one.k = cut(r.k), one.v = cut(r.v), one.g = cut(r.g), one.beta = cut(r.beta);
        one.h0 = copied(part(r.h0, 0, static_cast<std::int64_t>(n), static_cast<std::int64_t>(n) + 1));
        const RuleResult got = forward(one);
        EXPECT_TRUE(same_bits(got.o, tokens_of(want.o, c.layout, begin, begin + c.lengths[n])));
        begin += c.lengths[n];
      }
      Recurrence moved = r;
      moved.c.layout = moved.options.layout = Layout::kNTD;
      for (Tensor* t : {&moved.q, &moved.k, &moved.v, &moved.g, &moved.beta}) {
        *t = copied(exchanged(*t, 0, 1));
      }
      EXPECT_TRUE(same_bits(copied(exchanged(forward(moved).o, 0, 1)), want.o));
    }
  });
}

TEST(RecurrentGatedDeltaRule, CallersFlagsDoNotMatter) {
  Random random;
  Recurrence r = make_recurrence(random, {.lengths = {4, 3}, .K = 40, .V = 36, .slowest = 1.0});
  for (std::int64_t i = 0; i < r.h0.view().numel(); ++i) {
    r.h0.set(i, 1e-39 * r.h0.get(i));
  }
  r.v.fill([&](std::int64_t i) { return 1e-39 * static_cast<double>(i % 7); });
  const RuleResult want = forward(r);
  const FlushDenormals flush;
  const RuleResult got = forward(r);
  EXPECT_TRUE(flush.still_set());
  EXPECT_TRUE(same_bits(got.o, want.o));
  EXPECT_TRUE(same_bits(got.ht, want.ht));
}

// The scratch memory of a step is that of the step before.
TEST(RecurrentGatedDeltaRule, StepsDoNotGrowTheArena) {
  Random random;
  Recurrence r = make_recurrence(random, {.lengths = {1, 1, 1}, .HK = 2, .G = 2, .K = 64, .V = 64});
  const Tensor pool = make_pool(random, r, 3, DType::kF32), o = like(r.v);
  const Indices slots = {0, 1, 2};
  r.options.state_indices = slots;
  run_pool(r, pool, o, 0, 3, r.c.seq(), r.options);
  const std::size_t held = arena_capacity();
  for (int i = 0; i < 10; ++i) {
    run_pool(r, pool, o, 0, 3, r.c.seq(), r.options);
  }
  EXPECT_EQ(arena_capacity(), held);
}

TEST(RecurrentGatedDeltaRule, EightCallersWithTheirOwnPools) {
  Random random;
  Recurrence r = make_recurrence(random, {.lengths = {1, 4, 1}, .HK = 2, .G = 2, .K = 64, .V = 64});
  const Tensor start = make_pool(random, r, 3, DType::kF32);
  const Indices slots = {2, 0, 1};
  r.options.state_indices = slots;
  const Tensor want = start, o = like(r.v);
  for (int i = 0; i < 20; ++i) {
    run_pool(r, want, o, 0, 6, r.c.seq(), r.options);
  }
  std::vector<Tensor> pools(8, start), outs(8, like(r.v));
  on_eight_callers([&](int caller) {
    for (int i = 0; i < 20; ++i) {
      run_pool(r, pools[static_cast<std::size_t>(caller)], outs[static_cast<std::size_t>(caller)], 0, 6, r.c.seq(),
               r.options);
    }
  });
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_TRUE(same_bits(pools[i], want));
    EXPECT_TRUE(same_bits(outs[i], o));
  }
}

TEST(RecurrentGatedDeltaRule, Partition) {
  for (const std::int64_t sequences : {0, 1, 3, 64}) {
    for (const std::int64_t heads : {1, 2, 16}) {
      for (const std::int64_t tiles : {1, 3, 8}) {
        for (const std::int64_t threads : {1, 2, 7, 64}) {
          const recurrence::Partition p = recurrence::partition(sequences, heads, tiles, threads);
          EXPECT_GE(p.parts, 1);
          EXPECT_LE(p.parts, tiles);
          EXPECT_TRUE(p.parts == 1 || (p.parts - 1) * sequences * heads < 4 * threads) << "cut further than needed";
          EXPECT_TRUE(p.units() >= 4 * threads || p.parts == tiles || threads == 1 || sequences == 0);
          // Every tile of every head of every sequence exactly once, in order.
          std::int64_t seen = 0;
          for (std::int64_t i = 0; i < p.units(); ++i) {
            const recurrence::Place place = place_of(p, i);
            EXPECT_EQ((place.sequence * heads + place.key_head) * tiles + place.first, seen);
            EXPECT_LT(place.first, place.last);
            seen += place.last - place.first;
          }
          EXPECT_EQ(seen, sequences * heads * tiles);
        }
      }
    }
  }
  EXPECT_EQ(recurrence::partition(1, 16, 8, 2).parts, 1);  // one sequence of a model, two threads
}

}  // namespace
}  // namespace tidegate::test
