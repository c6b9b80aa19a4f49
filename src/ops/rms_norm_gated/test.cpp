// rms_norm_gated_fwd and _bwd: accuracy, rounding rules, strides, threads.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "ops/rms_norm_gated/test_case.h"
#include "row_norm_suite.h"

namespace tidegate::test {
namespace {

constexpr Activation kGates[] = {Activation::kSilu, Activation::kSigmoid};

struct Accuracies {
  Accuracy y, rstd, dx, dz, dweight;
};

TEST(RmsNormGated, MatchesFp64) {
  for (const DType dtype : kKernelTypes) {
    std::map<Isa, Accuracies> accuracy;
    const double bound = stored(dtype, 3e-7);
    const double gradient_bound = stored(dtype, 1e-6);
    Random random;
    int turn = 0;
    for (const std::int64_t D : kWidths) {
      for (const Activation gate : kGates) {
        const RmsNormGatedOptions options{++turn % 2 == 0 ? 1e-6 : 1e-5, gate, Rounding::kFp32};
        GatedNorm v = make_gated(random, dtype, kKernelTypes[turn % 3], {2, D == 17 ? 900 : 40, D}, options);
        if (turn % 5 == 0) {
          v.weight = Tensor();
        }
        const GatedForward truth = forward(wide(v));
        const GatedBackward gradient = backward(wide(v));
        const GatedForward plain = plain_forward(v);
        const GatedBackward plain_gradient = plain_backward(v);
        double terms = 0.0;  // in narrow rows dx is a small difference of these
        for (std::int64_t i = 0; i < v.dy.view().numel(); ++i) {
          const double w = v.weight.defined() ? v.weight.get(i % D) : 1.0;
          terms = std::max(terms, std::abs(v.dy.get(i) * w * v.z.get(i) * v.rstd.get(i / D)));
        }
        for_each_isa([&] {
          const GatedForward got = forward(v);
          const GatedBackward got_gradient = backward(v);
          Accuracies& a = accuracy[active_isa()];
          a.y.add(got.y, plain.y, truth.y, 3e-7);
          a.rstd.add(got.rstd, plain.rstd, truth.rstd, 3e-7);
          a.dz.add(got_gradient.dz, plain_gradient.dz, gradient.dz, 1e-6);
          a.dweight.add(got_gradient.dweight, plain_gradient.dweight, gradient.dweight, 1e-6);
          Accuracy narrow;
          (D < 8 ? narrow : a.dx).add(got_gradient.dx, plain_gradient.dx, gradient.dx, 1e-6, D < 8 ? terms : 0.0);
        });
      }
    }
    for (const auto& [isa, a] : accuracy) {
      const std::string name = std::string(dtype_name(dtype)) + "_" + std::string(isa_name(isa));
      a.y.expect("y_" + name, bound);
      a.rstd.expect("rstd_" + name, 3e-7);
      a.dx.expect("dx_" + name, gradient_bound);
      a.dz.expect("dz_" + name, gradient_bound);
      a.dweight.expect("dweight_" + name, 1e-6);
    }
  }
}

TEST(RmsNormGated, ReferenceIsTheDefinitionAndItsDerivative) {
  Random random;
  for (const Activation gate : kGates) {
    GatedNorm v = wide(make_gated(random, DType::kF32, DType::kF32, {4, 5}, {0.3, gate, Rounding::kFp32}));
    const GatedForward out = forward(v);
    for (std::int64_t i = 0; i < 20; ++i) {
      double squares = 0.0;
      for (std::int64_t c = 0; c < 5; ++c) {
        squares += v.x.get(i / 5 * 5 + c) * v.x.get(i / 5 * 5 + c);
      }
      const double s = 1.0 / (1.0 + std::exp(-v.z.get(i)));
      const double act = gate == Activation::kSilu ? v.z.get(i) * s : s;
      EXPECT_NEAR(out.y.get(i), v.weight.get(i % 5) * v.x.get(i) / std::sqrt(squares / 5 + 0.3) * act, 1e-14);
    }
    v.rstd = out.rstd;
    const GatedBackward gradient = backward(v);
    const auto loss = [&] { return dot(forward(v).y, v.dy); };
    expect_gradient(v.x, gradient.dx, loss);
    expect_gradient(v.z, gradient.dz, loss);
    expect_gradient(v.weight, gradient.dweight, loss);
  }
}

// Nearest even with `bits` significant bits; the values of this test are far from the ends of the ranges.
double rounded(double value, int bits) {
  int exponent = 0;
  const double mantissa = std::frexp(value, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(mantissa, bits)), exponent - bits);
}
double rounded(double value, DType dtype) {
  return rounded(value, dtype == DType::kBF16 ? 8 : dtype == DType::kF16 ? 11 : 24);
}

// Transformers: the norm is rounded to x's type, the product with the weight to the promoted type, the result to x's.
// fp32 everywhere where nothing is said, so every step is an fp32 rounding first.
TEST(RmsNormGated, HfRoundsStepByStep) {
  for_each_isa([] {
    for (const DType dtype : kKernelTypes) {
      for (const int weight : {0, 1, 2, 3}) {  // the three types, and none
        for (const Activation gate : kGates) {
          Random random;
          GatedNorm v = make_gated(random, dtype, kKernelTypes[weight % 3], {200, 60}, {1e-6, gate, Rounding::kHf});
          if (weight == 3) {
            v.weight = Tensor();
          }
          const GatedForward out = forward(v);
          std::int64_t different = 0;
          for (std::int64_t i = 0; i < out.y.view().numel(); ++i) {
            const double n = rounded(rounded(v.x.get(i) * out.rstd.get(i / 60), DType::kF32), dtype);
            double m = n;
            if (v.weight.defined()) {
              m = rounded(n * v.weight.get(i % 60), DType::kF32);
              m = v.weight.view().dtype == dtype ? rounded(m, dtype) : m;
            }
            const double s = 1.0 / (1.0 + std::exp(-v.z.get(i)));
            const double act = rounded(gate == Activation::kSilu ? v.z.get(i) * s : s, DType::kF32);
            const double expected = rounded(rounded(m * act, DType::kF32), dtype);
            different += out.y.get(i) != expected ? 1 : 0;
            // The gate is an fp32 function with its own last bits; they can tip a 16-bit rounding, by one step.
            const double steps = dtype == DType::kF32 ? 4.0 : 2.02;
            const double smallest = dtype == DType::kF16 ? 0x1p-24 : 0.0;
            ASSERT_NEAR(out.y.get(i), expected, steps * rounding_of(dtype) * std::abs(expected) + smallest);
          }
          EXPECT_LE(different, dtype == DType::kF32 ? 12000 : 12) << dtype_name(dtype) << " weight " << weight;
        }
      }
    }
  });
}

// What the extra roundings cost against fp64: independent errors, as many as there are roundings.
TEST(RmsNormGated, HfAccuracy) {
  for (const DType dtype : kKernelTypes) {
    for (const DType weight_type : {dtype, DType::kF32}) {
      std::map<Isa, Accuracy> y;
      Random random;
      const GatedNorm v = make_gated(random, dtype, weight_type, {300, 128}, {1e-6, Activation::kSilu, Rounding::kHf});
      const GatedForward truth = forward(wide(v));
      const GatedForward plain = plain_forward(v);
      for_each_isa([&] { y[active_isa()].add(forward(v).y, plain.y, truth.y, 1e-3); });
      const double roundings = dtype == DType::kF32 ? 1.0 : weight_type == dtype ? 3.0 : 2.0;
      const double bound = stored(dtype, 3e-7) * std::sqrt(roundings);
      for (const auto& [isa, a] : y) {
        a.expect("y_" + std::string(dtype_name(dtype)) + "_weight_" + std::string(dtype_name(weight_type)) + "_" +
                     std::string(isa_name(isa)),
                 bound);
      }
    }
  }
}

void expect_same(const GatedBackward& a, const GatedBackward& b) {
  EXPECT_TRUE(same_bits(a.dx, b.dx));
  EXPECT_TRUE(same_bits(a.dz, b.dz));
  EXPECT_TRUE(same_bits(a.dweight, b.dweight));
}

TEST(RmsNormGated, RowsDoNotMix) {
  for_each_isa([] {
    Random random;
    GatedNorm v = make_gated(random, DType::kBF16, DType::kF32, {5, 37});
    const GatedForward clean = forward(v);
    const GatedBackward clean_gradient = backward(v);
    v.x.set(2 * 37 + 20, std::nan(""));
    const GatedForward out = forward(v);
    const GatedBackward gradient = backward(v);
    for (std::int64_t row = 0; row < 5; ++row) {
      const auto same = [&](const TensorView& a, const TensorView& b) {
        return bool(same_bits(part(a, 0, row, row + 1), part(b, 0, row, row + 1)));
      };
      EXPECT_EQ(std::isnan(out.rstd.get(row)), row == 2);
      EXPECT_EQ(same(out.y, clean.y), row != 2);
      EXPECT_EQ(same(gradient.dx, clean_gradient.dx), row != 2);
      EXPECT_EQ(same(gradient.dz, clean_gradient.dz), row != 2);
    }
  });
}

TEST(RmsNormGated, AnyGradientMayBeAbsentAndRoundingDoesNotChangeThem) {
  for_each_isa([] {
    Random random;
    GatedNorm v = make_gated(random, DType::kBF16, DType::kBF16, {70, 21});
    const GatedBackward all = backward(v);
    for (int mask = 0; mask < 8; ++mask) {
      const GatedBackward out = gradients_of(v);
      const TensorView none;
      rms_norm_gated_bwd(v.dy, v.x, v.z, v.weight, v.rstd, mask & 1 ? out.dx.view() : none,
                         mask & 2 ? out.dz.view() : none, mask & 4 ? out.dweight.view() : none, v.options);
      EXPECT_TRUE(!(mask & 1) || same_bits(out.dx, all.dx)) << mask;
      EXPECT_TRUE(!(mask & 2) || same_bits(out.dz, all.dz)) << mask;
      EXPECT_TRUE(!(mask & 4) || same_bits(out.dweight, all.dweight)) << mask;
    }
    v.options.rounding = Rounding::kFp32;
    expect_same(backward(v), all);
  });
}

const RowNorm kNorm{2, true,
                    [](const Views& in, const TensorView& y, const TensorView& rstd) {
                      rms_norm_gated_fwd(in[0], in[1], in[2], y, rstd);
                    },
                    [](const Views& in, const TensorView& dy, const TensorView& rstd, const Views& out) {
                      rms_norm_gated_bwd(dy, in[0], in[1], in[2], rstd, out[0], out[1], out[2]);
                    }};
TEST(RmsNormGated, BitsDoNotDependOnThreadsCallersOrNeighbours) { expect_bits_of_rows(kNorm); }
TEST(RmsNormGated, AnyMemory) { expect_any_memory_of_rows(kNorm); }
TEST(RmsNormGated, CallersFlushToZeroDoesNotMatter) { expect_rows_ignore_flush_to_zero(kNorm); }
TEST(RmsNormGated, StreamedStoresHaveTheSameBits) {
  expect_streamed_rows(kNorm, DType::kF32, DType::kF32);
  expect_streamed_rows(kNorm, DType::kBF16, DType::kBF16);
}

}  // namespace
}  // namespace tidegate::test
