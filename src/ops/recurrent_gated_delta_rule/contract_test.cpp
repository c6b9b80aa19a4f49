// recurrent_gated_delta_rule: pools, verification and roll-back, equal bits, memory, threads, the partition.
#include <gtest/gtest.h>

#include <numeric>

#include "base/arena.h"
#include "ops/recurrent_gated_delta_rule/partition.h"
#include "ops/recurrent_gated_delta_rule/test_case.h"

namespace tidegate::test {
namespace {

using Indices = std::vector<std::int64_t>;

// A pool of random states of a type; V-first or not.
Tensor make_pool(Random& random, const Recurrence& r, std::int64_t slots, DType dtype, const Form& form = {}) {
  return normal(random, dtype, state_sizes(r, slots), form);
}
TensorView slot_of(const Tensor& pool, std::int64_t slot) { return part(pool, 0, slot, slot + 1); }

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

TEST(RecurrentGatedDeltaRule, OneCallHasTheBitsOfManyCalls) {
  for_each_pool([](DType dtype, bool v_first) {
    Random random;
    Recurrence r = make_recurrence(random, {.lengths = {21}, .HK = 2, .G = 2, .K = 40, .V = 68, .dtype = DType::kBF16});
    r.options.state_v_first = v_first;
    const Indices slot = {1};
    r.options.state_indices = slot;
    const Tensor start = make_pool(random, r, 3, dtype);
    const Tensor once = start, many = start, o1 = like(r.v), o2 = like(r.v);
    run_pool(r, once, o1, 0, 21, SeqLens::dense(1, 21), r.options);
    for (std::int64_t t = 0; t < 21; ++t) {
      run_pool(r, many, o2, t, t + 1, SeqLens::dense(1, 1), r.options);
    }
    EXPECT_TRUE(same_bits(o1, o2));
    EXPECT_TRUE(same_bits(once, many));
    EXPECT_TRUE(same_bits(slot_of(once, 0), slot_of(start, 0)));
    EXPECT_TRUE(same_bits(slot_of(once, 2), slot_of(start, 2)));
  });
}

// Verify 5 tokens, accept a of them, verify the next 5 from there: what plain decoding gives, for every a.
TEST(RecurrentGatedDeltaRule, RollBackToEveryLength) {
  for_each_pool([](DType dtype, bool v_first) {
    Random random;
    Recurrence r = make_recurrence(random, {.lengths = {10}, .HK = 1, .G = 2, .K = 24, .V = 40});
    r.options.state_v_first = v_first;
    const Tensor start = make_pool(random, r, 7, dtype);
    const Indices slots = {4, 0, 6, 2, 5};
    // Plain decoding; states[t] after token t.
    const Indices plain_slot = {4};
    RecurrentGatedDeltaRuleOptions options = r.options;
    options.state_indices = plain_slot;
    const Tensor o = like(r.v);
    Tensor decoded = start;
    std::vector<Tensor> states;
    for (std::int64_t t = 0; t < 10; ++t) {
      run_pool(r, decoded, o, t, t + 1, SeqLens::dense(1, 1), options);
      states.push_back(copied(slot_of(decoded, 4)));
    }
    options.state_indices = slots;
    options.states_per_sequence = 5;
    for (std::int64_t accepted = 1; accepted <= 5; ++accepted) {
      const Tensor pool = start, got = like(r.v);
      run_pool(r, pool, got, 0, 5, SeqLens::dense(1, 5), options);
      EXPECT_TRUE(same_bits(part(got, 0, 0, 5), part(o, 0, 0, 5)));
      for (std::int64_t t = 0; t < 5; ++t) {
        EXPECT_TRUE(same_bits(slot_of(pool, slots[static_cast<std::size_t>(t)]), states[static_cast<std::size_t>(t)]));
      }
      const Indices count = {accepted};
      RecurrentGatedDeltaRuleOptions next = options;
      next.num_accepted_tokens = count;
      run_pool(r, pool, got, accepted, accepted + 5, SeqLens::dense(1, 5), next);
      EXPECT_TRUE(same_bits(part(got, 0, accepted, accepted + 5), part(o, 0, accepted, accepted + 5))) << accepted;
      EXPECT_TRUE(same_bits(slot_of(pool, 5), states[static_cast<std::size_t>(accepted + 4)])) << accepted;
      EXPECT_TRUE(same_bits(slot_of(pool, 1), slot_of(start, 1)));
      EXPECT_TRUE(same_bits(slot_of(pool, 3), slot_of(start, 3)));
    }
  });
}

// Skipped and empty sequences, states that are not stored, fresh starts; a pool with gaps.
TEST(RecurrentGatedDeltaRule, NullSlotsAndFreshStarts) {
  for_each_pool([](DType dtype, bool v_first) {
    Random random;
    Recurrence r = make_recurrence(random, {.lengths = {2, 0, 3, 1, 2}, .HK = 1, .G = 2, .K = 24, .V = 40});
    r.options.state_v_first = v_first;
    r.options.null_slot = 0;
    const Tensor start = make_pool(random, r, 9, dtype, padded());
    const Indices slots = {1, 2, 3, /**/ 8, 0, 0, /**/ 0, 0, 0, /**/ 5, 6, 7, /**/ 4, 0, 0};
    const std::vector<std::uint8_t> has = {0, 1, 1, 1, 1};
    r.options.state_indices = slots;
    r.options.states_per_sequence = 3;
    r.options.has_initial_state = has;
    const Tensor pool = start, o = like(r.v);
    run_pool(r, pool, o, 0, 8, r.c.seq(), r.options);
    EXPECT_TRUE(pool.gaps_untouched());
    for (std::int64_t i = 0; i < 3 * 80; ++i) {
      EXPECT_EQ(o.get(2 * 80 + i), 0.0);  // sequence 2 starts from the null slot
    }
    for (const std::int64_t slot : {0, 3, 6, 7, 8}) {
      EXPECT_TRUE(same_bits(slot_of(pool, slot), slot_of(start, slot))) << slot;
    }
    // Sequence 0 from zeros, sequence 4 from its slot, each alone.
    Tensor alone = start, o2 = like(r.v);
    for (std::int64_t i = 0; i < slot_of(alone, 1).numel(); ++i) {
      alone.set(slot_of(alone, 1).numel() + i, 0.0);
    }
    RecurrentGatedDeltaRuleOptions one = r.options;
    one.has_initial_state = {};
    one.state_indices = std::span(slots).subspan(0, 3);
    run_pool(r, alone, o2, 0, 2, SeqLens::dense(1, 2), one);
    EXPECT_TRUE(same_bits(slot_of(alone, 1), slot_of(pool, 1)));
    EXPECT_TRUE(same_bits(slot_of(alone, 2), slot_of(pool, 2)));
    EXPECT_TRUE(same_bits(part(o2, 0, 0, 2), part(o, 0, 0, 2)));
    one.state_indices = std::span(slots).subspan(12, 3);
    run_pool(r, alone, o2, 6, 8, SeqLens::dense(1, 2), one);
    EXPECT_TRUE(same_bits(slot_of(alone, 4), slot_of(pool, 4)));  // the state between its two tokens is not stored
    EXPECT_TRUE(same_bits(part(o2, 0, 6, 8), part(o, 0, 6, 8)));
  });
}

// Two sequences may start from one state; a state that is not wanted may be dropped.
TEST(RecurrentGatedDeltaRule, ForksFromOneState) {
  Random random;
  Recurrence r = make_recurrence(random, {.lengths = {1, 1}, .K = 24, .V = 40});
  const Tensor pool = make_pool(random, r, 4, DType::kF32), start = pool, o = like(r.v);
  const Indices slots = {1, 0, 2, 0}, accepted = {2, 2};
  r.options.state_indices = slots;
  r.options.states_per_sequence = 2;
  r.options.num_accepted_tokens = accepted;
  run_pool(r, pool, o, 0, 2, r.c.seq(), r.options);
  EXPECT_TRUE(same_bits(slot_of(pool, 0), slot_of(start, 0)));
  EXPECT_FALSE(same_bits(slot_of(pool, 1), slot_of(pool, 2)));
}

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
