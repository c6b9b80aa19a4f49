// causal_conv1d_update: the four modes against their definition, slots, layouts, and equality with the forward.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/causal_conv1d/test_case.h"
#include "ops/causal_conv1d/update_case.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

constexpr StateMode kModes[] = {StateMode::kTail, StateMode::kHead, StateMode::kCircular, StateMode::kSpeculative};

void expect_definition(const Update& u, const std::string& what) {
  SCOPED_TRACE(what);
  Update by_operator = u;
  Update by_definition = u;
  const Tensor y = run(by_operator);
  EXPECT_TRUE(same_bits(y, expected(by_definition)));
  EXPECT_TRUE(same_bits(by_operator.pool, by_definition.pool));
  EXPECT_TRUE(by_operator.pool.gaps_untouched());
}

TEST(CausalConv1dUpdate, EveryModeIsItsDefinition) {
  for_each_isa([] {
    Random random;
    for (const StateMode mode : kModes) {
      for (const DType dtype : kKernelTypes) {
        for (std::int64_t W = 2; W <= 4; ++W) {
          for (const std::int64_t S : {W - 1, W, W + 2, W + 9}) {
            for (const Form& form : {Form{}, permuted({0, 2, 1}), low(reversed())}) {
              const std::int64_t D = S == W ? 530 : 19;
              expect_definition(random_update(random, mode, dtype, D, W, S, form),
                                "mode " + std::to_string(static_cast<int>(mode)) + " " +
                                    std::string(dtype_name(dtype)) + " W=" + std::to_string(W) +
                                    " S=" + std::to_string(S));
            }
          }
        }
      }
    }
  });
}

// Without cache_indices sequence n has row n; rows beyond stay. Counts beyond all rows, and without activation.
TEST(CausalConv1dUpdate, IdentitySlots) {
  for_each_isa([] {
    Random random;
    Update u = random_update(random, StateMode::kCircular, DType::kF32, 40, 4, 5, {});
    u.slots = {};
    u.has_state = {};
    u.silu = false;
    u.pool.fill([&](std::int64_t) { return random.normal(); });
    expect_definition(u, "identity");
    Update late = u;
    const std::int64_t last = std::numeric_limits<std::int64_t>::max();
    for (std::int64_t& count : u.counts) {
      count = last % 5;
    }
    late.counts.assign(u.counts.size(), last);
    EXPECT_TRUE(same_bits(run(late), run(u)));
    EXPECT_TRUE(same_bits(late.pool, u.pool));
  });
}

// Steps of several sizes give the bits of one forward.
TEST(CausalConv1dUpdate, StepsEqualTheForward) {
  for_each_isa([] {
    for (const DType dtype : kKernelTypes) {
      for (std::int64_t W = 2; W <= 4; ++W) {
        Random random;
        const Conv v = make_conv(random, {.T = 40, .D = 37, .W = W, .dtype = dtype, .final_state = W});
        const ConvForward all = forward(v);
        for (const StateMode mode : {StateMode::kTail, StateMode::kHead, StateMode::kCircular}) {
          for (const std::int64_t S : {W, W + 7}) {  // circular: S >= W-1 and steps of any size
            SCOPED_TRACE("mode " + std::to_string(static_cast<int>(mode)) + " " + v.c.text());
            Update u{mode, {}, Tensor(dtype, {1, 37, S}), v.weight, v.bias, {}};
            u.pool.fill(0.0);
            std::int64_t t = 0;
            for (const std::int64_t step : {1, 1, 2, 1, 5, 3, 1, 4, 1, 9, 1, 1, 1, 9}) {
              u.lengths = {step};
              u.counts = {t};
              u.x = Tensor(dtype, {step, 37}).fill([&](std::int64_t i) { return v.x.get(t * 37 + i); });
              EXPECT_TRUE(same_bits(run(u), part(all.y, 0, t, t + step))) << "token " << t;
              t += step;
            }
            ASSERT_EQ(t, 40);
            if (mode == StateMode::kTail) {
              EXPECT_TRUE(same_bits(part(u.pool, 2, S - W, S), all.final_state));
            }
          }
        }
      }
    }
  });
}

// A prompt, then verification steps that keep every possible number of tokens: always the bits of the forward.
TEST(CausalConv1dUpdate, SpeculativeStepsEqualTheForward) {
  for_each_isa([] {
    for (std::int64_t W = 2; W <= 4; ++W) {
      Random random;
      const Conv v = make_conv(random, {.T = 30, .D = 37, .W = W, .dtype = DType::kBF16});
      const Tensor y = forward(v).y;
      const auto step = [&](Update& u, std::int64_t t, std::int64_t n) {
        u.lengths = {n};
        u.x = Tensor(DType::kBF16, {n, 37}).fill([&](std::int64_t i) { return v.x.get(t * 37 + i); });
        EXPECT_TRUE(same_bits(run(u), part(y, 0, t, t + n))) << "token " << t << " W=" << W;
      };
      for (std::int64_t first = 1; first <= 5; ++first) {
        for (std::int64_t second = 1; second <= 5; ++second) {
          Update u{StateMode::kHead, {}, Tensor(DType::kBF16, {1, 37, W - 1 + 4}), v.weight, v.bias, {}, {}, {}, {0}};
          step(u, 0, 6);
          u.mode = StateMode::kSpeculative;
          u.has_state = {};
          std::int64_t t = 6;
          for (const std::int64_t kept : {std::int64_t{0}, first, second}) {  // of the previous step
            t += kept;
            u.counts = {std::max<std::int64_t>(kept, 1)};  // after a prompt: 1
            step(u, t, 5);
          }
        }
      }
    }
  });
}

// operators.md 4.2: W=4, row [h1 h2 h3 . . .], one accepted, tokens t0..t3 -> [h2 h3 t0 t1 t2 t3]; then two accepted.
TEST(CausalConv1dUpdate, WorkedExample) {
  for_each_isa([] {
    Update u;
    u.mode = StateMode::kSpeculative;
    u.silu = false;
    u.x = Tensor(DType::kF32, {4, 1}).fill([](std::int64_t i) { return 100.0 + static_cast<double>(i); });
    u.pool =
        Tensor(DType::kF32, {1, 1, 6}).fill([](std::int64_t i) { return i < 3 ? 1.0 + static_cast<double>(i) : 0.0; });
    u.weight =
        Tensor(DType::kF32, {1, 4}).fill([](std::int64_t i) { return i == 0 ? 1.0 : 0.0; });  // the oldest sample
    u.lengths = {4};
    u.counts = {1};
    EXPECT_EQ(values(run(u)), (std::vector<double>{1, 2, 3, 100}));
    EXPECT_EQ(values(u.pool), (std::vector<double>{2, 3, 100, 101, 102, 103}));
    u.counts = {2};
    EXPECT_EQ(values(run(u)), (std::vector<double>{3, 100, 101, 100}));  // history h3 t0 t1
  });
}

// [B,T,D] and head-major results, a skipped row among them.
TEST(CausalConv1dUpdate, LayoutsHaveTheSameBits) {
  for_each_isa([] {
    Random random;
    Update u = random_update(random, StateMode::kTail, DType::kF16, 42, 4, 4, {});
    u.lengths.assign(6, 3);
    u.x = normal(random, DType::kF16, {18, 42});
    u.pool.fill([&](std::int64_t) { return random.normal(); });
    Update batch = u;
    const Tensor y = run(u);
    const Tensor heads(DType::kF16, {6, 7, 3, 6}, padded());
    CausalConv1dUpdateOptions options = batch.options();
    options.layout = Layout::kBSND;
    options.head_num = 7;
    const TensorView x = contiguous(batch.x.view().data, DType::kF16, {6, 3, 42});
    const TensorView tokens = contiguous(y.view().data, DType::kF16, {6, 3, 42});
    causal_conv1d_update(x, batch.pool, batch.weight, batch.bias, heads, SeqLens::dense(6, 3), options);
    EXPECT_TRUE(same_bits(heads, exchanged(with_heads(tokens, 7), 1, 2)));
    EXPECT_TRUE(same_bits(batch.pool, u.pool));
    EXPECT_TRUE(heads.gaps_untouched());
  });
}

TEST(CausalConv1dUpdate, BitsDoNotDependOnThreadsOrCallers) {
  for_each_isa([] {
    Random random;
    Update u;
    u.lengths.assign(40, 1);
    u.x = normal(random, DType::kBF16, {40, 600});
    u.weight = normal(random, DType::kBF16, {600, 4});
    u.pool = normal(random, DType::kBF16, {40, 600, 4});
    const auto result = [&] {
      Update copy = u;
      Tensor y = run(copy);
      return std::pair(std::move(y), std::move(copy.pool));
    };
    const auto once = result();
    for_each_thread_count([&] {
      const auto again = result();
      EXPECT_TRUE(same_bits(again.first, once.first) && same_bits(again.second, once.second));
    });
    on_eight_callers([&](int) {
      const auto again = result();
      EXPECT_TRUE(same_bits(again.first, once.first) && same_bits(again.second, once.second));
    });
  });
}

TEST(CausalConv1dUpdate, CallersFlushToZeroDoesNotMatter) {
  for_each_isa([] {
    Random random;
    Update u = random_update(random, StateMode::kTail, DType::kF32, 40, 4, 4, {});
    u.silu = false;
    for (Tensor* t : {&u.x, &u.pool, &u.bias}) {
      t->fill([&](std::int64_t) { return random.normal() * 1e-39; });
    }
    Update again = u;
    const Tensor y = run(u);
    const FlushDenormals flush;
    const Tensor flushed = run(again);
    EXPECT_TRUE(flush.still_set());
    EXPECT_TRUE(same_bits(flushed, y));
    EXPECT_TRUE(same_bits(again.pool, u.pool));
  });
}

}  // namespace
}  // namespace tidegate::test
