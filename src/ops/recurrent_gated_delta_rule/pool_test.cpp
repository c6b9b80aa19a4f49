// recurrent_gated_delta_rule on pools: verification and roll-back, null slots, forks, mixed batches.
#include <gtest/gtest.h>

#include "ops/recurrent_gated_delta_rule/test_case.h"

namespace tidegate::test {
namespace {

TEST(RecurrentGatedDeltaRule, OneCallHasTheBitsOfManyCalls) {
  for_each_pool([](DType dtype, bool v_first) {
    Random random;
    Recurrence r = make_recurrence(random, {.lengths = {16}, .HK = 2, .G = 2, .K = 40, .V = 68, .dtype = DType::kBF16});
    r.options.state_v_first = v_first;
    const Indices slot = {1};
    r.options.state_indices = slot;
    const Tensor start = make_pool(random, r, 3, dtype);
    const Tensor once = start, many = start, o1 = like(r.v), o2 = like(r.v);
    run_pool(r, once, o1, 0, 16, SeqLens::dense(1, 16), r.options);
    for (std::int64_t t = 0; t < 16; ++t) {
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

// Decode steps, a verification and prompts in one call: each has the bits it has alone, by the form of its length.
TEST(RecurrentGatedDeltaRule, MixedBatch) {
  for_each_pool([](DType dtype, bool v_first) {
    Random random;
    Recurrence r = make_recurrence(random, {.lengths = {1, 70, 16, 0, 17, 1, 5}, .HK = 2, .G = 2, .K = 24, .V = 40});
    r.options.state_v_first = v_first;
    const Indices slots = {8, 3, 0, 1, 2, -1, 5};
    const std::vector<std::uint8_t> has = {1, 0, 1, 1, 1, 1, 0};
    r.options.state_indices = slots;
    r.options.has_initial_state = has;
    const Tensor start = make_pool(random, r, 9, dtype), pool = start, o = like(r.v);
    run_pool(r, pool, o, 0, 110, r.c.seq(), r.options);
    std::int64_t begin = 0;
    for (std::size_t n = 0; n < slots.size(); ++n) {
      const std::int64_t end = begin + r.c.lengths[n];
      const Tensor alone = start, o2 = like(r.v);
      RecurrentGatedDeltaRuleOptions one = r.options;
      one.state_indices = std::span(slots).subspan(n, 1);
      one.has_initial_state = std::span(has).subspan(n, 1);
      if (end - begin > recurrent_tokens()) {
        ChunkGatedDeltaRuleOptions chunk = recurrence::chunk_options(one);
        chunk.state_indices = one.state_indices;
        chunk.has_initial_state = one.has_initial_state;
        const auto cut = [&](const Tensor& t) { return tokens_of(t, r.c.layout, begin, end); };
        chunk_gated_delta_rule_pool(cut(r.q), cut(r.k), cut(r.v), cut(r.g), cut(r.beta), alone, cut(o2),
                                    SeqLens::dense(1, end - begin), chunk);
      } else {
        run_pool(r, alone, o2, begin, end, SeqLens::dense(1, end - begin), one);
      }
      EXPECT_TRUE(same_bits(tokens_of(o2, r.c.layout, begin, end), tokens_of(o, r.c.layout, begin, end))) << n;
      if (slots[n] >= 0) {
        EXPECT_TRUE(same_bits(slot_of(alone, slots[n]), slot_of(pool, slots[n]))) << n;
      }
      begin = end;
    }
    for (const std::int64_t slot : {1, 4, 6, 7}) {
      EXPECT_TRUE(same_bits(slot_of(pool, slot), slot_of(start, slot))) << slot;
    }
    Recurrence given = r;  // the functional form, states in and out
    given.options.state_indices = {};
    given.options.has_initial_state = {};
    given.h0 = v_first ? copied(exchanged(r.h0, 2, 3)) : r.h0;
    Accuracy values;
    const RuleResult got = forward(given);
    values.add(got.o, plain(given).o, forward(wide(given)).o, 1e-6);
    values.expect("o", 1e-6);
  });
}

}  // namespace
}  // namespace tidegate::test
