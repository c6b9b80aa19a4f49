// causal_conv1d_fwd: accuracy, layouts, states, boundaries.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "ops/causal_conv1d/test_case.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

constexpr std::int64_t kLengths[] = {0, 1, 2, 3, 4, 5, 63, 64, 65, 130};
const Sizes kPacked = {3, 0, 64, 1, 65, 2, 0, 63};

TEST(CausalConv1d, ForwardMatchesFp64) {
  for (const DType dtype : kKernelTypes) {
    std::map<Isa, Accuracy> accuracy;
    const double bound = stored(dtype, 2e-7);
    Random random;
    int turn = 0;
    for (const std::int64_t D : kWidths) {
      for (int i = 0; i < 3; ++i, ++turn) {  // every length meets several widths, every W every kind of width
        const ConvCase c{.T = kLengths[turn % 10],
                         .D = D,
                         .W = 2 + i,
                         .dtype = dtype,
                         .bias = turn % 4 != 0,
                         .silu = turn % 5 != 0,
                         .state = turn % 3 == 0 ? 0 : 2 + i,
                         .weight_type = turn % 2 == 0 ? dtype : DType::kF32};
        SCOPED_TRACE(c.text());
        const Conv v = make_conv(random, c);
        const Tensor truth = forward(wide(v)).y;
        const Tensor plain = plain_forward(v);
        for_each_isa([&] { accuracy[active_isa()].add(forward(v).y, plain, truth, 2e-7); });
      }
    }
    for (const auto& [isa, a] : accuracy) {
      a.expect(std::string(dtype_name(dtype)) + "_" + std::string(isa_name(isa)), bound);
    }
  }
}

// The sum as the definition says it, with boundaries: the third sequence sees its state and nothing of the first.
TEST(CausalConv1d, ReferenceIsTheDefinition) {
  Random random;
  for (const bool silu : {false, true}) {
    const Conv v = wide(make_conv(random, {.T = 5, .D = 2, .W = 4, .silu = silu, .state = 5, .lengths = {2, 0, 3}}));
    const Tensor y = forward(v).y;
    for (std::int64_t t = 0; t < 5; ++t) {
      const std::int64_t n = t < 2 ? 0 : 2;
      for (std::int64_t c = 0; c < 2; ++c) {
        double p = v.bias.get(c);
        for (std::int64_t j = 0; j < 4; ++j) {
          const std::int64_t from = t - 3 + j;
          const std::int64_t begin = v.seq[n].begin;
          p += v.weight.get(c * 4 + j) *
               (from >= begin ? v.x.get(from * 2 + c) : v.initial.get((n * 2 + c) * 5 + 5 + from - begin));
        }
        EXPECT_NEAR(y.get(t * 2 + c), silu ? p / (1 + std::exp(-p)) : p, 1e-14);
      }
    }
  }
}

TEST(CausalConv1d, EveryLayoutHasTheSameBits) {
  for_each_isa([] {
    for (const DType dtype : kKernelTypes) {
      for (const std::int64_t n :
           {1, 3, 8, 10}) {  // heads longer than a channel block, odd, of whole vectors, with a rest
        for (const bool batch : {false, true}) {
          const std::int64_t D = n == 3 ? 51 : n == 8 ? 1024 : 1030;
          Random random(7);
          const ConvCase c{.T = 35,
                           .D = D,
                           .dtype = dtype,
                           .layout = batch ? Layout::kBSND : Layout::kTND,
                           .B = batch ? 2 : 1,
                           .state = 3};
          SCOPED_TRACE(c.text() + " n=" + std::to_string(n));
          const Conv v = make_conv(random, c);
          const Tensor y = forward(v).y;
          const TensorView heads = exchanged(with_heads(y, n), batch ? 1 : 0, batch ? 2 : 1);
          Conv out = v;  // token-major in, head-major out
          out.c.head_num = n;
          EXPECT_TRUE(same_bits(forward(out).y, heads));
          Conv in = v;  // head-major in and out, and head-major in with other heads out
          in.c.layout = batch ? Layout::kBNSD : Layout::kNTD;
          in.c.heads = n;
          in.x = copied(exchanged(with_heads(v.x, n), batch ? 1 : 0, batch ? 2 : 1));
          EXPECT_TRUE(same_bits(forward(in).y, heads));
          in.c.head_num = D == 51 ? 17 : 2;
          EXPECT_TRUE(same_bits(forward(in).y, exchanged(with_heads(y, in.c.head_num), batch ? 1 : 0, batch ? 2 : 1)));
        }
      }
    }
  });
}

// The last samples of (state or zeros, sequence), whatever the lengths of the states; sequences shorter than them too.
TEST(CausalConv1d, FinalStateIsACopy) {
  for_each_isa([] {
    for (const DType dtype : kKernelTypes) {
      for (std::int64_t W = 2; W <= 4; ++W) {
        for (const std::int64_t S : {std::int64_t{0}, W - 1, W, W + 2}) {
          for (const std::int64_t S_out : {W - 1, W, W + 2}) {
            for (const Form& form : {Form{}, permuted({0, 2, 1}), reversed()}) {
              Random random;
              const ConvCase c{.T = 13,
                               .D = 19,
                               .W = W,
                               .dtype = dtype,
                               .state = S,
                               .final_state = S_out,
                               .lengths = {0, 1, 2, 10},
                               .state_form = form};
              SCOPED_TRACE(c.text());
              const Conv v = make_conv(random, c);
              const ConvForward out = forward(v);
              ASSERT_TRUE(out.final_state.gaps_untouched());
              for (std::int64_t i = 0; i < out.final_state.view().numel(); ++i) {
                const std::int64_t n = i / (19 * S_out);
                const std::int64_t channel = i / S_out % 19;
                const std::int64_t back = S_out - i % S_out;  // 1: the newest sample
                const std::int64_t t = v.seq[n].length() - back;
                const double expected = t >= 0       ? v.x.get((v.seq[n].begin + t) * 19 + channel)
                                        : t + S >= 0 ? v.initial.get((n * 19 + channel) * S + S + t)
                                                     : 0.0;
                ASSERT_EQ(out.final_state.get(i), expected) << i;
              }
            }
          }
        }
      }
    }
  });
}

TEST(CausalConv1d, PackedHasTheBitsOfSeparateCalls) {
  for_each_isa([] {
    for (const DType dtype : kKernelTypes) {
      Random random;
      for (int i = 0; i < 4; ++i) {
        Sizes lengths = kPacked;
        for (std::size_t k = lengths.size() - 1; k > 0; --k) {
          std::swap(lengths[k], lengths[static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(k)))]);
        }
        const ConvCase c{.T = 198,
                         .D = 83,
                         .W = 2 + i % 3,
                         .dtype = dtype,
                         .state = i == 0 ? 0 : 4,
                         .final_state = 4,
                         .lengths = lengths};
        SCOPED_TRACE(c.text());
        const Conv v = make_conv(random, c);
        const ConvForward all = forward(v);
        for (std::int64_t n = 0; n < v.seq.count(); ++n) {
          const ConvForward one = forward(sequence_of(v, n));
          EXPECT_TRUE(same_bits(part(all.y, 0, v.seq[n].begin, v.seq[n].end), one.y)) << "sequence " << n;
          EXPECT_TRUE(same_bits(part(all.final_state, 0, n, n + 1), one.final_state)) << "sequence " << n;
        }
      }
    }
  });
}

TEST(CausalConv1d, NaNStaysInItsSequenceAndAfterItsToken) {
  for_each_isa([] {
    Random random;
    Conv v = make_conv(random, {.T = 198, .D = 37, .dtype = DType::kBF16, .state = 3, .lengths = kPacked});
    const Tensor clean = forward(v).y;
    for (const std::int64_t t : {0, 3, 60, 67, 133, 197}) {
      const double kept = v.x.get(t * 37 + 11);
      v.x.set(t * 37 + 11, std::nan(""));
      const Tensor y = forward(v).y;
      for (std::int64_t i = 0; i < y.view().numel(); ++i) {
        const std::int64_t at = i / 37;
        const bool reached =
            i % 37 == 11 && at >= t && at < t + 4 &&
            v.seq.seq_idx()[static_cast<std::size_t>(at)] == v.seq.seq_idx()[static_cast<std::size_t>(t)];
        ASSERT_EQ(std::isnan(y.get(i)), reached) << "NaN at token " << t << ", output " << at << " channel " << i % 37;
        ASSERT_TRUE(reached || y.get(i) == clean.get(i));
      }
      v.x.set(t * 37 + 11, kept);
    }
  });
}

TEST(CausalConv1d, TokensOutsideSequencesAreNotTouched) {
  for_each_isa([] {
    Random random;
    Conv v = make_conv(random, {.T = 12, .D = 20, .layout = Layout::kBSND, .B = 2});
    const Sizes mask = {0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0};
    v.seq = SeqLens::from_mask(mask, 2, 12);
    const Tensor clean = forward(v).y;
    const Tensor other = v.x;
    v.x.fill([&](std::int64_t i) { return mask[static_cast<std::size_t>(i / 20)] ? other.get(i) : std::nan(""); });
    const Tensor y = forward(v).y;
    EXPECT_TRUE(same_bits(y, clean));
    for (std::int64_t i = 0; i < y.view().numel(); ++i) {
      ASSERT_EQ(std::isnan(y.get(i)), mask[static_cast<std::size_t>(i / 20)] == 0);
    }
  });
}

}  // namespace
}  // namespace tidegate::test
