// Rows of a number that does not depend on the routing.
#include <cstring>

#include "ep/test_case.h"
#include "tidegate/error.h"

namespace tidegate::test {
namespace {

using ep::Buffer;

Tensor filled(DType dtype, std::initializer_list<std::int64_t> sizes) {
  return Tensor(dtype, sizes).fill([](std::int64_t) { return 7.0; });
}

// Different experts in every token, with a hole here and there.
void spread_ids(EpProblem& p) {
  p.ids.fill([&](std::int64_t pair) {
    const std::int64_t t = pair / p.what.K, k = pair % p.what.K;
    return (t + k) % 5 == 0 ? -1.0 : static_cast<double>((3 * t + k) % p.what.E);
  });
}

TEST(EpStatic, RowsBehindThoseThatCameAreZeroAndChangeNothing) {
  for (const std::int64_t experts :
       {std::int64_t{2}, std::int64_t{5}, std::int64_t{9}}) {  // fewer than ranks, than slots
    run_ranks(3, [&](SharedBootstrap& bootstrap) {
      EpProblem p({3, experts, std::min<std::int64_t>(4, experts), 24, {6, 0, 3}, EpCase::kUniform, DType::kBF16});
      spread_ids(p);
      const auto buffer = Buffer::create(p.config(), bootstrap);
      const int rank = bootstrap.rank();
      const TensorView x = p.part_of(p.x, rank), ids = p.part_of(p.ids, rank), weights = p.part_of(p.weights, rank);
      const auto plain = buffer->dispatch(x, ids, {.weights = weights});
      Tensor want(DType::kBF16, {plain->rows, 24});
      buffer->expand(*plain, want);
      EXPECT_EQ(plain->shape_rows, plain->rows);

      const auto h = buffer->dispatch(x, ids, {.weights = weights, .static_shape = true});
      ASSERT_EQ(h->shape_rows, 9 * std::min(p.what.K, buffer->local_experts()));
      EXPECT_EQ(h->rows, plain->rows);
      EXPECT_EQ(h->expert_rows, plain->expert_rows);
      Tensor rows = filled(DType::kBF16, {h->shape_rows, 24}), y = filled(DType::kBF16, {h->shape_rows, 24});
      buffer->expand(*h, rows);
      EXPECT_TRUE(same_bits(part(rows, 0, 0, h->rows), want));
      for (std::int64_t i = h->rows * 24; i < h->shape_rows * 24; ++i) {
        EXPECT_EQ(rows.get(i), 0.0);
      }
      apply_experts(rows, y, buffer->first_expert(), h->expert_rows);
      const Tensor row_values = Tensor(DType::kF32, {h->shape_rows}).fill([](std::int64_t j) { return 1.0 + j; });
      Tensor out(DType::kBF16, {h->tokens, 24}), values(DType::kF32, {h->tokens, p.what.K});
      buffer->combine(y, *h, out, {.row_values = row_values, .pair_values = values});
      EXPECT_TRUE(same_bits(out, p.part_of(one_process(p), rank)));
      for (std::size_t i = 0; i < h->place.size(); ++i) {
        EXPECT_EQ(values.get(static_cast<std::int64_t>(i)), h->place[i] + 1.0);  // -1: 0
      }
      Tensor pairs(DType::kBF16, {h->tokens * p.what.K, 24});
      buffer->collect(y, *h, pairs);

      // Along the same way again, and as int8.
      buffer->dispatch(x, *h);
      Tensor again = filled(DType::kBF16, {h->shape_rows, 24});
      buffer->expand(*h, again);
      EXPECT_TRUE(same_bits(again, rows));
      const auto as_int8 = buffer->dispatch(x, ids, {.int8 = true, .static_shape = true, .static_tokens = 11});
      EXPECT_EQ(as_int8->shape_rows, 11 * std::min(p.what.K, buffer->local_experts()));
      Tensor q = filled(DType::kI8, {as_int8->shape_rows, 24}), scales = filled(DType::kF32, {as_int8->shape_rows});
      buffer->expand(*as_int8, q, scales);
      for (std::int64_t j = as_int8->rows; j < as_int8->shape_rows; ++j) {
        EXPECT_EQ(q.get(j * 24 + 23), 0.0);
        EXPECT_EQ(scales.get(j), 0.0);
      }
    });
  }
}

TEST(EpStatic, RowsThatNeedNotFitAreRefused) {
  run_ranks(2, [&](SharedBootstrap& bootstrap) {
    const EpProblem p({2, 2, 2, 8, {3, 3}, EpCase::kOneExpert, DType::kF32});  // twice in every token
    const auto buffer = Buffer::create(p.config(), bootstrap);
    const int rank = bootstrap.rank();
    const TensorView x = p.part_of(p.x, rank), ids = p.part_of(p.ids, rank);
    EXPECT_EQ(buffer->dispatch(x, ids)->rows, rank == 1 ? 12 : 0);
    expect_error([&] { buffer->dispatch(x, ids, {.static_shape = true}); },
                 "ep_dispatch: ids: expected at most 1 experts of rank 1 in a token (static_shape), got 2 in token 0");
  });
  run_ranks(2, [&](SharedBootstrap& bootstrap) {
    const EpProblem p({2, 2, 1, 8, {3, 3}, EpCase::kUniform, DType::kF32});
    const auto buffer = Buffer::create(p.config(), bootstrap);
    const int rank = bootstrap.rank();
    std::string text = "nothing";
    try {
      buffer->dispatch(p.part_of(p.x, rank), p.part_of(p.ids, rank), {.static_shape = rank == 1});
    } catch (const ep::Failure& failure) {
      text = failure.what();
    }
    EXPECT_NE(text.find(" disagree: static_shape is "), std::string::npos) << text;
  });
}

}  // namespace
}  // namespace tidegate::test
