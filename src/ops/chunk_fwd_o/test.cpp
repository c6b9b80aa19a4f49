// chunk_fwd_o: accuracy, scale, bits, causality.
#include <gtest/gtest.h>

#include "chunk_causality.h"
#include "ops/chunk_fwd_o/reference.h"

namespace tidegate::test {
namespace {

const Stage kStage{
    "chunk_fwd_o",
    {&ChunkCall::q, &ChunkCall::k, &ChunkCall::v_new, &ChunkCall::h, &ChunkCall::gc},
    [](const ChunkCase& c) {
      return std::vector<Output>{{"o", Kind::kTokens, c.dtype, c.V}};
    },
    [](const ChunkCall& x, const Views& out) {
      chunk_fwd_o(x.q, x.k, x.v_new, x.h, x.gc, out[0], x.seq, {0.3, x.c.C, x.c.layout});
    },
    [](const ChunkProblem& p, const ChunkCall& x, const Views& out) {
      o_stage::reference<float>(p, x.q, x.k, x.v_new, x.h, x.gc, out[0], 0.3);
    },
};

TEST(ChunkFwdO, MatchesFp64) { expect_accuracy(kStage); }
TEST(ChunkFwdO, BitsDoNotDependOnMemoryPackingOrThreads) { expect_stage(kStage); }
TEST(ChunkFwdO, NaNStaysCausal) { expect_causal(kStage); }
TEST(ChunkFwdO, PaddingIsLeftAlone) { expect_padding_untouched(kStage); }

TEST(ChunkFwdO, ScaleOfTheHeadSizeIfNoneIsGiven) {
  for_each_isa([] {
    Random random;
    const ChunkTensors t = make_chunk(random, {.T = 20, .K = 64, .V = 16, .C = 16});
    const ChunkCall x = t.call();
    const Tensor by_default(DType::kF32, t.v.sizes());
    const Tensor given(DType::kF32, t.v.sizes());
    chunk_fwd_o(x.q, x.k, x.v_new, x.h, x.gc, by_default, x.seq, {.chunk_size = 16, .layout = Layout::kTND});
    chunk_fwd_o(x.q, x.k, x.v_new, x.h, x.gc, given, x.seq, {0.125, 16, Layout::kTND});
    EXPECT_TRUE(same_bits(by_default, given));
  });
}

}  // namespace
}  // namespace tidegate::test
