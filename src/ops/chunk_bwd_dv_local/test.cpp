// chunk_bwd_dv_local: accuracy, scale, bits, causality.
#include <gtest/gtest.h>

#include "chunk_causality.h"
#include "ops/chunk_bwd_dv_local/reference.h"

namespace tidegate::test {
namespace {

const Stage kStage{
    "chunk_bwd_dv_local",
    {&ChunkCall::q, &ChunkCall::k, &ChunkCall::d_o, &ChunkCall::gc},
    [](const ChunkCase& c) {
      return std::vector<Output>{{"dv", Kind::kTokens, c.inter, c.V}};
    },
    [](const ChunkCall& x, const Views& out) {
      chunk_bwd_dv_local(x.q, x.k, x.d_o, x.gc, out[0], x.seq, {kScale, x.c.C, x.c.layout});
    },
    [](const ChunkProblem& p, const ChunkCall& x, const Views& out) {
      dv_local_stage::reference<float>(p, x.q, x.k, x.d_o, x.gc, out[0], kScale);
    },
    1e-6,
    true,
};

TEST(ChunkBwdDvLocal, MatchesFp64) { expect_accuracy(kStage); }
TEST(ChunkBwdDvLocal, BitsDoNotDependOnMemoryPackingOrThreads) { expect_stage(kStage); }
TEST(ChunkBwdDvLocal, NaNStaysInItsSequenceAndHeads) { expect_anticausal(kStage); }
TEST(ChunkBwdDvLocal, PaddingIsLeftAlone) { expect_padding_untouched(kStage); }

// A token hears of outputs from its own on: NaN in a later one reaches it, NaN in an earlier one does not.
TEST(ChunkBwdDvLocal, LaterTokensKeepTheirBits) {
  for_each_isa([] {
    for (const Input input : {&ChunkCall::q, &ChunkCall::d_o}) {
      Random random;
      const ChunkTensors t = make_chunk(random, case_of(kStage, {.T = 70, .K = 20, .V = 20, .C = 64}));
      const std::vector<Tensor> clean = results(kStage, t.call());
      const TensorView in = part(t.call().*input, 0, 30, 31);
      write_element(in, 3, std::nan(""));
      const std::vector<Tensor> got = results(kStage, t.call());
      EXPECT_TRUE(same_bits(part(got[0], 0, 31, 70), part(clean[0], 0, 31, 70)));
      EXPECT_TRUE(std::isnan(got[0].get(3)));
    }
  });
}

TEST(ChunkBwdDvLocal, ScaleOfTheHeadSizeIfNoneIsGiven) {
  for_each_isa([] {
    Random random;
    const ChunkTensors t = make_chunk(random, case_of(kStage, {.T = 20, .K = 64, .V = 16, .C = 16}));
    const ChunkCall x = t.call();
    const Tensor by_default(DType::kF32, t.v.sizes());
    const Tensor given(DType::kF32, t.v.sizes());
    chunk_bwd_dv_local(x.q, x.k, x.d_o, x.gc, by_default, x.seq, {.chunk_size = 16, .layout = Layout::kTND});
    chunk_bwd_dv_local(x.q, x.k, x.d_o, x.gc, given, x.seq, {0.125, 16, Layout::kTND});
    EXPECT_TRUE(same_bits(by_default, given));
  });
}

}  // namespace
}  // namespace tidegate::test
