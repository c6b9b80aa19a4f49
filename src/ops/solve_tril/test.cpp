// solve_tril: accuracy, residual on hard triangles, bits, causality.
#include <gtest/gtest.h>

#include "chunk_causality.h"
#include "ops/solve_tril/reference.h"

namespace tidegate::test {
namespace {

const Stage kStage{
    "solve_tril",
    {&ChunkCall::A0},
    [](const ChunkCase& c) {
      return std::vector<Output>{{"A", Kind::kTokens, c.inter, c.C}};
    },
    [](const ChunkCall& x, const Views& out) { solve_tril(x.A0, out[0], x.seq, x.c.layout); },
    [](const ChunkProblem& p, const ChunkCall& x, const Views& out) { solve_stage::reference<float>(p, x.A0, out[0]); },
};

TEST(SolveTril, MatchesFp64) { expect_accuracy(kStage); }
TEST(SolveTril, BitsDoNotDependOnMemoryPackingOrThreads) { expect_stage(kStage); }
TEST(SolveTril, NaNStaysCausal) { expect_causal(kStage); }
TEST(SolveTril, PaddingIsLeftAlone) { expect_padding_untouched(kStage); }

// A row that is not finite leaves zeros after the diagonal, and through them the later columns of later rows.
TEST(SolveTril, NaNStaysBeforeTheDiagonal) {
  for_each_isa([] {
    for (const std::int64_t bad : {3, 20, 50}) {
      Random random;
      Tensor A0 = normal(random, DType::kF32, {64, 1, 64}, {}, 0.1);
      A0.set(bad * 64, std::nan(""));
      const Tensor A(DType::kF32, {64, 1, 64});
      solve_tril(A0, A, SeqLens::dense(1, 64), Layout::kTND);
      for (std::int64_t i = 0; i < 64; ++i) {
        for (std::int64_t j = 0; j < 64; ++j) {
          const double x = A.get(i * 64 + j);
          ASSERT_TRUE(i < bad || j <= bad ? j <= i || x == 0.0 : std::isfinite(x)) << i << " " << j << " " << x;
          ASSERT_TRUE(j != i || x == 1.0);
        }
      }
    }
  });
}

// max |(I + A0) A - I| for keys that hardly differ and write strengths up to 2.
TEST(SolveTril, Residual) {
  for_each_isa([] {
    double worst = 0.0;
    for (const std::int64_t C : {16, 32, 64, 128}) {
      for (const double mix : {0.0, 0.5, 2.0, 10.0}) {
        Random random(5);
        constexpr std::int64_t kKeys = 64;
        std::vector<double> keys(static_cast<std::size_t>(C * kKeys));
        for (std::int64_t i = 0; i < C; ++i) {
          double squares = 0.0;
          for (std::int64_t d = 0; d < kKeys; ++d) {
            double& x = keys[static_cast<std::size_t>(i * kKeys + d)];
            x = random.normal() + mix;
            squares += x * x;
          }
          for (std::int64_t d = 0; d < kKeys; ++d) {
            keys[static_cast<std::size_t>(i * kKeys + d)] /= std::sqrt(squares);
          }
        }
        Tensor A0(DType::kF32, {C, 1, C});
        for (std::int64_t i = 0; i < C; ++i) {
          const double beta = 2.0 * random.uniform();
          for (std::int64_t j = 0; j < C; ++j) {
            double sum = 0.0;
            for (std::int64_t d = 0; d < kKeys && j < i; ++d) {
              sum += keys[static_cast<std::size_t>(i * kKeys + d)] * keys[static_cast<std::size_t>(j * kKeys + d)];
            }
            A0.set(i * C + j, j < i ? beta * sum : std::nan(""));  // the rest is never read
          }
        }
        const Tensor A(DType::kF32, {C, 1, C});
        solve_tril(A0, A, SeqLens::dense(1, C), Layout::kTND);
        for (std::int64_t i = 0; i < C; ++i) {
          for (std::int64_t j = 0; j < C; ++j) {
            double sum = A.get(i * C + j) - (i == j ? 1.0 : 0.0);
            for (std::int64_t m = 0; m < i; ++m) {
              sum += A0.get(i * C + m) * A.get(m * C + j);
            }
            worst = std::max(worst, std::abs(sum));
            ASSERT_TRUE(j <= i || A.get(i * C + j) == 0.0);
          }
        }
      }
    }
    RecordProperty("residual_" + std::string(isa_name(active_isa())), std::to_string(worst * 1e6) + "e-6");
    EXPECT_LE(worst, 2e-6);
  });
}

}  // namespace
}  // namespace tidegate::test
