// Dispatch and combine in several processes: bit for bit what one process computes.
#include <numeric>

#include "ep/test_case.h"
#include "tidegate/quant.h"

namespace tidegate::test {
namespace {

using ep::Buffer;
using ep::Handle;
using ep::HandlePtr;

std::vector<EpCase> cases(int ranks) {
  std::vector<std::int64_t> even(static_cast<std::size_t>(ranks), 5);
  std::vector<std::int64_t> uneven, nothing(static_cast<std::size_t>(ranks), 0);
  for (int r = 0; r < ranks; ++r) {
    uneven.push_back(r % 3 == 1 ? 0 : 7 * r % 5 + 1);
  }
  return {{ranks, 8, 2, 33, even, EpCase::kUniform, DType::kBF16},
          {ranks, 10, 4, 64, uneven, EpCase::kHoles, DType::kF32},
          {ranks, 16, 3, 40, uneven, EpCase::kOneExpert, DType::kBF16},
          {ranks, 2, 2, 17, even, EpCase::kHoles, DType::kF16},
          {ranks, 4, 1, 300, nothing, EpCase::kUniform, DType::kF32}};
}

// The rows that one process would sort together: by expert over all tokens in rank order.
void expect_rows_of_one_process(const EpProblem& p, const Buffer& buffer, const Handle& h, const Tensor& rows) {
  std::int64_t j = 0;
  for (std::int64_t e = 0; e < buffer.local_experts(); ++e) {
    for (std::int64_t pair = 0; pair < p.first.back() * p.what.K; ++pair) {
      if (p.id(pair) != buffer.first_expert() + e) {
        continue;
      }
      ASSERT_LT(j, h.rows);
      const std::int64_t token = pair / p.what.K;
      ASSERT_TRUE(same_bits(part(rows, 0, j, j + 1), part(p.x, 0, token, token + 1))) << "row " << j;
      ASSERT_EQ(h.row_weights[static_cast<std::size_t>(j)], static_cast<float>(p.weights.get(pair)));
      ++j;
    }
  }
  EXPECT_EQ(j, h.rows);
}

Tensor expanded(const Buffer& buffer, const Handle& h, DType dtype, std::int64_t H) {
  Tensor rows(dtype, {h.rows, H});
  buffer.expand(h, rows);
  return rows;
}

void check_case(const EpCase& c, SharedBootstrap& bootstrap) {
  const EpProblem p(c);
  const auto buffer = Buffer::create(p.config(), bootstrap);
  const int rank = bootstrap.rank();
  const TensorView x = p.part_of(p.x, rank);
  const HandlePtr h = buffer->dispatch(x, p.part_of(p.ids, rank), {.weights = p.part_of(p.weights, rank)});
  const Tensor rows = expanded(*buffer, *h, c.dtype, c.H);
  expect_rows_of_one_process(p, *buffer, *h, rows);
  // Where they are, without a copy.
  const auto pointers = buffer->row_pointers(*h);
  for (std::int64_t j = 0; j < h->rows; ++j) {
    EXPECT_TRUE(
        same_bits(contiguous(pointers[static_cast<std::size_t>(j)], c.dtype, {1, c.H}), part(rows, 0, j, j + 1)));
  }

  Tensor y(c.dtype, {h->rows, c.H});
  apply_experts(rows, y, buffer->first_expert(), h->expert_rows);
  Tensor out(c.dtype, {h->tokens, c.H});
  buffer->combine(y, *h, out);
  const Tensor want = one_process(p);
  EXPECT_TRUE(same_bits(out, p.part_of(want, rank)));

  // Results written into the window; other weights; a shared expert; a plain sum.
  const TensorView place = buffer->window_rows(h->rows, c.H, c.dtype);
  apply_experts(rows, place, buffer->first_expert(), h->expert_rows);
  Tensor again = like(out);
  buffer->combine(place, *h, again, {.weights = p.part_of(p.weights, rank), .shared_x = x});
  EXPECT_TRUE(same_bits(again, p.part_of(one_process(p, true, p.x), rank)));
  buffer->combine(y, *h, again, {.weighted = false});
  EXPECT_TRUE(same_bits(again, p.part_of(one_process(p, false), rank)));

  // Other tokens along the same way, and one number for every row back.
  Tensor doubled = copied(x);
  for (std::int64_t i = 0; i < h->tokens * c.H; ++i) {
    doubled.set(i, 2.0 * doubled.get(i));
  }
  buffer->dispatch(doubled, *h);
  const Tensor second = expanded(*buffer, *h, c.dtype, c.H);
  Tensor values(DType::kF32, {h->rows});
  for (std::int64_t j = 0; j < h->rows; ++j) {
    EXPECT_EQ(second.get(j * c.H), 2.0 * rows.get(j * c.H));
    values.set(j, 1000.0 * rank + static_cast<double>(j));
  }
  Tensor back(DType::kF32, {h->tokens, c.K});
  buffer->combine({}, *h, {}, {.row_values = values, .pair_values = back});
  Tensor unsummed(c.dtype, {h->tokens * c.K, c.H});
  buffer->collect(y, *h, unsummed);
  for (std::int64_t i = 0; i < h->tokens * c.K; ++i) {
    const auto at = static_cast<std::size_t>(i);
    EXPECT_EQ(back.get(i), h->rank[at] < 0 ? 0.0 : 1000.0 * h->rank[at] + h->place[at]);
    const std::int32_t e = p.id(p.first[static_cast<std::size_t>(rank)] * c.K + i);
    Tensor element(c.dtype, {1});
    element.set(0, e < 0 ? 0.0 : doubled.get(i / c.K * c.H) / 2.0 * expert_factor(e));
    EXPECT_EQ(unsummed.get(i * c.H), element.get(0));
  }
}

class EpRanks : public testing::TestWithParam<int> {};
TEST_P(EpRanks, MatchOneProcess) {
  run_ranks(GetParam(), [](SharedBootstrap& bootstrap) {
    for (const EpCase& c : cases(bootstrap.size())) {
      check_case(c, bootstrap);
    }
  });
}
INSTANTIATE_TEST_SUITE_P(Counts, EpRanks, testing::Values(1, 2, 3, 4, 8));

TEST(Ep, ManyGenerationsGiveTheSameBits) {
  run_ranks(3, [](SharedBootstrap& bootstrap) {
    const EpProblem p({3, 10, 2, 24, {6, 1, 4}, EpCase::kHoles, DType::kBF16});
    const auto buffer = Buffer::create(p.config(), bootstrap);
    const Tensor want = one_process(p);
    const int rank = bootstrap.rank();
    Random random(static_cast<std::uint64_t>(rank) + 1);
    for (int i = 0; i < 250; ++i) {
      if (random.integer(0, 9) == 0) {  // ranks drift apart
        std::this_thread::sleep_for(std::chrono::microseconds(random.integer(0, 500)));
      }
      const HandlePtr h =
          buffer->dispatch(p.part_of(p.x, rank), p.part_of(p.ids, rank), {.weights = p.part_of(p.weights, rank)});
      const Tensor rows = expanded(*buffer, *h, p.what.dtype, p.what.H);
      const TensorView y = buffer->window_rows(h->rows, p.what.H, p.what.dtype);
      apply_experts(rows, y, buffer->first_expert(), h->expert_rows);
      Tensor out(p.what.dtype, {h->tokens, p.what.H});
      buffer->combine(y, *h, out);
      ASSERT_TRUE(same_bits(out, p.part_of(want, rank))) << "round " << i;
    }
  });
}

// One rank comes so late that the others sleep. Those that it wakes first are in the next call before it has told the
// others; a sleeper that is overlooked then wakes up by itself after 20 ms, which must stay an exception.
TEST(Ep, SleepersAreWokenByTheLastRank) {
  run_ranks(8, [](SharedBootstrap& bootstrap) {
    const EpProblem p({8, 8, 2, 16, std::vector<std::int64_t>(8, 1), EpCase::kUniform, DType::kF32});
    const auto buffer = Buffer::create(p.config(), bootstrap);
    const int rank = bootstrap.rank();
    std::vector<double> milliseconds;
    for (int i = 0; i < 60; ++i) {
      if (i % 8 == rank) {
        std::this_thread::sleep_for(std::chrono::milliseconds(3));
      }
      const auto begin = std::chrono::steady_clock::now();
      for (int call = 0; call < 2; ++call) {
        buffer->dispatch(p.part_of(p.x, rank), p.part_of(p.ids, rank));
      }
      const std::chrono::duration<double, std::milli> spent = std::chrono::steady_clock::now() - begin;
      milliseconds.push_back(spent.count());
    }
    std::sort(milliseconds.begin(), milliseconds.end());
    EXPECT_LT(milliseconds[30], 15.0);
  });
}

TEST(Ep, LargeRowsAreWrittenPastTheCaches) {
  run_ranks(2, [](SharedBootstrap& bootstrap) {
    const EpProblem p({2, 4, 8, 4096, {300, 300}, EpCase::kUniform, DType::kBF16});
    const auto buffer = Buffer::create(p.config(), bootstrap);
    const HandlePtr h = buffer->dispatch(p.part_of(p.x, bootstrap.rank()), p.part_of(p.ids, bootstrap.rank()),
                                         {.weights = p.part_of(p.weights, bootstrap.rank())});
    const TensorView y = buffer->window_rows(h->rows, p.what.H, p.what.dtype);
    buffer->expand(*h, y);
    Tensor odd(p.what.dtype, {h->rows, p.what.H + 1});  // an odd pitch: the ordinary way
    buffer->expand(*h, part(odd, 1, 0, p.what.H));
    EXPECT_TRUE(same_bits(y, part(odd, 1, 0, p.what.H)));
  });
}

TEST(Ep, MaskedPairsDoNotTravel) {
  run_ranks(2, [](SharedBootstrap& bootstrap) {
    EpProblem p({2, 4, 3, 8, {4, 6}, EpCase::kUniform, DType::kF32});
    const int rank = bootstrap.rank();
    Tensor mask(DType::kBool, {p.first.back(), 3});
    mask.fill([&](std::int64_t i) { return i % 3 == 1 || i / 3 % 2 == 0 ? 1.0 : 0.0; });
    const auto buffer = Buffer::create(p.config(), bootstrap);
    const HandlePtr h = buffer->dispatch(p.part_of(p.x, rank), p.part_of(p.ids, rank), {.mask = p.part_of(mask, rank)});
    std::int64_t travelling = 0;
    for (std::size_t i = 0; i < h->rank.size(); ++i) {
      const auto at = p.first[static_cast<std::size_t>(rank)] * 3 + static_cast<std::int64_t>(i);
      EXPECT_EQ(h->rank[i] >= 0, mask.get(at) != 0.0);
      travelling += h->rank[i] >= 0 ? 1 : 0;
    }
    EXPECT_LT(travelling, h->tokens * 3);
    Tensor tokens(DType::kBool, {h->tokens});
    tokens.fill([](std::int64_t i) { return i == 1 ? 1.0 : 0.0; });  // not a prefix
    const HandlePtr one = buffer->dispatch(p.part_of(p.x, rank), p.part_of(p.ids, rank), {.mask = tokens});
    EXPECT_EQ(std::count_if(one->rank.begin(), one->rank.end(), [](std::int32_t r) { return r >= 0; }), 3);
  });
}

TEST(Ep, Int8RowsCarryTheirScale) {
  run_ranks(3, [](SharedBootstrap& bootstrap) {
    const EpProblem p({3, 5, 2, 37, {3, 4, 0}, EpCase::kHoles, DType::kBF16});
    const auto buffer = Buffer::create(p.config(), bootstrap);
    const int rank = bootstrap.rank();
    const HandlePtr h = buffer->dispatch(p.part_of(p.x, rank), p.part_of(p.ids, rank), {.int8 = true});
    Tensor rows(DType::kI8, {h->rows, 37}), scales(DType::kF32, {h->rows});
    buffer->expand(*h, rows, scales);
    Tensor q(DType::kI8, {p.first.back(), 37}), scale(DType::kF32, {p.first.back()});
    quantize(p.x, q, scale);
    for (std::int64_t j = 0; j < h->rows; ++j) {
      const auto at = static_cast<std::size_t>(j);
      const std::int64_t token = p.first[static_cast<std::size_t>(h->row_rank[at])] + h->row_pair[at] / 2;
      EXPECT_TRUE(same_bits(part(rows, 0, j, j + 1), part(q, 0, token, token + 1)));
      EXPECT_EQ(scales.get(j), scale.get(token));
    }
    // Rows that are int8 already travel as they are.
    const HandlePtr again =
        buffer->dispatch(p.part_of(q, rank), p.part_of(p.ids, rank), {.int8 = true, .x_scale = p.part_of(scale, rank)});
    Tensor rows2(DType::kI8, {h->rows, 37}), scales2(DType::kF32, {h->rows});
    buffer->expand(*again, rows2, scales2);
    EXPECT_TRUE(same_bits(rows2, rows));
    EXPECT_TRUE(same_bits(scales2, scales));
  });
}

TEST(Ep, SmoothScalesAreThoseOfTheExpert) {
  run_ranks(3, [](SharedBootstrap& bootstrap) {
    for (const DType dtype : kKernelTypes) {
      const EpProblem p({3, 5, 2, 37, {3, 4, 0}, EpCase::kHoles, dtype});
      const auto buffer = Buffer::create(p.config(), bootstrap);
      const int rank = bootstrap.rank();
      Random random(9);
      const Tensor smooth = uniform(random, DType::kF32, {5, 37}, 0.1, 3.0);
      const HandlePtr h =
          buffer->dispatch(p.part_of(p.x, rank), p.part_of(p.ids, rank), {.int8 = true, .smooth_scale = smooth});
      Tensor rows(DType::kI8, {h->rows, 37}), scales(DType::kF32, {h->rows});
      buffer->expand(*h, rows, scales, smooth);
      std::int64_t j = 0;
      for (std::int64_t e = 0; e < buffer->local_experts(); ++e) {
        for (const std::int64_t end = j + h->expert_rows[static_cast<std::size_t>(e)]; j < end; ++j) {
          const auto at = static_cast<std::size_t>(j);
          const std::int64_t token = p.first[static_cast<std::size_t>(h->row_rank[at])] + h->row_pair[at] / 2;
          const Tensor scaled = Tensor(DType::kF32, {1, 37}).fill([&](std::int64_t c) {
            return p.x.get(token * 37 + c) * smooth.get((buffer->first_expert() + e) * 37 + c);
          });
          Tensor q(DType::kI8, {1, 37}), scale(DType::kF32, {1});
          quantize(scaled, q, scale);
          EXPECT_TRUE(same_bits(part(rows, 0, j, j + 1), q)) << "row " << j;
          EXPECT_EQ(scales.get(j), scale.get(0));
        }
      }
      expect_error([&] { buffer->expand(*h, rows, scales); },
                   "ep_expand: smooth_scale: expected a tensor for the rows that were sent, got none");
    }
  });
}

TEST(Ep, SpecialExpertsStayAtHome) {
  run_ranks(2, [](SharedBootstrap& bootstrap) {
    EpProblem p({2, 4, 4, 9, {3, 2}, EpCase::kUniform, DType::kF32});
    ep::Config config = p.config();
    config.zero_experts = 1;   // id 4
    config.copy_experts = 1;   // 5
    config.const_experts = 2;  // 6, 7
    const int rank = bootstrap.rank();
    for (std::int64_t t = 0; t < p.first.back(); ++t) {
      for (std::int64_t k = 0; k < 3; ++k) {
        p.ids.set(t * 4 + k, static_cast<double>(4 + (t + k) % 4));
      }
    }
    Random random;
    const Tensor v = normal(random, DType::kF32, {2, 9});
    Tensor alpha1(DType::kF32, {2}), alpha2(DType::kF32, {2});
    alpha1.set(0, 0.5).set(1, -2.0);
    alpha2.set(0, 3.0).set(1, 0.25);
    const auto buffer = Buffer::create(config, bootstrap);
    const TensorView x = p.part_of(p.x, rank);
    const HandlePtr h = buffer->dispatch(x, p.part_of(p.ids, rank), {.weights = p.part_of(p.weights, rank)});
    const Tensor rows = expanded(*buffer, *h, DType::kF32, 9);
    Tensor out(DType::kF32, {h->tokens, 9});
    buffer->combine(rows, *h, out, {.ori_x = x, .alpha1 = alpha1, .alpha2 = alpha2, .v = v});
    for (std::int64_t t = 0; t < h->tokens; ++t) {
      const std::int64_t global = p.first[static_cast<std::size_t>(rank)] + t;
      for (std::int64_t c = 0; c < 9; ++c) {
        double total = 0.0;
        const double token = p.x.get(global * 9 + c);
        for (std::int64_t k = 0; k < 4; ++k) {
          const std::int32_t e = p.id(global * 4 + k);
          const double y = e < 4 || e == 5 ? token
                           : e == 4        ? 0.0
                                           : alpha1.get(e - 6) * token + alpha2.get(e - 6) * v.get((e - 6) * 9 + c);
          total += p.weights.get(global * 4 + k) * y;
        }
        EXPECT_NEAR(out.get(t * 9 + c), total, 1e-5);
      }
    }
    // A plain sum is one of rows that travelled: here those of slot 3.
    buffer->combine(rows, *h, out, {.weighted = false});
    EXPECT_TRUE(same_bits(out, x));
  });
}

}  // namespace
}  // namespace tidegate::test
