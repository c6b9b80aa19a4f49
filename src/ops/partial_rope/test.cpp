// partial_rope_fwd and _bwd: accuracy, rounding rules, tables, layouts, threads, memory.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "ops/partial_rope/test_case.h"

namespace tidegate::test {
namespace {

constexpr Layout kLayouts[] = {Layout::kBSND, Layout::kTND, Layout::kBNSD, Layout::kNTD};

TEST(PartialRope, MatchesFp64) {
  constexpr std::int64_t widths[][2] = {{2, 2},   {3, 2},     {8, 6},     {17, 16},  {30, 30},   {60, 32},
                                        {83, 34}, {100, 100}, {130, 128}, {256, 64}, {520, 166}, {1030, 1030}};
  for (const DType dtype : kKernelTypes) {
    std::map<Isa, Accuracy> y, dx;
    const double bound = stored(dtype, 2e-7);
    Random random;
    int turn = 0;
    for (const auto& [D, R] : widths) {
      for (const Layout layout : kLayouts) {
        const Rope v = make_rope(random, {.D = D,
                                          .R = R,
                                          .dtype = dtype,
                                          .table_type = ++turn % 2 == 0 ? dtype : DType::kF32,
                                          .layout = layout,
                                          .batch_tables = turn % 3 != 0});
        const Tensor truth = forward(wide(v));
        const Tensor truth_dx = backward(wide(v));
        const Tensor plain_y = plain(v, false);
        const Tensor plain_dx = plain(v, true);
        for_each_isa([&] {
          y[active_isa()].add(forward(v), plain_y, truth, 2e-7);
          dx[active_isa()].add(backward(v), plain_dx, truth_dx, 2e-7);
        });
      }
    }
    for (const auto& [isa, a] : y) {
      const std::string name = std::string(dtype_name(dtype)) + "_" + std::string(isa_name(isa));
      a.expect("y_" + name, bound);
      dx.at(isa).expect("dx_" + name, bound);
    }
  }
}

TEST(PartialRope, ReferenceIsTheDefinitionAndItsDerivative) {
  Random random;
  for (const Layout layout : kLayouts) {
    for (const bool batch_tables : {false, true}) {
      Rope v = wide(make_rope(random, {.D = 7, .R = 4, .layout = layout, .batch_tables = batch_tables}));
      const Tensor y = forward(v);
      for (std::int64_t b = 0; b < v.rows(); ++b) {
        for (std::int64_t t = 0; t < v.c.T; ++t) {
          for (std::int64_t h = 0; h < v.c.H; ++h) {
            for (std::int64_t i = 0; i < 7; ++i) {
              const double x = v.x.get(v.at(b, t, h, i));
              double expected = x;
              if (i < 4) {
                const double other = v.x.get(v.at(b, t, h, (i + 2) % 4));
                expected =
                    x * v.cos.get(v.table_at(b, t, i)) + (i < 2 ? -other : other) * v.sin.get(v.table_at(b, t, i));
              }
              ASSERT_NEAR(y.get(v.at(b, t, h, i)), expected, 1e-15);
            }
          }
        }
      }
      Rope grad = v;
      grad.x = normal(random, DType::kF64, v.c.sizes());
      const Tensor dx = backward(grad);
      expect_gradient(v.x, dx, [&] { return dot(forward(v), grad.x); });
    }
  }
}

// Nearest even with the type's significant bits; results here are far from the ends of the ranges.
double rounded(double value, DType dtype) {
  const int bits = dtype == DType::kBF16 ? 8 : dtype == DType::kF16 ? 11 : 24;
  int exponent = 0;
  const double mantissa = std::frexp(value, &exponent);
  const double kept = dtype == DType::kF16 && exponent < -13 ? bits + exponent + 13 : bits;  // denormals
  return std::ldexp(std::nearbyint(std::ldexp(mantissa, static_cast<int>(kept))), exponent - static_cast<int>(kept));
}

// Transformers' q * cos + rotate_half(q) * sin in the type itself: both products and the sum are rounded. Equal bits.
TEST(PartialRope, HfRoundsEveryStep) {
  for_each_isa([] {
    for (const DType dtype : kKernelTypes) {
      for (const std::int64_t D : {22, 64, 100}) {
        Random random;
        const Rope v = make_rope(
            random,
            {.T = 40, .D = D, .R = D == 100 ? 66 : D, .dtype = dtype, .table_type = dtype, .rounding = Rounding::kHf});
        const Tensor y = forward(v);
        const Tensor dx = backward(v);
        const std::int64_t half = v.c.R / 2;
        for (std::int64_t k = 0; k < y.view().numel(); ++k) {
          const std::int64_t i = k % D;
          if (i >= v.c.R) {
            ASSERT_EQ(y.get(k), v.x.get(k));
            continue;
          }
          const std::int64_t table = v.table_at(k / D / (v.c.H * v.c.T), k / D % v.c.T, 0);
          const std::int64_t j = i < half ? i + half : i - half;
          const double other = v.x.get(k - i + j);
          const double own = rounded(v.x.get(k) * v.cos.get(table + i), dtype);
          const double turned = rounded(other * v.sin.get(table + i), dtype);
          const double turned_back = rounded(other * v.sin.get(table + j), dtype);
          ASSERT_EQ(y.get(k), rounded(i < half ? own - turned : own + turned, dtype)) << dtype_name(dtype) << " " << k;
          ASSERT_EQ(dx.get(k), rounded(i < half ? own + turned_back : own - turned_back, dtype)) << k;
        }
      }
    }
  });
}

TEST(PartialRope, InPlaceHasTheSameBits) {
  for_each_isa([] {
    for (const DType dtype : kKernelTypes) {
      for (const Rounding rounding : {Rounding::kHf, Rounding::kFp32}) {
        for (const Layout layout : kLayouts) {
          Random random;
          Rope v = make_rope(random, {.D = 53,
                                      .R = 38,
                                      .dtype = dtype,
                                      .table_type = dtype,
                                      .layout = layout,
                                      .rounding = rounding,
                                      .form = padded()});
          const Tensor y = forward(v);
          const Tensor dx = backward(v);
          for (std::int64_t k = 0; k < y.view().numel(); ++k) {
            ASSERT_TRUE(k % 53 < 38 || (y.get(k) == v.x.get(k) && dx.get(k) == v.x.get(k)));
          }
          Rope other = v;
          partial_rope_fwd(v.x, v.cos, v.sin, v.x, v.c.options());
          partial_rope_bwd(other.x, other.cos, other.sin, other.x, other.c.options());
          EXPECT_TRUE(same_bits(v.x, y) && same_bits(other.x, dx));
          EXPECT_TRUE(v.x.gaps_untouched() && other.x.gaps_untouched());
        }
      }
    }
  });
}

// NaN in one channel reaches its partner and nothing else; a NaN that passes through keeps its place.
TEST(PartialRope, NaNStaysInItsPair) {
  for_each_isa([] {
    Random random;
    Rope v = make_rope(random, {.D = 40, .R = 34});
    const Tensor clean = forward(v);
    const std::int64_t row = 40 * 7;
    v.x.set(row + 3, std::nan(""));
    v.x.set(row + 36, std::nan(""));
    const Tensor y = forward(v);
    for (std::int64_t k = 0; k < y.view().numel(); ++k) {
      const bool reached = k == row + 3 || k == row + 3 + 17 || k == row + 36;
      ASSERT_EQ(std::isnan(y.get(k)), reached) << k;
      ASSERT_TRUE(reached || y.get(k) == clean.get(k)) << k;
    }
  });
}

TEST(PartialRope, LayoutsHaveTheSameBits) {
  for_each_isa([] {
    Random random;
    const Rope v = make_rope(random, {.D = 40, .R = 34, .dtype = DType::kBF16, .layout = Layout::kBSND});
    Rope heads = v;
    heads.c.layout = Layout::kBNSD;
    heads.x = copied(exchanged(v.x, 1, 2));
    EXPECT_TRUE(same_bits(exchanged(forward(heads), 1, 2), forward(v)));
    EXPECT_TRUE(same_bits(exchanged(backward(heads), 1, 2), backward(v)));
    Rope shared = v;  // [T,R]: the same angles for every row
    shared.cos = uniform(random, DType::kF32, {5, 34}, -1.0, 1.0);
    shared.sin = uniform(random, DType::kF32, {5, 34}, -1.0, 1.0);
    Rope repeated = v;
    repeated.cos.fill([&](std::int64_t i) { return shared.cos.get(i % (5 * 34)); });
    repeated.sin.fill([&](std::int64_t i) { return shared.sin.get(i % (5 * 34)); });
    EXPECT_TRUE(same_bits(forward(shared), forward(repeated)));
  });
}

TEST(PartialRope, BitsDoNotDependOnThreadsOrCallers) {
  for_each_isa([] {
    Random random;
    const Rope v = make_rope(random, {.T = 200,
                                      .H = 7,
                                      .D = 100,
                                      .R = 64,
                                      .dtype = DType::kBF16,
                                      .table_type = DType::kBF16,
                                      .rounding = Rounding::kHf});
    const Tensor y = forward(v);
    const Tensor dx = backward(v);
    const auto again = [&] { EXPECT_TRUE(same_bits(forward(v), y) && same_bits(backward(v), dx)); };
    for_each_thread_count(again);
    on_eight_callers([&](int) { again(); });
  });
}

TEST(PartialRope, AnyMemory) {
  for_each_isa([] {
    for (const DType dtype : kKernelTypes) {
      for (const Layout layout : {Layout::kBSND, Layout::kBNSD}) {
        for (const std::int64_t R : {2, 14, 42, 130}) {
          RopeCase c{.D = R + (R == 42 ? 0 : 3), .R = R, .dtype = dtype, .table_type = dtype, .layout = layout};
          Random random(3);
          const Rope dense = make_rope(random, c);
          const Tensor y = forward(dense);
          const Tensor dx = backward(dense);
          for (const Form& form : {low(), padded(), low(reversed()), permuted({1, 2, 0, 3}, 3)}) {
            c.form = form;
            Random again(3);
            Rope v = make_rope(again, c);
            const Tensor tables[] = {v.cos, v.sin};
            v.cos = Tensor(dtype, c.table_sizes(), form.order.empty() ? form : permuted({1, 0, 2}, 5));
            v.sin = like(v.cos);
            v.cos.fill([&](std::int64_t i) { return tables[0].get(i); });
            v.sin.fill([&](std::int64_t i) { return tables[1].get(i); });
            const Tensor out = forward(v);
            const Tensor got = backward(v);
            EXPECT_TRUE(same_bits(out, y) && same_bits(got, dx));
            EXPECT_TRUE(out.gaps_untouched() && got.gaps_untouched());
          }
        }
      }
      Random random;
      forward(make_rope(random, {.T = 0, .dtype = dtype, .table_type = dtype}));
      forward(make_rope(random, {.H = 0, .dtype = dtype, .table_type = dtype}));
    }
  });
}

TEST(PartialRope, CallersFlushToZeroDoesNotMatter) {
  for_each_isa([] {
    Random random;
    Rope v = make_rope(random, {.D = 30, .R = 22});
    v.x.fill([&](std::int64_t) { return random.normal() * 1e-39; });
    const Tensor y = forward(v);
    const Tensor dx = backward(v);
    ASSERT_NE(y.get(3), 0.0);
    const FlushDenormals flush;
    const Tensor out = forward(v);
    const Tensor got = backward(v);
    EXPECT_TRUE(flush.still_set());
    EXPECT_TRUE(same_bits(out, y) && same_bits(got, dx));
  });
}

}  // namespace
}  // namespace tidegate::test
