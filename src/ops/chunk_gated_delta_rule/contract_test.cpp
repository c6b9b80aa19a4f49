// chunk_gated_delta_rule_fwd: equal bits whatever the batch, states in every form, snapshots, memory, the plan.
#include <gtest/gtest.h>

#include "base/arena.h"
#include "ops/chunk_gated_delta_rule/plan.h"
#include "ops/chunk_gated_delta_rule/test_case.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

void expect_same(const RuleResult& a, const RuleResult& b) {
  EXPECT_TRUE(same_bits(a.o, b.o));
  EXPECT_TRUE(same_bits(a.ht, b.ht));
}

TEST(ChunkGatedDeltaRule, PackedHasTheBitsOfSeparateCalls) {
  for_each_isa([] {
    for (const Layout layout : {Layout::kTND, Layout::kNTD}) {
      Random random;
      const RuleCase c{.lengths = {65, 0, 1, 130, 64, 7},
                       .HK = 2,
                       .G = 2,
                       .K = 40,
                       .V = 24,
                       .dtype = DType::kBF16,
                       .layout = layout,
                       .precision = layout == Layout::kTND ? Precision::kFp32 : Precision::kBf16};
      const Rule r = make_rule(random, c);
      const RuleResult all = forward(r);
      std::int64_t begin = 0;
      for (std::size_t n = 0; n < c.lengths.size(); ++n) {
        const std::int64_t end = begin + c.lengths[n];
        const auto sequence = static_cast<std::int64_t>(n);
        const auto cut = [&](const Tensor& t) { return tokens_of(t, layout, begin, end); };
        RuleCase one = c;
        one.lengths = {c.lengths[n]};
        Tensor o(c.dtype, one.heads(4, c.V)), ht(DType::kF32, one.states(1));
        chunk_gated_delta_rule_fwd(cut(r.q), cut(r.k), cut(r.v), cut(r.g), cut(r.beta),
                                   part(r.h0, 0, sequence, sequence + 1), o, ht, {}, one.seq(), r.options);
        EXPECT_TRUE(same_bits(o, cut(all.o))) << n;
        EXPECT_TRUE(same_bits(ht, part(all.ht, 0, sequence, sequence + 1))) << n;
        begin = end;
      }
    }
  });
}

TEST(ChunkGatedDeltaRule, ThreadsAndBatchDoNotChangeBits) {
  Random random;
  const Rule alone = make_rule(random, {.lengths = {150}, .HK = 1, .G = 2, .K = 32, .V = 100});
  RuleCase many = alone.c;
  many.lengths.assign(64, 150);
  Rule batch = make_rule(random, many);
  for (const auto& [to, from] : {std::pair{&batch.q, &alone.q},
                                 {&batch.k, &alone.k},
                                 {&batch.v, &alone.v},
                                 {&batch.g, &alone.g},
                                 {&batch.beta, &alone.beta},
                                 {&batch.h0, &alone.h0}}) {
    for (std::int64_t i = 0; i < from->view().numel(); ++i) {
      to->set(17 * from->view().numel() + i, from->get(i));  // sequence 17 of the batch is the one alone
    }
  }
  for_each_isa([&] {
    set_num_threads(1);
    const RuleResult want = forward(alone);
    for_each_thread_count([&] {
      expect_same(forward(alone), want);
      const RuleResult got = forward(batch);
      EXPECT_TRUE(same_bits(tokens_of(got.o, batch.c.layout, 17 * 150, 18 * 150), want.o));
      EXPECT_TRUE(same_bits(part(got.ht, 0, 17, 18), want.ht));
    });
  });
}

TEST(ChunkGatedDeltaRule, LayoutsAndStridesHaveTheSameBits) {
  for_each_isa([] {
    Random random;
    const RuleCase c{.lengths = {70, 70}, .HK = 2, .G = 2, .K = 20, .V = 36, .layout = Layout::kBSND};
    const Rule r = make_rule(random, c);
    const RuleResult want = forward(r);
    Rule moved{c, {}, {}, {}, {}, {}, r.h0, r.options};
    const auto swap_heads = [&](const Tensor& t, const Form& form) {
      Sizes sizes = t.sizes();
      std::swap(sizes[1], sizes[2]);
      Tensor to(t.view().dtype, sizes, form);
      const Tensor from = copied(exchanged(t, 1, 2));
      for (std::int64_t i = 0; i < from.view().numel(); ++i) {
        to.set(i, from.get(i));
      }
      return to;
    };
    for (const Form& form : {Form{}, reversed(), padded()}) {
      moved.q = swap_heads(r.q, form);
      moved.k = swap_heads(r.k, form);
      moved.v = swap_heads(r.v, form);
      moved.g = swap_heads(r.g, form);
      moved.beta = swap_heads(r.beta, form);
      moved.c.layout = moved.options.layout = Layout::kBNSD;
      moved.options.out_layout = Layout::kBSND;
      expect_same(forward(moved), want);
    }
  });
}

TEST(ChunkGatedDeltaRule, StatesInEveryForm) {
  for_each_isa([] {
    Random random;
    Rule r = make_rule(random, {.lengths = {70, 0, 5}, .HK = 1, .G = 2, .K = 20, .V = 36});
    const RuleResult want = forward(r);
    // V-first is the same state, transposed.
    Rule flipped = r;
    flipped.options.state_v_first = true;
    flipped.h0 = copied(exchanged(r.h0, 2, 3));
    const RuleResult other = forward(flipped);
    EXPECT_TRUE(same_bits(other.o, want.o));
    EXPECT_TRUE(same_bits(exchanged(other.ht, 2, 3), want.ht));
    // bf16 storage rounds once, at the end.
    const RuleResult rounded = outputs(r, DType::kF32, DType::kBF16);
    chunk_gated_delta_rule_fwd(r.q, r.k, r.v, r.g, r.beta, r.h0, rounded.o, rounded.ht, {}, r.c.seq(), r.options);
    EXPECT_TRUE(same_bits(rounded.ht, converted(want.ht, DType::kBF16)));
    EXPECT_TRUE(same_bits(rounded.o, want.o));
    // An empty sequence hands its state on.
    EXPECT_TRUE(same_bits(part(want.ht, 0, 1, 2), part(r.h0, 0, 1, 2)));
    // Only the state.
    Tensor ht = like(want.ht);
    chunk_gated_delta_rule_fwd({}, r.k, r.v, r.g, r.beta, r.h0, {}, ht, {}, r.c.seq(), r.options);
    EXPECT_TRUE(same_bits(ht, want.ht));
    // No initial state is one of zeros.
    r.h0.fill(0.0);
    const RuleResult zeros = forward(r);
    r.h0 = {};
    expect_same(forward(r), zeros);
  });
}

TEST(ChunkGatedDeltaRule, PoolIsChangedInPlace) {
  for_each_isa([] {
    Random random;
    Rule r = make_rule(random, {.lengths = {70, 9, 0, 40}, .HK = 1, .G = 2, .K = 20, .V = 16});
    const std::int64_t slots[] = {4, -1, 0, 2};
    const std::uint8_t has[] = {1, 1, 1, 0};
    Tensor pool = normal(random, DType::kF32, {6, 2, 20, 16}, padded(3));
    const Tensor before = pool;
    for (std::int64_t n = 0; n < 4; ++n) {
      for (std::int64_t i = 0; i < 640; ++i) {
        r.h0.set(n * 640 + i, n == 3 ? 0.0 : pool.get((slots[n] < 0 ? 0 : slots[n]) * 640 + i));
      }
    }
    const RuleResult want = forward(r);
    Rule pooled = r;
    pooled.options.state_indices = slots;
    pooled.options.has_initial_state = has;
    const Tensor o = like(want.o);
    chunk_gated_delta_rule_fwd(r.q, r.k, r.v, r.g, r.beta, pool, o, pool, {}, r.c.seq(), pooled.options);
    for (const std::int64_t n : {0, 2, 3}) {
      EXPECT_TRUE(same_bits(part(pool, 0, slots[n], slots[n] + 1), part(want.ht, 0, n, n + 1))) << n;
    }
    for (const std::int64_t untouched : {1, 3, 5}) {
      EXPECT_TRUE(same_bits(part(pool, 0, untouched, untouched + 1), part(before, 0, untouched, untouched + 1)));
    }
    EXPECT_TRUE(pool.gaps_untouched());
    EXPECT_TRUE(same_bits(part(o, 0, 0, 70), part(want.o, 0, 0, 70)));
    EXPECT_TRUE(same_bits(part(o, 0, 79, 119), part(want.o, 0, 79, 119)));
    for (std::int64_t i = 70 * 32; i < 79 * 32; ++i) {
      ASSERT_EQ(o.get(i), 0.0);
    }
  });
}

// A snapshot has the bits of the final state of a run that ends there.
TEST(ChunkGatedDeltaRule, SnapshotsAnywhere) {
  for_each_isa([] {
    Random random;
    for (const Precision precision : {Precision::kFp32, Precision::kBf16}) {
      Rule r = make_rule(random, {.lengths = {200, 3, 131},
                                  .HK = 1,
                                  .G = 2,
                                  .K = 20,
                                  .V = 40,
                                  .dtype = DType::kBF16,
                                  .precision = precision,
                                  .slowest = 0.001});
      r.g.set(2 * 100, -300.0);  // a reset on the way
      const RuleResult plain = forward(r);
      const SnapshotPoint points[] = {{2, 131}, {0, 64}, {0, 0}, {0, 128}, {0, 101}, {0, 100}, {0, 99},
                                      {0, 200}, {1, 2},  {2, 1}, {0, 32},  {0, 96},  {0, 101}};
      r.options.snapshot_at = points;
      const RuleResult got = forward(r);
      expect_same(got, plain);
      const std::int64_t begins[] = {0, 200, 203};
      for (std::int64_t m = 0; m < 13; ++m) {
        const SnapshotPoint& at = points[m];
        const std::int64_t b = begins[at.sequence];
        const auto cut = [&](const Tensor& t) { return tokens_of(t, r.c.layout, b, b + at.tokens); };
        Tensor ht(DType::kF32, r.c.states(1));
        ChunkGatedDeltaRuleOptions options = r.options;
        options.snapshot_at = {};
        const std::int64_t lengths[] = {at.tokens};
        chunk_gated_delta_rule_fwd({}, cut(r.k), cut(r.v), cut(r.g), cut(r.beta),
                                   part(r.h0, 0, at.sequence, at.sequence + 1), {}, ht, {},
                                   SeqLens::from_lengths(lengths), options);
        EXPECT_TRUE(same_bits(part(got.snapshots, 0, m, m + 1), ht)) << at.sequence << " " << at.tokens;
      }
    }
  });
}

// Workspace beyond inputs and outputs: bounded, and the same for any number of tokens.
TEST(ChunkGatedDeltaRule, MemoryIsBounded) {
  set_num_threads(1);
  Random random;
  for (const std::int64_t T : {64, 4096}) {
    const Rule r = make_rule(random, {.lengths = {T}, .HK = 1, .G = 4, .K = 256, .V = 256, .initial = false});
    forward(r);
    EXPECT_LE(arena_capacity(), std::size_t{4} << 20) << T;
  }
}

TEST(ChunkGatedDeltaRulePlan, CoversEverythingOnceLongestFirst) {
  using chunk_gated_delta_rule::Piece;
  const std::int64_t lengths[] = {10, 5000, 0, 300};
  const SeqLens seq = SeqLens::from_lengths(lengths);
  for (const std::int64_t threads : {1, 2, 64}) {
    for (const std::int64_t most : {1, 3, 100}) {
      const std::vector<Piece> pieces = chunk_gated_delta_rule::plan(seq, 3, 16, most, threads);
      std::vector<int> seen(4 * 3 * 16, 0);
      std::int64_t last_cost = std::numeric_limits<std::int64_t>::max();
      for (const Piece& p : pieces) {
        EXPECT_LE(p.last - p.first, most == 100 ? 16 : most);
        const std::int64_t cost = seq[p.sequence].length() * (p.last - p.first);
        EXPECT_LE(cost, last_cost);
        last_cost = cost;
        for (std::int64_t c = p.first; c < p.last; ++c) {
          ++seen[static_cast<std::size_t>((p.sequence * 3 + p.key_head) * 16 + c)];
        }
      }
      for (const int count : seen) {
        EXPECT_EQ(count, 1);
      }
    }
  }
}

// One sequence, few heads: as many pieces as the threads need, no more.
TEST(ChunkGatedDeltaRulePlan, CutsOnlyForThreads) {
  const SeqLens one = SeqLens::dense(1, 4096);
  EXPECT_EQ(chunk_gated_delta_rule::plan(one, 16, 16, 32, 1).size(), 16u);
  EXPECT_EQ(chunk_gated_delta_rule::plan(one, 16, 16, 32, 2).size(), 16u);
  EXPECT_EQ(chunk_gated_delta_rule::plan(one, 2, 16, 32, 2).size(), 8u);
  EXPECT_EQ(chunk_gated_delta_rule::plan(one, 1, 16, 32, 64).size(), 16u);
}

}  // namespace
}  // namespace tidegate::test
