// causal_conv1d_fwd: threads, strides, page ends, streamed stores; and the decisions about partition and stores.
#include <gtest/gtest.h>

#include "ops/causal_conv1d/partition.h"
#include "ops/causal_conv1d/test_case.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

using causal_conv1d::channel_blocks;
using causal_conv1d::should_stream;
using causal_conv1d::token_blocks;
using causal_conv1d::TokenBlock;

TEST(CausalConv1d, BitsDoNotDependOnThreadsOrCallers) {
  for_each_isa([] {
    Random random;
    const Conv v = make_conv(
        random, {.T = 330, .D = 1030, .dtype = DType::kBF16, .state = 3, .final_state = 4, .lengths = {130, 200}});
    const ConvForward once = forward(v);
    for_each_thread_count([&] {
      const ConvForward again = forward(v);
      EXPECT_TRUE(same_bits(again.y, once.y));
      EXPECT_TRUE(same_bits(again.final_state, once.final_state));
    });
    on_eight_callers([&](int) {
      const ConvForward again = forward(v);
      EXPECT_TRUE(same_bits(again.y, once.y));
    });
  });
}

// Strides of all kinds, memory that begins or ends at an unmapped page, NaN between the rows.
TEST(CausalConv1d, AnyMemory) {
  for_each_isa([] {
    for (const DType dtype : kKernelTypes) {
      for (const std::int64_t D : {1, 7, 21, 515}) {
        ConvCase c{.T = 9, .D = D, .dtype = dtype, .layout = Layout::kBSND, .B = 3, .state = 4, .final_state = 3};
        Random random(3);
        const ConvForward dense = forward(make_conv(random, c));
        for (const Form& form : {low(), padded(), low(reversed()), permuted({1, 0, 2}, 3)}) {
          c.form = form;
          c.state_form = form;
          Random again(3);
          const ConvForward out = forward(make_conv(again, c));
          EXPECT_TRUE(same_bits(out.y, dense.y)) << c.text();
          EXPECT_TRUE(same_bits(out.final_state, dense.final_state)) << c.text();
          EXPECT_TRUE(out.y.gaps_untouched() && out.final_state.gaps_untouched()) << c.text();
        }
      }
    }
  });
}

TEST(CausalConv1d, CallersFlushToZeroDoesNotMatter) {
  for_each_isa([] {
    for (const DType dtype : kKernelTypes) {
      Random random;
      Conv v = make_conv(random, {.T = 9, .D = 40, .dtype = dtype, .silu = false, .weight_type = dtype});
      v.x.fill([&](std::int64_t) { return random.normal() * (dtype == DType::kF16 ? 1e-6 : 1e-39); });
      v.bias.fill([&](std::int64_t) { return random.normal() * 1e-39; });
      const Tensor y = forward(v).y;
      ASSERT_NE(y.get(50), 0.0);
      const FlushDenormals flush;
      ConvForward out = outputs_of(v);
      causal_conv1d_fwd(v.x, v.weight, v.bias, v.initial, out.y, out.final_state, v.seq, v.c.options());
      EXPECT_TRUE(flush.still_set());
      EXPECT_TRUE(same_bits(out.y, y)) << dtype_name(dtype);
    }
  });
}

TEST(CausalConv1d, StreamedStoresHaveTheSameBits) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::int64_t T = dtype == DType::kF32 ? 515 : 1030;
    const std::int64_t D = 8192;
    Random random;
    const Conv v = make_conv(random, {.T = 1, .D = D, .dtype = dtype});
    const Tensor source = sliding_source(random, dtype, T, D);
    const Sizes lengths = {T - 7, 7};
    for_each_isa([&] {
      expect_streamed_bits(dtype, T, D, [&](const TensorView& y) {
        causal_conv1d_fwd(sliding(source, T, D), v.weight, v.bias, {}, y, {}, SeqLens::from_lengths(lengths),
                          v.c.options());
      });
    });
  }
}

TEST(CausalConv1dPartition, TokenBlocksRestartAtEverySequence) {
  const Sizes lengths = {3, 0, 5};
  const std::vector<TokenBlock> blocks = token_blocks(SeqLens::from_lengths(lengths), 2);
  std::vector<Sizes> got;
  for (const TokenBlock& b : blocks) {
    got.push_back({b.sequence, b.first, b.last});
  }
  EXPECT_EQ(got, (std::vector<Sizes>{{0, 0, 2}, {0, 2, 3}, {2, 3, 5}, {2, 5, 7}, {2, 7, 8}}));
  EXPECT_TRUE(token_blocks(SeqLens::dense(2, 0), 128).empty());
}

TEST(CausalConv1dPartition, ChannelBlocks) {
  EXPECT_EQ(channel_blocks(0), 0);
  EXPECT_EQ(channel_blocks(1), 1);
  EXPECT_EQ(channel_blocks(512), 1);
  EXPECT_EQ(channel_blocks(513), 2);
  EXPECT_EQ(channel_blocks(8192), 16);
}

TEST(CausalConv1dPartition, TasksOfAnUpdate) {
  using causal_conv1d::update_blocks;
  EXPECT_EQ(update_blocks(64, 16), 16);  // whole rows of states
  EXPECT_EQ(update_blocks(1000, 16), 16);
  EXPECT_EQ(update_blocks(16, 16), 4);  // 64 tasks
  EXPECT_EQ(update_blocks(1, 16), 1);
  EXPECT_EQ(update_blocks(0, 16), 1);
  EXPECT_EQ(update_blocks(5, 0), 1);
}

// Groups of channels need runs made of whole groups, in x and in y; only the last run of all may have a rest.
TEST(CausalConv1dPartition, Order) {
  using causal_conv1d::Order;
  const auto paired = [](std::int64_t x_width, std::int64_t y_width, std::int64_t channels) {
    const causal_conv1d::Grid x{nullptr, 0, 0, 0, x_width};
    const causal_conv1d::Grid y{nullptr, 0, 0, 0, y_width};
    return causal_conv1d::order_of(x, y, channels, 16) == Order::kPaired;
  };
  EXPECT_TRUE(paired(1030, 1030, 1030));
  EXPECT_TRUE(paired(1024, 128, 1024));
  EXPECT_TRUE(paired(64, 16, 128));
  EXPECT_FALSE(paired(1030, 103, 1030));
  EXPECT_FALSE(paired(8, 1024, 1024));
}

TEST(CausalConv1dPartition, StreamsOnlyLargeAlignedOutputs) {
  const auto streams = [](std::uintptr_t address, std::int64_t T, std::int64_t D, std::int64_t pitch,
                          std::int64_t heads) {
    TensorView y = contiguous(reinterpret_cast<const void*>(address), DType::kBF16, {T, D});
    y.strides[0] = pitch;
    const causal_conv1d::Grid x{nullptr, 0, 0, D, D};
    const causal_conv1d::Grid g = causal_conv1d::grid_of(y, Layout::kTND, 0, D);
    return should_stream(y, g, heads == 0 ? x : causal_conv1d::Grid{nullptr, 0, D / heads, D, D / heads});
  };
  EXPECT_TRUE(streams(4096, 4096, 8192, 8192, 0));
  EXPECT_FALSE(streams(4096, 1024, 8192, 8192, 0));  // 16 MB: may stay in the cache
  EXPECT_TRUE(streams(4096, 1025, 8192, 8192, 0));
  EXPECT_FALSE(streams(4096 + 2, 4096, 8192, 8192, 0));
  EXPECT_FALSE(streams(4096, 4096, 8192, 8200, 0));
  EXPECT_FALSE(streams(4096, 4096, 8184, 8192, 0));
  EXPECT_TRUE(streams(4096, 4096, 8192, 8192, 64));
  EXPECT_FALSE(streams(4096, 4096, 8192, 8192, 512));  // runs of 16 channels: 32 bytes
}

}  // namespace
}  // namespace tidegate::test
