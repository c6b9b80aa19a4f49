// grouped_matmul_quant and grouped_matmul_swiglu_quant: exact sums, rounding of the second quantisation, bits, bad
// input.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

#include "ops/grouped_matmul_quant/reference.h"
#include "ops/quantize/reference.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

struct Case {
  Tensor x, x_scale, weight, weight_scale, groups, smooth;
  std::vector<std::int64_t> offsets;
  std::int64_t N = 0;
  GroupedQuantOptions options{WeightAxes::kNK, GroupList::kCumsum};

  GroupedQuantInputs inputs() const { return {x, x_scale, weight, weight_scale, groups}; }
  std::int64_t M() const { return x.view().sizes[0]; }
};

Tensor integers(Random& random, const Sizes& sizes, const Form& form = {}) {
  Tensor t(DType::kI8, sizes, form);
  for (std::int64_t i = 0; i < t.view().numel(); ++i) {  // written as bytes: -128 is legal in a product
    t.view().as<std::int8_t>()[offset_at(t, i)] = static_cast<std::int8_t>(random.integer(-128, 127));
  }
  return t;
}

Case make_case(const Sizes& counts, std::int64_t K, std::int64_t N, std::int64_t tail = 0, const Form& weight_form = {},
               WeightAxes axes = WeightAxes::kNK) {
  Random random(static_cast<std::uint64_t>(K + N));
  Case c;
  c.offsets = {0};
  const auto G = static_cast<std::int64_t>(counts.size());
  c.groups = Tensor(DType::kI64, {G});
  for (std::int64_t g = 0; g < G; ++g) {
    c.offsets.push_back(c.offsets.back() + counts[static_cast<std::size_t>(g)]);
    c.groups.view().as<std::int64_t>()[g] = c.offsets.back();
  }
  const std::int64_t M = c.offsets.back() + tail;
  c.N = N;
  c.options.weight_axes = axes;
  c.x = integers(random, {M, K}, padded());
  c.weight = integers(random, axes == WeightAxes::kNK ? Sizes{G, N, K} : Sizes{G, K, N}, weight_form);
  c.x_scale = uniform(random, DType::kF32, {M}, 1e-3, 2e-2);
  c.weight_scale = uniform(random, DType::kF32, {G, N}, 1e-3, 1e-2, padded());
  return c;
}

Tensor product(const Case& c, DType dtype = DType::kF32) {
  Tensor y(dtype, {c.M(), c.N}, padded());
  grouped_matmul_quant(c.inputs(), y, c.options);
  return y;
}
std::vector<float> expected_product(const Case& c) {
  std::vector<float> y(static_cast<std::size_t>(c.M() * c.N), std::nanf(""));
  quant_products::reference_product(c.inputs(), c.offsets.data(), c.options.weight_axes, y.data());
  return y;
}

void expect_equal(const Tensor& y, const std::vector<float>& want) {
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double got = y.get(static_cast<std::int64_t>(i));
    ASSERT_TRUE(got == want[i] || (std::isnan(got) && std::isnan(want[i]))) << i << ": " << got << " " << want[i];
  }
}

// The fp32 product has one definition: it is compared bit by bit. Rows behind the last group stay as they were (NaN).
TEST(GroupedMatmulQuant, IsExact) {
  for_each_isa([] {
    for (const std::int64_t K : {1, 2, 3, 16, 63, 255, 256, 257, 600}) {
      for (const std::int64_t N : {1, 8, 25, 50}) {
        const Case c = make_case({3, 0, 1, 9, 5}, K, N, 2);
        const Tensor y = product(c);
        expect_equal(y, expected_product(c));
        EXPECT_TRUE(y.gaps_untouched());
      }
    }
  });
}

// Every width between two vectors of bytes: what is left over is handled by itself.
TEST(GroupedMatmulQuant, EveryRest) {
  for_each_isa([] {
    for (std::int64_t K = 17; K <= 33; ++K) {
      for (const std::int64_t rows : {1, 20}) {
        const Case c = make_case({rows, 2}, K, 25);
        expect_equal(product(c), expected_product(c));
      }
    }
  });
}

// Rows are taken in fours, with one row of zeros behind them, and in tiles of up to twelve.
TEST(GroupedMatmulQuant, EveryNumberOfRows) {
  for_each_isa([] {
    for (const std::int64_t rows : {1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 63, 64, 127, 128, 129}) {
      const Case c = make_case({rows, 0, 5}, 70, 52);
      expect_equal(product(c), expected_product(c));
    }
  });
}

TEST(GroupedMatmulQuant, LargestSums) {
  for_each_isa([] {
    Case c = make_case({2}, 3000, 3);
    for (std::int64_t i = 0; i < c.x.view().numel(); ++i) {
      c.x.view().as<std::int8_t>()[offset_at(c.x, i)] = -128;
    }
    for (std::int64_t i = 0; i < c.weight.view().numel(); ++i) {
      c.weight.view().as<std::int8_t>()[i] = i < 3000 ? std::int8_t{-128} : std::int8_t{127};
    }
    expect_equal(product(c), expected_product(c));
  });
}

TEST(GroupedMatmulQuant, WeightsInAnyOrder) {
  for_each_isa([] {
    for (const WeightAxes axes : {WeightAxes::kNK, WeightAxes::kKN}) {
      for (const Form& form : {Form{}, padded(), permuted({0, 2, 1}), permuted({0, 2, 1}, 3), low()}) {
        const Case c = make_case({4, 7}, 70, 30, 0, form, axes);
        expect_equal(product(c), expected_product(c));
      }
    }
  });
}

TEST(GroupedMatmulQuant, BitsDoNotDependOnThreadsOrRows) {
  for_each_isa([] {
    const Case c = make_case({300, 1, 40}, 90, 300);
    const Tensor want = product(c, DType::kBF16);
    for_each_thread_count([&] { EXPECT_TRUE(same_bits(product(c, DType::kBF16), want)); });
    Case one = c;  // the last row of the first group alone
    one.x = copied(part(c.x, 0, 299, 300));
    one.x_scale = copied(part(c.x_scale, 0, 299, 300));
    for (std::int64_t g = 0; g < 3; ++g) {
      one.groups.view().as<std::int64_t>()[g] = 1;
    }
    EXPECT_TRUE(same_bits(product(one, DType::kBF16), part(want, 0, 299, 300)));
  });
}

struct Swiglu {
  Tensor q, scale;
};
Swiglu swiglu(const Case& c) {
  Swiglu r{Tensor(DType::kI8, {c.M(), c.N / 2}, padded()), Tensor(DType::kF32, {c.M()})};
  grouped_matmul_swiglu_quant(c.inputs(), c.smooth, r.q, r.scale, c.options);
  return r;
}

// Against the definition with an exact activation: scales to a few fp32 roundings, q off by one only at a tie.
TEST(GroupedMatmulSwigluQuant, MatchesTheDefinition) {
  for_each_isa([] {
    for (const bool smooth : {false, true}) {
      for (const std::int64_t I : {1, 20, 40, 100}) {
        Case c = make_case({5, 0, 9, 130}, 96, 2 * I);
        Random random;
        if (smooth) {
          c.smooth = uniform(random, DType::kF32, {4, I}, 0.5, 2.0);
        }
        for (std::int64_t k = 0; k < 96; ++k) {  // a row of zeros
          c.x.view().as<std::int8_t>()[offset_at(c.x, 3 * 96 + k)] = 0;
        }
        std::vector<float> s(static_cast<std::size_t>(c.M() * I));
        quant_products::reference_swiglu(c.inputs(), c.offsets.data(), c.options.weight_axes, c.smooth, s.data());
        const Swiglu got = swiglu(c);
        std::vector<std::int8_t> q(static_cast<std::size_t>(I));
        for (std::int64_t j = 0; j < c.M(); ++j) {
          const float* row = s.data() + j * I;
          const double scale = quantize_int8::reference_row(row, I, q.data());
          ASSERT_NEAR(got.scale.get(j), scale, 1e-6 * scale) << j;
          for (std::int64_t i = 0; i < I; ++i) {
            const double exact = row[i] / scale;
            const double gap = std::abs(std::abs(exact - std::floor(exact)) - 0.5);
            const double difference = std::abs(got.q.get(j * I + i) - q[static_cast<std::size_t>(i)]);
            ASSERT_LE(difference, gap < 1e-5 * std::max(1.0, std::abs(exact)) ? 1.0 : 0.0) << j << "," << i;
          }
        }
        EXPECT_EQ(got.scale.get(3), 1.0);
        EXPECT_TRUE(got.q.gaps_untouched());
      }
    }
  });
}

TEST(GroupedMatmulSwigluQuant, BitsDoNotDependOnThreadsAndCountsEqualCumsum) {
  for_each_isa([] {
    Case c = make_case({200, 0, 31}, 130, 96);
    const Swiglu want = swiglu(c);
    for_each_thread_count([&] {
      const Swiglu got = swiglu(c);
      EXPECT_TRUE(same_bits(got.q, want.q) && same_bits(got.scale, want.scale));
    });
    c.options.group_list = GroupList::kCounts;
    const std::int64_t counts[] = {200, 0, 31};
    for (std::int64_t g = 0; g < 3; ++g) {
      c.groups.view().as<std::int64_t>()[g] = counts[g];
    }
    EXPECT_TRUE(same_bits(swiglu(c).q, want.q));
  });
}

TEST(GroupedMatmulQuant, Errors) {
  const Case c = make_case({2, 3}, 16, 6);
  const Tensor y(DType::kF32, {5, 6});
  const Tensor q(DType::kI8, {5, 3});
  const Tensor scale(DType::kF32, {5});
  using Change = std::function<void(GroupedQuantInputs&)>;
  const auto bad = [&](const Change& change, const std::string& text) {
    GroupedQuantInputs in = c.inputs();
    change(in);
    expect_error([&] { grouped_matmul_quant(in, y, c.options); }, "grouped_matmul_quant: " + text);
    expect_error([&] { grouped_matmul_swiglu_quant(in, {}, q, scale, c.options); },
                 "grouped_matmul_swiglu_quant: " + text);
  };
  bad([](auto& in) { in.x = {}; }, "x: expected a tensor, got none");
  bad([](auto& in) { in.x.dtype = DType::kF32; }, "x: expected dtype int8, got dtype float32");
  bad([](auto& in) { in.x.strides[1] = 2; }, "x: expected inner stride 1, got 2");
  bad([](auto& in) { in.x_scale.sizes[0] = 4; }, "x_scale: expected shape [5], got [4]");
  bad([](auto& in) { in.x_scale.dtype = DType::kBF16; }, "x_scale: expected dtype float32, got dtype bfloat16");
  bad([](auto& in) { in.weight.rank = 2; }, "weight: expected 3 dimensions, got 2 in [2, 6]");
  bad([](auto& in) { in.weight.dtype = DType::kF32; }, "weight: expected dtype int8, got dtype float32");
  bad([](auto& in) { in.weight.sizes[2] = 15; }, "weight: expected shape [2, 6, 16], got [2, 6, 15]");
  bad([](auto& in) { in.weight.strides[2] = 2; },
      "weight: expected stride 1 in one of the last two dimensions, got 16 and 2");
  bad([](auto& in) { in.weight_scale.sizes[1] = 5; }, "weight_scale: expected shape [2, 6], got [2, 5]");
  bad([](auto& in) { in.groups.sizes[0] = 1; }, "groups: expected shape [2], got [1]");
  bad([](auto& in) { in.groups.dtype = DType::kF32; }, "groups: expected dtype int32 or int64, got dtype float32");
  Tensor groups = c.groups;
  const auto group = [&](std::int64_t first, std::int64_t second, const std::string& text) {
    groups.view().as<std::int64_t>()[0] = first;
    groups.view().as<std::int64_t>()[1] = second;
    bad([&](auto& in) { in.groups = groups; }, text);
  };
  group(2, 1, "groups[1]: expected >= 2, got 1");
  group(-1, 5, "groups[0]: expected >= 0, got -1");
  group(2, 6, "groups[1]: expected <= 5 (of 5 rows), got 6");

  const auto output = [&](const TensorView& y_, const std::string& text) {
    expect_error([&] { grouped_matmul_quant(c.inputs(), y_); }, "grouped_matmul_quant: " + text);
  };
  output(sized(y, 1, 5), "y: expected shape [5, 6], got [5, 5]");
  output(typed(y, DType::kF64), "y: expected dtype float32, bfloat16 or float16, got dtype float64");
  const auto outputs = [&](const TensorView& smooth, const TensorView& q_, const TensorView& scale_,
                           const std::string& text) {
    expect_error([&] { grouped_matmul_swiglu_quant(c.inputs(), smooth, q_, scale_); },
                 "grouped_matmul_swiglu_quant: " + text);
  };
  outputs(y, q, scale, "smooth_scale: expected shape [2, 3], got [5, 6]");
  outputs({}, sized(q, 1, 6), scale, "q: expected shape [5, 3], got [5, 6]");
  outputs({}, typed(q, DType::kBool), scale, "q: expected dtype int8, got dtype bool");
  outputs({}, q, sized(scale, 0, 3), "q_scale: expected shape [5], got [3]");
  outputs({}, q, c.x_scale, "q_scale: expected memory of its own, got an overlap with x_scale");
  GroupedQuantInputs odd = c.inputs();
  odd.weight.sizes[1] = odd.weight_scale.sizes[1] = 5;
  expect_error([&] { grouped_matmul_swiglu_quant(odd, {}, q, scale); },
               "grouped_matmul_swiglu_quant: weight: expected an even number of rows (gate and up), got 5");
}

}  // namespace
}  // namespace tidegate::test
