// gdn_packed_decode: the bits of the separate operators, whatever the projection, the types and the batch.
#include <gtest/gtest.h>

#include <cmath>

#include "base/arena.h"
#include "ops/gdn_packed_decode/problem.h"
#include "ops/gdn_packed_decode/test_case.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

using Indices = std::vector<std::int64_t>;

void expect_same_step(const Layer& layer, const SeqLens& seq) {
  const Layer apart = layer;
  const Tensor got = decode(layer, seq), want = decode_separately(apart, seq);
  EXPECT_TRUE(same_bits(got, want));
  EXPECT_TRUE(same_bits(layer.conv_state, apart.conv_state));
  EXPECT_TRUE(same_bits(layer.state, apart.state));
  EXPECT_TRUE(layer.conv_state.gaps_untouched());
}

TEST(GdnPackedDecode, HasTheBitsOfTheSeparateOperators) {
  for_each_isa([] {
    for (const DType dtype : kKernelTypes) {
      for (const Projection projection : {Projection::kQkv, Projection::kQkvzBa}) {
        Random random;
        for (const auto& [K, V, G] : {std::tuple{24, 40, 2}, {128, 128, 1}, {17, 33, 3}, {64, 300, 2}}) {
          LayerCase c{.lengths = {1, 1, 1, 1, 1}, .HK = 2, .G = G, .K = K, .V = V, .dtype = dtype};
          c.projection = projection;
          c.bias = K != 128;
          c.W = K == 17 ? 3 : 4;
          c.S = K == 24 ? 5 : 3;
          c.v_first = K == 17;
          c.storage = K == 64 ? DType::kBF16 : DType::kF32;
          Layer l = make_layer(random, c);
          const Indices slots = {3, -1, 0, 5, 2};
          l.options.state_indices = slots;
          const SeqLens seq = SeqLens::from_lengths(c.lengths);
          for (int step = 0; step < 3; ++step) {
            expect_same_step(l, seq);
          }
        }
      }
    }
  });
}

// exp(A_log) overflows for some heads, and their gates are closed: g is 0 there, not inf * 0.
TEST(GdnPackedDecode, InfiniteRates) {
  for_each_isa([] {
    Random random;
    Layer l = make_layer(random, {.lengths = {1, 1}, .dtype = DType::kF32});
    const Indices slots = {3, 1};
    l.options.state_indices = slots;
    l.A_log.fill([](std::int64_t h) { return h % 2 == 0 ? 100.0 : 0.5; });
    l.a.fill([](std::int64_t i) { return i % 4 == 0 ? -1e4 : 0.3; });
    expect_same_step(l, SeqLens::from_lengths(l.c.lengths));
    const Tensor y = decode(l, SeqLens::from_lengths(l.c.lengths));
    for (std::int64_t i = 0; i < y.view().numel(); ++i) {
      ASSERT_TRUE(std::isfinite(y.get(i))) << i;
    }
  });
}

TEST(GdnPackedDecode, NormOptions) {
  for_each_isa([] {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const Rounding rounding : {Rounding::kHf, Rounding::kFp32}) {
        for (const Activation activation : {Activation::kSilu, Activation::kSigmoid}) {
          Random random;
          Layer l = make_layer(random, {.lengths = {1, 1}, .dtype = dtype});
          const Indices slots = {3, 1}, rows = {0, 5};
          l.options.state_indices = slots;
          l.options.conv_indices = rows;
          l.options.scale = 0.3;
          l.options.norm = {1e-5, activation, rounding};
          l.norm_weight = converted(l.norm_weight, DType::kF32);
          l.conv_weight = converted(l.conv_weight, DType::kF64);
          l.dt_bias = {};
          expect_same_step(l, SeqLens::from_lengths(l.c.lengths));
        }
      }
    }
  });
}

// Verification of several tokens with every count of accepted ones, empty and skipped sequences among them.
TEST(GdnPackedDecode, Verification) {
  for_each_isa([] {
    for (const Projection projection : {Projection::kQkv, Projection::kQkvzBa}) {
      for (std::int64_t accepted = 1; accepted <= 4; ++accepted) {
        Random random;
        Layer l = make_layer(random, {.lengths = {4, 0, 3, 1}, .S = 6, .slots = 20, .projection = projection});
        const Indices slots = {0, 1, 2, 3, /**/ 4, 5, 6, 7, /**/ 8, 9, -1, 11, /**/ -1, -1, -1, -1};
        const Indices first = {1, 1, 1, 1}, counts = {accepted, 1, 2, 1};
        l.options.state_indices = slots;
        l.options.states_per_sequence = 4;
        l.options.num_accepted_tokens = first;
        const SeqLens seq = SeqLens::from_lengths(l.c.lengths);
        expect_same_step(l, seq);
        l.options.num_accepted_tokens = counts;
        expect_same_step(l, seq);
      }
    }
  });
}

TEST(GdnPackedDecode, BatchAndThreadsDoNotChangeBits) {
  Random random;
  LayerCase c{.lengths = std::vector<std::int64_t>(40, 1), .HK = 3, .slots = 40};
  Layer l = make_layer(random, c);
  Indices slots(40);
  for (std::int64_t n = 0; n < 40; ++n) {
    slots[static_cast<std::size_t>(n)] = (7 * n + 3) % 40;
  }
  l.options.state_indices = slots;
  const SeqLens seq = SeqLens::from_lengths(c.lengths);
  for_each_isa([&] {
    set_num_threads(1);
    const Layer one = l;
    const Tensor want = decode(one, seq);
    for_each_thread_count([&] {
      const Layer many = l;
      EXPECT_TRUE(same_bits(decode(many, seq), want));
      EXPECT_TRUE(same_bits(many.state, one.state));
    });
    // Sequence 17 alone.
    Layer alone = l;
    alone.c.lengths = {1};
    for (Tensor* t : {&alone.q, &alone.k, &alone.v, &alone.z, &alone.a, &alone.b}) {
      *t = copied(part(*t, 0, 17, 18));
    }
    const Indices slot = {slots[17]};
    alone.options.state_indices = slot;
    EXPECT_TRUE(same_bits(decode(alone, SeqLens::dense(1, 1)), part(want, 0, 17, 18)));
  });
}

TEST(GdnPackedDecode, StepsDoNotGrowTheArena) {
  Random random;
  Layer l = make_layer(random, {.lengths = {1, 1, 1}});
  const Indices slots = {0, 1, 2};
  l.options.state_indices = slots;
  const SeqLens seq = SeqLens::from_lengths(l.c.lengths);
  decode(l, seq);
  const std::size_t held = arena_capacity();
  for (int i = 0; i < 10; ++i) {
    decode(l, seq);
  }
  EXPECT_EQ(arena_capacity(), held);
}

TEST(GdnPackedDecode, EightCallersWithTheirOwnPools) {
  Random random;
  Layer l = make_layer(random, {.lengths = {1, 1, 1}});
  const Indices slots = {4, 1, 2};
  l.options.state_indices = slots;
  const SeqLens seq = SeqLens::from_lengths(l.c.lengths);
  std::vector<Layer> layers(9, l);
  const auto run = [&](Layer& layer) {
    for (int i = 0; i < 10; ++i) {
      decode(layer, seq);
    }
  };
  run(layers[8]);
  on_eight_callers([&](int caller) { run(layers[static_cast<std::size_t>(caller)]); });
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_TRUE(same_bits(layers[i].state, layers[8].state));
    EXPECT_TRUE(same_bits(layers[i].conv_state, layers[8].conv_state));
  }
}

TEST(GdnPackedDecode, SequencesPerTask) {
  EXPECT_EQ(packed_decode::sequences_per_task(1, 16, 2), 1);
  EXPECT_EQ(packed_decode::sequences_per_task(64, 16, 2), 8);
  EXPECT_EQ(packed_decode::sequences_per_task(16, 16, 64), 1);
  EXPECT_EQ(packed_decode::sequences_per_task(0, 16, 2), 1);
  EXPECT_EQ(packed_decode::sequences_per_task(4, 16, 2), 4);
}

}  // namespace
}  // namespace tidegate::test
