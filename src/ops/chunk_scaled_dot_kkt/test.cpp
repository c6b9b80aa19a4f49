// chunk_scaled_dot_kkt: accuracy, bits, causality, decay that would overflow.
#include <gtest/gtest.h>

#include "chunk_causality.h"
#include "ops/chunk_scaled_dot_kkt/reference.h"

namespace tidegate::test {
namespace {

std::vector<Output> outputs(const ChunkCase& c) { return {{"A0", Kind::kTokens, c.inter, c.C}}; }

const Stage kStage{
    "chunk_scaled_dot_kkt",
    {&ChunkCall::k, &ChunkCall::gc, &ChunkCall::beta},
    outputs,
    [](const ChunkCall& x, const Views& out) {
      chunk_scaled_dot_kkt(x.k, x.gc, x.beta, out[0], x.seq, {x.c.C, x.c.layout});
    },
    [](const ChunkProblem& p, const ChunkCall& x, const Views& out) {
      kkt_stage::reference<float>(p, x.k, x.gc, x.beta, out[0]);
    },
};
const Stage kUngated{
    "chunk_scaled_dot_kkt without gc",
    {&ChunkCall::k, &ChunkCall::beta},
    outputs,
    [](const ChunkCall& x, const Views& out) {
      chunk_scaled_dot_kkt(x.k, {}, x.beta, out[0], x.seq, {x.c.C, x.c.layout});
    },
    [](const ChunkProblem& p, const ChunkCall& x, const Views& out) {
      kkt_stage::reference<float>(p, x.k, {}, x.beta, out[0]);
    },
};

TEST(ChunkScaledDotKkt, MatchesFp64) { expect_accuracy(kStage); }
TEST(ChunkScaledDotKkt, UngatedMatchesFp64) { expect_accuracy(kUngated); }
TEST(ChunkScaledDotKkt, BitsDoNotDependOnMemoryPackingOrThreads) { expect_stage(kStage); }
TEST(ChunkScaledDotKkt, NaNStaysCausal) { expect_causal(kStage); }
TEST(ChunkScaledDotKkt, PaddingIsLeftAlone) { expect_padding_untouched(kStage); }

// gc far below what e^-gc could hold: only differences are exponentiated. Above the diagonal there is nothing but 0.
TEST(ChunkScaledDotKkt, HugeDecay) {
  for_each_isa([] {
    for (const double step : {-30.0, -104.0, -1000.0}) {
      Random random;
      ChunkTensors t = make_chunk(random, {.T = 90, .K = 16, .V = 1, .C = 64});
      t.gc.fill([&](std::int64_t i) { return step * static_cast<double>(i % 64 / 4 + 1); });
      const std::vector<Tensor> out = results(kStage, t.call());
      for (std::int64_t i = 0; i < 90; ++i) {
        for (std::int64_t j = 0; j < 64; ++j) {
          const double x = out[0].get(i * 64 + j);
          ASSERT_TRUE(std::isfinite(x));
          ASSERT_EQ(x != 0.0, j < i % 64 && (j / 4 == i % 64 / 4 || (step == -30.0 && i % 64 / 4 - j / 4 < 4)))
              << i << " " << j << " " << x;
        }
      }
    }
  });
}

}  // namespace
}  // namespace tidegate::test
