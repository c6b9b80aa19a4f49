// chunk_gated_delta_rule_bwd_dhu: accuracy, states, bits, causality.
#include <gtest/gtest.h>

#include "chunk_causality.h"
#include "ops/chunk_gated_delta_rule_bwd_dhu/reference.h"

namespace tidegate::test {
namespace {

const Stage kStage{
    "chunk_gated_delta_rule_bwd_dhu",
    {&ChunkCall::q, &ChunkCall::k, &ChunkCall::w, &ChunkCall::d_o, &ChunkCall::dv, &ChunkCall::gc, &ChunkCall::dfinal},
    [](const ChunkCase& c) {
      return std::vector<Output>{
          {"dh", Kind::kChunks, c.inter}, {"dh0", Kind::kStates, c.sum_type()}, {"dv2", Kind::kTokens, c.inter, c.V}};
    },
    [](const ChunkCall& x, const Views& out) {
      chunk_gated_delta_rule_bwd_dhu(x.q, x.k, x.w, x.d_o, x.dv, x.gc, x.dfinal, out[0], out[1], out[2], x.seq,
                                     {kScale, x.c.C, x.c.v_first, x.c.layout});
    },
    [](const ChunkProblem& p, const ChunkCall& x, const Views& out) {
      dhu_stage::reference<float>(p, x.q, x.k, x.w, x.d_o, x.dv, x.gc, x.dfinal, out[0], out[1], out[2], kScale,
                                  x.c.v_first);
    },
    1e-6,
    true,
};

TEST(ChunkBwdDhu, MatchesFp64) { expect_accuracy(kStage); }
TEST(ChunkBwdDhu, BitsDoNotDependOnMemoryPackingOrThreads) { expect_stage(kStage); }
TEST(ChunkBwdDhu, NaNStaysInItsSequenceAndHeads) { expect_anticausal(kStage); }
TEST(ChunkBwdDhu, PaddingIsLeftAlone) { expect_padding_untouched(kStage); }

// States that lie V first have the bits of those that lie K first.
TEST(ChunkBwdDhu, StateOrder) {
  for_each_isa([] {
    ChunkCase c = case_of(kStage, {.T = 80, .HK = 1, .G = 2, .K = 20, .V = 70, .C = 32, .lengths = {33, 0, 47}});
    Random random(2);
    const std::vector<Tensor> want = results(kStage, make_chunk(random, c).call());
    c.v_first = true;
    Random again(2);
    const std::vector<Tensor> got = results(kStage, make_chunk(again, c).call());
    EXPECT_TRUE(same_bits(got[0], want[0]) && same_bits(got[2], want[2]));
    EXPECT_TRUE(same_bits(exchanged(got[1], 2, 3), want[1]));
  });
}

// An empty sequence passes the gradient of its final state on, or zeros; a 16-bit one is widened.
TEST(ChunkBwdDhu, EmptySequencesAndStateTypes) {
  for_each_isa([] {
    for (const DType state : kKernelTypes) {
      Random random;
      const ChunkCase c{.T = 3, .K = 9, .V = 11, .C = 16, .dtype = DType::kBF16, .lengths = {0, 3, 0}};
      ChunkTensors t = make_chunk(random, case_of(kStage, c));
      t.dfinal = converted(t.dfinal, state);
      const std::vector<Tensor> out = results(kStage, t.call());
      const Tensor expected = converted(t.dfinal, DType::kF32);
      for (const std::int64_t n : {0, 2}) {
        EXPECT_TRUE(same_bits(part(out[1], 0, n, n + 1), part(expected, 0, n, n + 1)));
      }
      EXPECT_TRUE(same_bits(part(out[0], 0, 0, 1), part(expected, 0, 1, 2)));  // dh of the only chunk
      t.dfinal = {};
      const std::vector<Tensor> zeros = results(kStage, t.call());
      for (const double x : values(part(zeros[1], 0, 0, 1))) {
        EXPECT_EQ(x, 0.0);
      }
    }
    Random random;  // no token at all
    const ChunkTensors none = make_chunk(random, case_of(kStage, {.T = 0, .K = 4, .V = 4, .C = 16, .lengths = {0, 0}}));
    EXPECT_TRUE(same_bits(results(kStage, none.call())[1], none.dfinal));
  });
}

}  // namespace
}  // namespace tidegate::test
