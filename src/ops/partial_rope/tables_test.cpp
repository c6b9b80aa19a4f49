// mrope_cos_sin, and bad input of all three functions.
#include <gtest/gtest.h>

#include <cmath>

#include "ops/partial_rope/test_case.h"

namespace tidegate::test {
namespace {

constexpr std::int64_t kSection[3] = {11, 11, 10};

Tensor frequencies(std::int64_t half) {
  return Tensor(DType::kF32, {half}).fill([half](std::int64_t i) {
    return std::pow(1e7, -static_cast<double>(i) / static_cast<double>(half));
  });
}

// The axis of every frequency, read from the result: positions 1, 2, 3 and frequencies that are all 1.
std::vector<int> axes_of(std::int64_t half, const std::int64_t section[3]) {
  const Tensor ids =
      Tensor(DType::kI64, {3, 1, 1}).fill([](std::int64_t axis) { return static_cast<double>(axis + 1); });
  const Tensor ones = Tensor(DType::kF32, {half}).fill(1.0);
  const Tensor cos(DType::kF32, {1, 1, 2 * half});
  const Tensor sin(DType::kF32, {1, 1, 2 * half});
  mrope_cos_sin(ids, ones, section, 1.0, cos, sin);
  std::vector<int> axes;
  for (std::int64_t i = 0; i < half; ++i) {
    EXPECT_EQ(sin.get(i), sin.get(half + i));
    EXPECT_EQ(cos.get(i), cos.get(half + i));
    for (int axis = 0; axis < 3; ++axis) {
      if (sin.get(i) == static_cast<double>(std::sin(static_cast<float>(axis + 1)))) {
        axes.push_back(axis);
      }
    }
  }
  return axes;
}

TEST(Mrope, AxesAreInterleaved) {
  const std::vector<int> axes = axes_of(32, kSection);
  ASSERT_EQ(axes.size(), 32u);
  int counts[3] = {};
  for (std::size_t i = 0; i < axes.size(); ++i) {
    EXPECT_EQ(axes[i], static_cast<int>(i % 3)) << i;  // T H W T H W ...
    ++counts[axes[i]];
  }
  EXPECT_EQ(counts[0], 11);
  EXPECT_EQ(counts[1], 11);
  EXPECT_EQ(counts[2], 10);
  constexpr std::int64_t small[3] = {2, 1, 1};
  EXPECT_EQ(axes_of(4, small), (std::vector<int>{0, 1, 2, 0}));
  constexpr std::int64_t text[3] = {5, 0, 0};  // axes without frequencies: all time
  EXPECT_EQ(axes_of(5, text), (std::vector<int>{0, 0, 0, 0, 0}));
}

TEST(Mrope, AnglesAreFp32Products) {
  const Tensor inv_freq = frequencies(32);
  Random random;
  for (const DType ids_type : {DType::kI64, DType::kI32}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
      const Tensor ids = Tensor(ids_type, {3, 2, 9}, reversed()).fill([&](std::int64_t) {
        return static_cast<double>(random.integer(0, 262144));
      });
      const Tensor cos(dtype, {2, 9, 64}, padded());
      const Tensor sin(dtype, {2, 9, 64}, reversed());
      mrope_cos_sin(ids, inv_freq, kSection, 1.25, cos, sin);
      for (std::int64_t k = 0; k < cos.view().numel(); ++k) {
        const std::int64_t i = k % 32;
        const std::int64_t token = k / 64;
        const float angle = static_cast<float>(ids.get(i % 3 * 18 + token)) * static_cast<float>(inv_freq.get(i));
        const double limit = 1.25 * (1.02 * rounding_of(dtype == DType::kF64 ? DType::kF32 : dtype) + 2e-7);
        ASSERT_NEAR(cos.get(k), 1.25 * std::cos(static_cast<double>(angle)), limit);
        ASSERT_NEAR(sin.get(k), 1.25 * std::sin(static_cast<double>(angle)), limit);
      }
      EXPECT_TRUE(cos.gaps_untouched() && sin.gaps_untouched());
      const Tensor text = Tensor(ids_type, {2, 9}).fill([](std::int64_t t) { return static_cast<double>(3 * t); });
      const Tensor three = Tensor(ids_type, {3, 2, 9}).fill([&](std::int64_t k) { return text.get(k % 18); });
      const Tensor cos2(dtype, {2, 9, 64});
      const Tensor sin2(dtype, {2, 9, 64});
      mrope_cos_sin(text, inv_freq, kSection, 1.25, cos2, sin2);
      mrope_cos_sin(three, inv_freq, kSection, 1.25, cos, sin);
      EXPECT_TRUE(same_bits(cos, cos2) && same_bits(sin, sin2));
    }
  }
}

TEST(Mrope, BitsDoNotDependOnThreads) {
  const Tensor inv_freq = frequencies(32);
  const Tensor ids = Tensor(DType::kI64, {2, 50}).fill([](std::int64_t i) { return static_cast<double>(i * 7); });
  const Tensor cos(DType::kBF16, {2, 50, 64});
  const Tensor sin(DType::kBF16, {2, 50, 64});
  mrope_cos_sin(ids, inv_freq, kSection, 1.0, cos, sin);
  for_each_thread_count([&] {
    const Tensor again = like(cos);
    mrope_cos_sin(ids, inv_freq, kSection, 1.0, again, sin);
    EXPECT_TRUE(same_bits(again, cos));
  });
}

struct Call {
  bool transpose;
  TensorView x, cos, sin, y;
  PartialRopeOptions options;
  void operator()() const { (transpose ? partial_rope_bwd : partial_rope_fwd)(x, cos, sin, y, options); }
};

TEST(PartialRopeErrors, Rotation) {
  Random random;
  const Rope v = make_rope(random, {.B = 2,
                                    .T = 3,
                                    .H = 4,
                                    .D = 8,
                                    .R = 6,
                                    .dtype = DType::kBF16,
                                    .table_type = DType::kBF16,
                                    .rounding = Rounding::kHf});
  const Tensor y = like(v.x);
  const std::string floats = "expected dtype float32, bfloat16, float16 or float64, got dtype ";
  for (const bool transpose : {false, true}) {
    const std::string op = transpose ? "partial_rope_bwd: " : "partial_rope_fwd: ";
    const std::string in = transpose ? "dy" : "x";
    const std::string out = transpose ? "dx" : "y";
    const Call good{transpose, v.x, v.cos, v.sin, y, v.c.options()};
    const auto bad = [&](auto change, const std::string& text) {
      Call call = good;
      change(call);
      expect_error(call, op + text);
    };
    bad([](Call& c) { c.x = {}; }, in + ": expected a tensor, got none");
    bad([](Call& c) { c.options.layout = Layout::kNTD; }, in + ": expected 3 dimensions, got 4 in [2, 4, 3, 8]");
    bad([](Call& c) { c.options.layout = Layout::kBSND; }, "cos: expected shape [2, 4, 6], got [2, 3, 6]");
    bad([](Call& c) { c.x.dtype = DType::kI8; }, in + ": " + floats + "int8");
    bad([](Call& c) { c.x.strides[3] = 2; }, in + ": expected inner stride 1, got 2");
    bad([](Call& c) { c.y = {}; }, out + ": expected a tensor, got none");
    bad([](Call& c) { c.y.sizes[1] = 5; }, out + ": expected shape [2, 4, 3, 8] (as " + in + "), got [2, 5, 3, 8]");
    bad([](Call& c) { c.y.dtype = DType::kF32; }, out + ": expected dtype bfloat16 (as " + in + "), got dtype float32");
    bad([](Call& c) { c.y.strides[3] = 3; }, out + ": expected inner stride 1, got 3");
    bad([](Call& c) { c.cos = {}; }, "cos: expected a tensor, got none");
    bad([](Call& c) { c.cos.rank = 1; }, "cos: expected [T, R] or [B, T, R], got [2]");
    bad([](Call& c) { c.cos.sizes[2] = 5; }, "cos: expected an even R from 2 to 8, got 5");
    bad([](Call& c) { c.cos.sizes[2] = 10; }, "cos: expected an even R from 2 to 8, got 10");
    bad([](Call& c) { c.cos.sizes[2] = 0; }, "cos: expected an even R from 2 to 8, got 0");
    bad([](Call& c) { c.cos.sizes[0] = 1; }, "cos: expected shape [2, 3, 6], got [1, 3, 6]");
    bad([](Call& c) { c.cos = ranked(c.cos, 2), c.cos.sizes[1] = 6; }, "cos: expected shape [3, 6], got [2, 6]");
    bad([](Call& c) { c.cos.dtype = c.sin.dtype = DType::kI32; }, "cos: " + floats + "int32");
    bad([](Call& c) { c.cos.dtype = c.sin.dtype = DType::kF32; },
        "cos: expected dtype bfloat16 (as " + in + "), got dtype float32");
    bad([](Call& c) { c.cos.dtype = c.sin.dtype = DType::kF16, c.options.rounding = Rounding::kFp32; },
        "cos: expected dtype bfloat16 (as " + in + ") or float32, got dtype float16");
    bad([](Call& c) { c.cos.strides[2] = 2; }, "cos: expected inner stride 1, got 2");
    bad([](Call& c) { c.sin = {}; }, "sin: expected a tensor, got none");
    bad([](Call& c) { c.sin.sizes[2] = 4; }, "sin: expected shape [2, 3, 6] (as cos), got [2, 3, 4]");
    bad([](Call& c) { c.sin.dtype = DType::kF32; }, "sin: expected dtype bfloat16 (as cos), got dtype float32");
    bad([](Call& c) { c.sin.strides[2] = 2; }, "sin: expected inner stride 1, got 2");
    bad([](Call& c) { c.y = strided(c.x, 0, 8); },
        out + ": expected an output without repeated elements, got stride 24 in dimension 1");
    bad([](Call& c) { c.y = c.x, c.y.data = c.x.as<char>() + 16; },
        out + ": expected memory of its own, got an overlap with " + in);
    bad([](Call& c) { c.y.data = c.sin.data; }, out + ": expected memory of its own, got an overlap with sin");
    good();
  }
  const TensorView packed = contiguous(v.x.view().data, DType::kBF16, {4, 3, 8});
  const TensorView out = contiguous(y.view().data, DType::kBF16, {4, 3, 8});
  expect_error(
      [&] {
        partial_rope_fwd(packed, v.cos, v.sin, out, {Layout::kNTD, Rounding::kHf});
      },
      "partial_rope_fwd: cos: expected [T, R], got [2, 3, 6]");
}

struct Tables {
  TensorView ids, inv_freq;
  std::int64_t section[3];
  TensorView cos, sin;
  void operator()() const { mrope_cos_sin(ids, inv_freq, section, 1.0, cos, sin); }
};

TEST(PartialRopeErrors, Tables) {
  const Tensor ids = Tensor(DType::kI64, {3, 2, 5}).fill(1.0);
  const Tensor inv_freq = frequencies(4);
  const Tensor cos(DType::kF32, {2, 5, 8});
  const Tensor sin(DType::kF32, {2, 5, 8});
  const Tables good{ids, inv_freq, {2, 1, 1}, cos, sin};
  const auto bad = [&](auto change, const std::string& text) {
    Tables call = good;
    change(call);
    expect_error(call, "mrope_cos_sin: " + text);
  };
  bad([](Tables& c) { c.ids = {}; }, "position_ids: expected a tensor, got none");
  bad([](Tables& c) { c.ids.rank = 1; }, "position_ids: expected [B, T] or [3, B, T], got [3]");
  bad([](Tables& c) { c.ids.sizes[0] = 2; }, "position_ids: expected [B, T] or [3, B, T], got [2, 2, 5]");
  bad([](Tables& c) { c.ids.dtype = DType::kF32; }, "position_ids: expected dtype int64 or int32, got dtype float32");
  bad([](Tables& c) { c.inv_freq.rank = 0; }, "inv_freq: expected 1 dimensions, got 0 in []");
  bad([](Tables& c) { c.inv_freq.dtype = DType::kF64; }, "inv_freq: expected dtype float32, got dtype float64");
  bad([](Tables& c) { c.section[1] = -1; }, "section[1]: expected >= 0, got -1");
  bad([](Tables& c) { c.cos.sizes[2] = 6; }, "cos: expected shape [2, 5, 8], got [2, 5, 6]");
  bad([](Tables& c) { c.cos.dtype = DType::kI32; },
      "cos: expected dtype float32, bfloat16, float16 or float64, got dtype int32");
  bad([](Tables& c) { c.sin = {}; }, "sin: expected a tensor, got none");
  bad([](Tables& c) { c.sin.dtype = DType::kF16; }, "sin: expected dtype float32 (as cos), got dtype float16");
  bad([](Tables& c) { c.sin = c.cos; }, "sin: expected memory of its own, got an overlap with cos");
  bad([](Tables& c) { c.cos.strides[1] = 0; },
      "cos: expected an output without repeated elements, got stride 0 in dimension 1");
  good();
}

}  // namespace
}  // namespace tidegate::test
