// recompute_w_u: accuracy, bits, causality.
#include <gtest/gtest.h>

#include "chunk_causality.h"
#include "ops/recompute_w_u/reference.h"

namespace tidegate::test {
namespace {

const Stage kStage{
    "recompute_w_u",
    {&ChunkCall::k, &ChunkCall::v, &ChunkCall::beta, &ChunkCall::A, &ChunkCall::gc},
    [](const ChunkCase& c) {
      return std::vector<Output>{{"w", Kind::kTokens, c.inter, c.K}, {"u", Kind::kTokens, c.inter, c.V}};
    },
    [](const ChunkCall& x, const Views& out) {
      recompute_w_u(x.k, x.v, x.beta, x.A, x.gc, out[0], out[1], x.seq, x.c.layout);
    },
    [](const ChunkProblem& p, const ChunkCall& x, const Views& out) {
      wu_stage::reference<float>(p, x.k, x.v, x.beta, x.A, x.gc, out[0], out[1]);
    },
};

TEST(RecomputeWU, MatchesFp64) { expect_accuracy(kStage); }
TEST(RecomputeWU, BitsDoNotDependOnMemoryPackingOrThreads) { expect_stage(kStage); }
TEST(RecomputeWU, NaNStaysCausal) { expect_causal(kStage); }
TEST(RecomputeWU, PaddingIsLeftAlone) { expect_padding_untouched(kStage); }

// What lies above the diagonal of A, or beyond a short chunk, is never read.
TEST(RecomputeWU, ReadsTheLowerTriangleOnly) {
  for_each_isa([] {
    Random random;
    ChunkTensors t = make_chunk(random, {.T = 70, .K = 20, .V = 20, .C = 64});
    const std::vector<Tensor> want = results(kStage, t.call());
    for (std::int64_t i = 0; i < 70; ++i) {
      for (std::int64_t j = i % 64 + 1; j < 64; ++j) {
        t.A.set(i * 64 + j, std::nan(""));
      }
    }
    const std::vector<Tensor> got = results(kStage, t.call());
    EXPECT_TRUE(same_bits(got[0], want[0]) && same_bits(got[1], want[1]));
  });
}

}  // namespace
}  // namespace tidegate::test
