// prepare_wy_repr_bwd and its halves _da and _full: accuracy, sums over value heads, bits, causality.
#include <gtest/gtest.h>

#include "chunk_causality.h"
#include "ops/prepare_wy_repr_bwd/reference.h"

namespace tidegate::test {
namespace {

std::vector<Output> gradients(const ChunkCase& c) {
  return {{"dk", Kind::kTokens, c.inter, c.K, true},
          {"dv", Kind::kTokens, c.inter, c.V},
          {"dbeta", Kind::kGate, c.sum_type()},
          {"dg", Kind::kGate, c.sum_type()}};
}

const Stage kDa{
    "prepare_wy_repr_bwd_da",
    {&ChunkCall::k, &ChunkCall::v, &ChunkCall::beta, &ChunkCall::A, &ChunkCall::dw, &ChunkCall::dv2, &ChunkCall::gc},
    [](const ChunkCase& c) {
      return std::vector<Output>{{"dA", Kind::kTokens, c.inter, c.C}};
    },
    [](const ChunkCall& x, const Views& out) {
      prepare_wy_repr_bwd_da(x.k, x.v, x.beta, x.A, x.dw, x.dv2, x.gc, out[0], x.seq, x.c.layout);
    },
    [](const ChunkProblem& p, const ChunkCall& x, const Views& out) {
      wy_stage::reference_da<float>(p, {x.k, x.v, x.beta, x.A, x.dw, x.dv2, x.gc, out[0], {}, {}, {}, {}});
    },
    1e-6,
    true,
};
const Stage kFull{
    "prepare_wy_repr_bwd_full",
    {&ChunkCall::k, &ChunkCall::v, &ChunkCall::beta, &ChunkCall::A, &ChunkCall::dA, &ChunkCall::dw, &ChunkCall::dv2,
     &ChunkCall::gc},
    gradients,
    [](const ChunkCall& x, const Views& out) {
      prepare_wy_repr_bwd_full(x.k, x.v, x.beta, x.A, x.dA, x.dw, x.dv2, x.gc, out[0], out[1], out[2], out[3], x.seq,
                               x.c.layout);
    },
    [](const ChunkProblem& p, const ChunkCall& x, const Views& out) {
      wy_stage::reference_full<float>(p,
                                      {x.k, x.v, x.beta, x.A, x.dw, x.dv2, x.gc, x.dA, out[0], out[1], out[2], out[3]});
    },
    1e-6,
    true,
};
const Stage kBoth{
    "prepare_wy_repr_bwd",
    kDa.inputs,
    gradients,
    [](const ChunkCall& x, const Views& out) {
      prepare_wy_repr_bwd(x.k, x.v, x.beta, x.A, x.dw, x.dv2, x.gc, out[0], out[1], out[2], out[3], x.seq, x.c.layout);
    },
    [](const ChunkProblem& p, const ChunkCall& x, const Views& out) {
      wy_stage::reference_both<float>(p,
                                      {x.k, x.v, x.beta, x.A, x.dw, x.dv2, x.gc, {}, out[0], out[1], out[2], out[3]});
    },
    1e-6,
    true,
};

TEST(PrepareWyReprBwdDa, MatchesFp64) { expect_accuracy(kDa); }
TEST(PrepareWyReprBwdDa, BitsDoNotDependOnMemoryPackingOrThreads) { expect_stage(kDa); }
TEST(PrepareWyReprBwdDa, NaNStaysInItsSequenceAndHeads) { expect_anticausal(kDa); }
TEST(PrepareWyReprBwdDa, PaddingIsLeftAlone) { expect_padding_untouched(kDa); }
TEST(PrepareWyReprBwdFull, MatchesFp64) { expect_accuracy(kFull); }
TEST(PrepareWyReprBwdFull, BitsDoNotDependOnMemoryPackingOrThreads) { expect_stage(kFull); }
TEST(PrepareWyReprBwdFull, NaNStaysInItsSequenceAndHeads) { expect_anticausal(kFull); }
TEST(PrepareWyReprBwdFull, PaddingIsLeftAlone) { expect_padding_untouched(kFull); }
TEST(PrepareWyReprBwd, MatchesFp64) { expect_accuracy(kBoth); }
TEST(PrepareWyReprBwd, BitsDoNotDependOnMemoryPackingOrThreads) { expect_stage(kBoth); }
TEST(PrepareWyReprBwd, NaNStaysInItsSequenceAndHeads) { expect_anticausal(kBoth); }
TEST(PrepareWyReprBwd, PaddingIsLeftAlone) { expect_padding_untouched(kBoth); }

// With dA in fp32 the halves have the bits of the whole.
TEST(PrepareWyReprBwd, IsDaAndFull) {
  for_each_isa([] {
    Random random;
    const ChunkCase c{.T = 150, .HK = 2, .G = 2, .K = 20, .V = 40, .C = 64, .dtype = DType::kBF16, .lengths = {70, 80}};
    ChunkTensors t = make_chunk(random, case_of(kBoth, c));
    t.dA = results(kDa, t.call())[0];
    const std::vector<Tensor> halves = results(kFull, t.call());
    const std::vector<Tensor> whole = results(kBoth, t.call());
    for (std::size_t i = 0; i < whole.size(); ++i) {
      EXPECT_TRUE(same_bits(halves[i], whole[i]));
    }
  });
}

// dA is 0 up to the row's own token and beyond a short chunk; in the other direction, nothing there is read, nor is
// what lies above the diagonal of A.
TEST(PrepareWyReprBwd, TrianglesAndTheirTranspose) {
  for_each_isa([] {
    Random random;
    ChunkTensors t = make_chunk(random, case_of(kBoth, {.T = 70, .K = 20, .V = 20, .C = 64}));
    const std::vector<Tensor> dA = results(kDa, t.call());
    const std::vector<Tensor> want = results(kFull, t.call());
    const std::vector<Tensor> whole = results(kBoth, t.call());
    for (std::int64_t i = 0; i < 70; ++i) {
      const std::int64_t row = i % 64;
      const std::int64_t length = i < 64 ? 64 : 6;
      for (std::int64_t j = 0; j < 64; ++j) {
        ASSERT_EQ(dA[0].get(i * 64 + j) != 0.0, j > row && j < length) << i << " " << j;
        if (j > row) {
          t.A.set(i * 64 + j, std::nan(""));
        }
        if (j <= row || j >= length) {
          t.dA.set(i * 64 + j, std::nan(""));
        }
      }
    }
    EXPECT_TRUE(same_bits(results(kDa, t.call())[0], dA[0]));
    const std::vector<Tensor> got = results(kFull, t.call());
    const std::vector<Tensor> again = results(kBoth, t.call());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(same_bits(got[i], want[i]) && same_bits(again[i], whole[i]));
    }
  });
}

TEST(PrepareWyReprBwd, SumOverValueHeads) {
  for_each_isa([] {
    for (const std::int64_t G : {2, 3, 4}) {
      Random random;
      const ChunkCase c{.T = 50, .G = G, .K = 20, .V = 24, .C = 32, .layout = Layout::kNTD};
      const ChunkTensors t = make_chunk(random, case_of(kBoth, c));
      expect_sum_over_heads(kFull, t.call());
      expect_sum_over_heads(kBoth, t.call());
    }
  });
}

}  // namespace
}  // namespace tidegate::test
