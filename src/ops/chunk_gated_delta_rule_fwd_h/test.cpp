// chunk_gated_delta_rule_fwd_h: accuracy, states, bits, causality.
#include <gtest/gtest.h>

#include "chunk_causality.h"
#include "ops/chunk_gated_delta_rule_fwd_h/reference.h"

namespace tidegate::test {
namespace {

const Stage kStage{
    "chunk_gated_delta_rule_fwd_h",
    {&ChunkCall::k, &ChunkCall::w, &ChunkCall::u, &ChunkCall::gc, &ChunkCall::initial},
    [](const ChunkCase& c) {
      return std::vector<Output>{{"h", Kind::kChunks, c.inter},
                                 {"v_new", Kind::kTokens, c.inter, c.V},
                                 {"final_state", Kind::kStates, c.sum_type()}};
    },
    [](const ChunkCall& x, const Views& out) {
      chunk_gated_delta_rule_fwd_h(x.k, x.w, x.u, x.gc, x.initial, out[0], out[1], out[2], x.seq,
                                   {x.c.C, x.c.v_first, x.c.layout});
    },
    [](const ChunkProblem& p, const ChunkCall& x, const Views& out) {
      h_stage::reference<float>(p, x.k, x.w, x.u, x.gc, x.initial, out[0], out[1], out[2], x.c.v_first);
    },
};

TEST(ChunkFwdH, MatchesFp64) { expect_accuracy(kStage); }
TEST(ChunkFwdH, BitsDoNotDependOnMemoryPackingOrThreads) { expect_stage(kStage); }
TEST(ChunkFwdH, NaNStaysCausal) { expect_causal(kStage); }
TEST(ChunkFwdH, PaddingIsLeftAlone) { expect_padding_untouched(kStage); }

// States that lie V first have the bits of those that lie K first.
TEST(ChunkFwdH, StateOrder) {
  for_each_isa([] {
    ChunkCase c{.T = 80, .HK = 1, .G = 2, .K = 20, .V = 70, .C = 32, .lengths = {33, 0, 47}};
    Random random(2);
    const std::vector<Tensor> want = results(kStage, make_chunk(random, c).call());
    c.v_first = true;
    Random again(2);
    const std::vector<Tensor> got = results(kStage, make_chunk(again, c).call());
    EXPECT_TRUE(same_bits(got[0], want[0]) && same_bits(got[1], want[1]));
    EXPECT_TRUE(same_bits(exchanged(got[2], 2, 3), want[2]));
  });
}

// An empty sequence returns its initial state, or zeros; a 16-bit initial state is widened.
TEST(ChunkFwdH, EmptySequencesAndStateTypes) {
  for_each_isa([] {
    for (const DType state : kKernelTypes) {
      Random random;
      ChunkTensors t =
          make_chunk(random, {.T = 3, .K = 9, .V = 11, .C = 16, .dtype = DType::kBF16, .lengths = {0, 3, 0}});
      t.initial = converted(t.initial, state);
      const std::vector<Tensor> out = results(kStage, t.call());
      const Tensor expected = converted(t.initial, DType::kF32);
      for (const std::int64_t n : {0, 2}) {
        EXPECT_TRUE(same_bits(part(out[2], 0, n, n + 1), part(expected, 0, n, n + 1)));
      }
      EXPECT_TRUE(same_bits(part(out[0], 0, 0, 1), part(expected, 0, 1, 2)));  // h of the only chunk
      t.initial = {};
      const std::vector<Tensor> zeros = results(kStage, t.call());
      for (const double x : values(part(zeros[2], 0, 0, 1))) {
        EXPECT_EQ(x, 0.0);
      }
    }
    ChunkTensors none;  // no token at all
    none.c = {.T = 0, .K = 4, .V = 4, .C = 16, .lengths = {0, 0}};
    Random random;
    none = make_chunk(random, none.c);
    EXPECT_TRUE(same_bits(results(kStage, none.call())[2], none.initial));
  });
}

TEST(ChunkFwdH, FinalStateMayBeAbsent) {
  for_each_isa([] {
    Random random;
    const ChunkTensors t = make_chunk(random, {.T = 40, .K = 16, .V = 16, .C = 16});
    const std::vector<Tensor> want = results(kStage, t.call());
    const std::vector<Tensor> out = blank_outputs(kStage, t.c);
    kStage.run(t.call(), {out[0], out[1], TensorView{}});
    EXPECT_TRUE(same_bits(out[0], want[0]) && same_bits(out[1], want[1]));
  });
}

}  // namespace
}  // namespace tidegate::test
