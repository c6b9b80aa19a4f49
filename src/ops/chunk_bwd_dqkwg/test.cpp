// chunk_bwd_dqkwg: accuracy, sums over value heads, bits, causality.
#include <gtest/gtest.h>

#include "chunk_causality.h"
#include "ops/chunk_bwd_dqkwg/reference.h"

namespace tidegate::test {
namespace {

const Stage kStage{
    "chunk_bwd_dqkwg",
    {&ChunkCall::q, &ChunkCall::k, &ChunkCall::v_new, &ChunkCall::gc, &ChunkCall::h, &ChunkCall::d_o, &ChunkCall::dh,
     &ChunkCall::dv2},
    [](const ChunkCase& c) {
      return std::vector<Output>{{"dq", Kind::kTokens, c.inter, c.K, true},
                                 {"dk", Kind::kTokens, c.inter, c.K, true},
                                 {"dw", Kind::kTokens, c.inter, c.K},
                                 {"dg", Kind::kGate, c.sum_type()}};
    },
    [](const ChunkCall& x, const Views& out) {
      chunk_bwd_dqkwg(x.q, x.k, x.v_new, x.gc, x.h, x.d_o, x.dh, x.dv2, out[0], out[1], out[2], out[3], x.seq,
                      {kScale, x.c.C, x.c.layout});
    },
    [](const ChunkProblem& p, const ChunkCall& x, const Views& out) {
      dqkwg_stage::reference<float>(
          p, {x.q, x.k, x.v_new, x.gc, x.h, x.d_o, x.dh, x.dv2, out[0], out[1], out[2], out[3]}, kScale);
    },
    1e-6,
    true,
};

TEST(ChunkBwdDqkwg, MatchesFp64) { expect_accuracy(kStage); }
TEST(ChunkBwdDqkwg, BitsDoNotDependOnMemoryPackingOrThreads) { expect_stage(kStage); }
TEST(ChunkBwdDqkwg, NaNStaysInItsSequenceAndHeads) { expect_anticausal(kStage); }
TEST(ChunkBwdDqkwg, PaddingIsLeftAlone) { expect_padding_untouched(kStage); }

// dq and dk are the fp32 sums of what the value heads give one by one, in their order.
TEST(ChunkBwdDqkwg, SumOverValueHeads) {
  for_each_isa([] {
    for (const std::int64_t G : {2, 3, 4}) {
      Random random;
      const ChunkCase c{.T = 50, .G = G, .K = 20, .V = 24, .C = 32, .layout = Layout::kNTD};
      expect_sum_over_heads(kStage, make_chunk(random, case_of(kStage, c)).call());
    }
  });
}

}  // namespace
}  // namespace tidegate::test
