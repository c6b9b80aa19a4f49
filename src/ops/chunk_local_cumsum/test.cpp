// chunk_local_cumsum: accuracy, options, bits, causality.
#include <gtest/gtest.h>

#include "chunk_causality.h"
#include "ops/chunk_local_cumsum/reference.h"

namespace tidegate::test {
namespace {

const Stage kStage{
    "chunk_local_cumsum",
    {&ChunkCall::g},
    [](const ChunkCase& c) {
      return std::vector<Output>{{"gc", Kind::kGate, c.sum_type()}};
    },
    [](const ChunkCall& x, const Views& out) { chunk_local_cumsum(x.g, out[0], x.c.C, x.seq, {.layout = x.c.layout}); },
    [](const ChunkProblem& p, const ChunkCall& x, const Views& out) {
      cumsum_stage::reference<float>(p, x.g, out[0], {.layout = x.c.layout});
    },
    1e-7,
};

TEST(ChunkLocalCumsum, MatchesFp64) { expect_accuracy(kStage); }
TEST(ChunkLocalCumsum, BitsDoNotDependOnMemoryPackingOrThreads) { expect_stage(kStage); }
TEST(ChunkLocalCumsum, NaNStaysCausal) { expect_causal(kStage); }
TEST(ChunkLocalCumsum, PaddingIsLeftAlone) { expect_padding_untouched(kStage); }

// Every type of g and out, every option, against the definition written out here.
TEST(ChunkLocalCumsum, OptionsAndTypes) {
  for_each_isa([] {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
      for (const DType out_type : {DType::kF32, DType::kF64}) {
        for (const std::int64_t C : {1, 2, 8, 64, 256}) {
          for (const bool reverse : {false, true}) {
            Random random;
            const Tensor g = uniform(random, dtype, {130, 11}, -20.0, 0.0);
            const Tensor out(out_type, {130, 11});
            const SeqLens seq = SeqLens::from_lengths(std::vector<std::int64_t>{0, 70, 60});
            chunk_local_cumsum(g, out, C, seq, {reverse, 1.25, -12.0, Layout::kTND});
            for (const Chunk& c : seq.chunks(C)) {
              for (std::int64_t h = 0; h < 11; ++h) {
                double sum = 0.0;
                for (std::int64_t n = 0; n < c.end - c.begin; ++n) {
                  const std::int64_t t = reverse ? c.end - 1 - n : c.begin + n;
                  sum += std::max(g.get(t * 11 + h), -12.0);
                  const double limit = (out_type == DType::kF32 ? 6e-8 : 1e-15) * std::max(1.0, -1.25 * sum);
                  ASSERT_NEAR(out.get(t * 11 + h), 1.25 * sum, limit) << t << " " << h << " C=" << C;
                }
              }
            }
          }
        }
      }
    }
  });
}

TEST(ChunkLocalCumsum, NaNPassesTheFloor) {
  for_each_isa([] {
    Tensor g(DType::kF32, {3, 1});
    g.fill(-200.0).set(1, std::nan(""));
    const Tensor out(DType::kF32, {3, 1});
    chunk_local_cumsum(g, out, 4, SeqLens::dense(1, 3), {.floor = -104.0, .layout = Layout::kTND});
    EXPECT_EQ(out.get(0), -104.0);
    EXPECT_TRUE(std::isnan(out.get(1)) && std::isnan(out.get(2)));
  });
}

}  // namespace
}  // namespace tidegate::test
