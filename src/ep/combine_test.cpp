// What combine takes and gives beside sums of bf16 rows: values of single rows, a shared row, plain sums, fp64.
#include "ep/test_case.h"

namespace tidegate::test {
namespace {

using ep::Buffer;
using ep::HandlePtr;

struct Step {
  HandlePtr handle;
  Tensor rows, y, out;
};
Step dispatched(Buffer& b, const EpProblem& p) {
  Step s;
  s.handle =
      b.dispatch(p.part_of(p.x, b.rank()), p.part_of(p.ids, b.rank()), {.weights = p.part_of(p.weights, b.rank())});
  s.rows = Tensor(p.what.dtype, {s.handle->rows, p.what.H});
  b.expand(*s.handle, s.rows);
  s.y = like(s.rows);
  apply_experts(s.rows, s.y, b.first_expert(), s.handle->expert_rows);
  s.out = Tensor(p.what.dtype, {s.handle->tokens, p.what.H});
  return s;
}

// 130 channels: whole blocks of vectors, and a rest.
TEST(EpCombine, SharedRowsAndPlainSums) {
  run_ranks(2, [](SharedBootstrap& bootstrap) {
    for (const DType dtype : kKernelTypes) {
      const EpProblem p({2, 5, 3, 130, {7, 4}, EpCase::kHoles, dtype});
      const auto buffer = Buffer::create(p.config(), bootstrap);
      Random random(7);
      const Tensor shared = normal(random, dtype, {p.first.back(), 130});
      Step s = dispatched(*buffer, p);
      buffer->combine(s.y, *s.handle, s.out, {.shared_x = p.part_of(shared, buffer->rank())});
      EXPECT_TRUE(same_bits(s.out, p.part_of(one_process(p, true, shared), buffer->rank())));
      s = dispatched(*buffer, p);
      buffer->combine(s.y, *s.handle, s.out, {.weighted = false});
      EXPECT_TRUE(same_bits(s.out, p.part_of(one_process(p, false), buffer->rank())));
      s = dispatched(*buffer, p);  // weights that are given here count, not those of the dispatch
      const Tensor ones = Tensor(DType::kF32, {s.handle->tokens, 3}).fill(1.0);
      buffer->combine(s.y, *s.handle, s.out, {.weights = ones});
      EXPECT_TRUE(same_bits(s.out, p.part_of(one_process(p, false), buffer->rank())));
    }
  });
}

TEST(EpCombine, ValuesOfRowsGoBackToTheirPairs) {
  run_ranks(2, [](SharedBootstrap& bootstrap) {
    const EpProblem p({2, 5, 3, 16, {7, 4}, EpCase::kHoles, DType::kF32});
    const auto buffer = Buffer::create(p.config(), bootstrap);
    const Step s = dispatched(*buffer, p);
    const std::vector<const void*> rows = buffer->row_pointers(*s.handle);
    for (std::size_t j = 0; j < rows.size(); ++j) {
      EXPECT_EQ(std::memcmp(rows[j], s.rows.view().as<float>() + j * 16, 16 * sizeof(float)), 0) << j;
    }
    const double mine = 100.0 * buffer->rank() + 1.0;
    const Tensor values = Tensor(DType::kF32, {s.handle->rows}).fill([&](std::int64_t j) { return mine + 2.0 * j; });
    Tensor pairs(DType::kF32, {s.handle->tokens, 3});
    buffer->combine({}, *s.handle, {}, {.row_values = values, .pair_values = pairs});
    for (std::size_t i = 0; i < s.handle->rank.size(); ++i) {
      const int rank = s.handle->rank[i];
      EXPECT_EQ(pairs.get(static_cast<std::int64_t>(i)),
                rank < 0 ? 0.0 : 100.0 * rank + 1.0 + 2.0 * s.handle->place[i]);
    }
  });
}

TEST(EpCombine, Fp64RowsAreSummedInFp64) {
  run_ranks(2, [](SharedBootstrap& bootstrap) {
    const EpProblem p({2, 5, 3, 9, {7, 4}, EpCase::kHoles, DType::kF64});
    const auto buffer = Buffer::create(p.config(), bootstrap);
    const Step s = dispatched(*buffer, p);
    buffer->combine(s.y, *s.handle, s.out);
    const std::int64_t first = p.first[static_cast<std::size_t>(buffer->rank())];
    for (std::int64_t i = 0; i < s.out.view().numel(); ++i) {
      double want = 0.0;
      for (std::int64_t k = 0; k < 3; ++k) {
        const std::int64_t pair = (first + i / 9) * 3 + k;
        const std::int32_t e = p.id(pair);
        want += e < 0 ? 0.0 : p.weights.get(pair) * p.x.get(first * 9 + i) * expert_factor(e);
      }
      EXPECT_NEAR(s.out.get(i), want, 1e-14 * (1.0 + std::abs(want)));
    }
  });
}

}  // namespace
}  // namespace tidegate::test
