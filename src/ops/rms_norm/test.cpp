// rms_norm_fwd and _bwd (zero-centred): accuracy, strides, threads, bad input.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "ops/rms_norm/reference.h"
#include "row_norm_suite.h"

namespace tidegate::test {
namespace {

struct Norm {
  Tensor x, weight, dy, rstd;
  double eps = 1e-6;

  DType dtype() const { return x.view().dtype; }
  DType sum_type() const { return dtype() == DType::kF64 ? DType::kF64 : DType::kF32; }
  Sizes leading() const {
    Sizes s = x.sizes();
    s.pop_back();
    return s;
  }
};

Norm make_norm(Random& random, DType dtype, DType weight_type, const Sizes& sizes) {
  Norm v;
  v.x = normal(random, dtype, sizes);
  v.weight = normal(random, weight_type, {sizes.back()}, {}, 0.3);
  v.dy = normal(random, dtype, sizes);
  v.rstd = Tensor(DType::kF32, v.leading());
  rms_norm_fwd(v.x, v.weight, Tensor(dtype, sizes), v.rstd, v.eps);
  return v;
}
Norm wide(const Norm& v) { return {wide(v.x), wide(v.weight), wide(v.dy), wide(v.rstd), v.eps}; }

struct Forward {
  Tensor y, rstd;
};
Forward outputs_of(const Norm& v) { return {like(v.x), Tensor(v.sum_type(), v.leading())}; }
Forward forward(const Norm& v) {
  Forward out = outputs_of(v);
  rms_norm_fwd(v.x, v.weight, out.y, out.rstd, v.eps);
  return out;
}
struct Backward {
  Tensor dx, dweight;
};
Backward gradients_of(const Norm& v) { return {like(v.x), Tensor(v.sum_type(), v.weight.sizes())}; }
Backward backward(const Norm& v) {
  Backward out = gradients_of(v);
  rms_norm_bwd(v.dy, v.x, v.weight, v.rstd, out.dx, out.dweight);
  return out;
}

struct Accuracies {
  Accuracy y, rstd, dx, dweight;
};

TEST(RmsNorm, MatchesFp64) {
  for (const DType dtype : kKernelTypes) {
    std::map<Isa, Accuracies> accuracy;
    const double bound = stored(dtype, 3e-7);
    const double gradient_bound = stored(dtype, 1e-6);
    Random random;
    int turn = 0;
    for (const std::int64_t D : kWidths) {
      Norm v = make_norm(random, dtype, ++turn % 2 == 0 ? dtype : kKernelTypes[turn % 3], {2, D == 17 ? 900 : 40, D});
      v.eps = turn % 2 == 0 ? 1e-6 : 1e-5;
      const Forward truth = forward(wide(v));
      const Backward gradient = backward(wide(v));
      Forward plain = outputs_of(v);
      rms_norm::reference_fwd<float>(v.x, v.weight, plain.y, plain.rstd, v.eps);
      Backward plain_gradient = gradients_of(v);
      rms_norm::reference_bwd<float>(v.dy, v.x, v.weight, v.rstd, plain_gradient.dx, plain_gradient.dweight);
      double terms = 0.0;  // in narrow rows dx is a small difference of these
      for (std::int64_t i = 0; i < v.dy.view().numel(); ++i) {
        terms = std::max(terms, std::abs(v.dy.get(i) * v.rstd.get(i / D)) * 2.0);
      }
      for_each_isa([&] {
        const Forward got = forward(v);
        const Backward got_gradient = backward(v);
        Accuracies& a = accuracy[active_isa()];
        a.y.add(got.y, plain.y, truth.y, 3e-7);
        a.rstd.add(got.rstd, plain.rstd, truth.rstd, 3e-7);
        Accuracy narrow;
        (D < 8 ? narrow : a.dx).add(got_gradient.dx, plain_gradient.dx, gradient.dx, 1e-6, D < 8 ? terms : 0.0);
        a.dweight.add(got_gradient.dweight, plain_gradient.dweight, gradient.dweight, 1e-6);
      });
    }
    for (const auto& [isa, a] : accuracy) {
      const std::string name = std::string(dtype_name(dtype)) + "_" + std::string(isa_name(isa));
      a.y.expect("y_" + name, bound);
      a.rstd.expect("rstd_" + name, 3e-7);
      a.dx.expect("dx_" + name, gradient_bound);
      a.dweight.expect("dweight_" + name, 1e-6);
    }
  }
}

TEST(RmsNorm, ReferenceIsTheDefinitionAndItsDerivative) {
  Random random;
  Norm v = wide(make_norm(random, DType::kF32, DType::kF32, {4, 5}));
  v.eps = 0.3;
  const Forward out = forward(v);
  for (std::int64_t i = 0; i < 20; ++i) {
    double squares = 0.0;
    for (std::int64_t c = 0; c < 5; ++c) {
      squares += v.x.get(i / 5 * 5 + c) * v.x.get(i / 5 * 5 + c);
    }
    EXPECT_NEAR(out.rstd.get(i / 5), 1.0 / std::sqrt(squares / 5 + 0.3), 1e-14);
    EXPECT_NEAR(out.y.get(i), v.x.get(i) / std::sqrt(squares / 5 + 0.3) * (1.0 + v.weight.get(i % 5)), 1e-14);
  }
  v.rstd = out.rstd;
  const Backward gradient = backward(v);
  const auto loss = [&] { return dot(forward(v).y, v.dy); };
  expect_gradient(v.x, gradient.dx, loss);
  expect_gradient(v.weight, gradient.dweight, loss);
}

// A row of zeros stays one, and NaN stays in its row.
TEST(RmsNorm, RowsDoNotMix) {
  for_each_isa([] {
    Random random;
    Norm v = make_norm(random, DType::kBF16, DType::kF32, {5, 37});
    const Forward clean = forward(v);
    const Backward clean_gradient = backward(v);
    v.x.set(2 * 37 + 20, std::nan(""));
    const Forward out = forward(v);
    const Backward gradient = backward(v);
    for (std::int64_t row = 0; row < 5; ++row) {
      EXPECT_EQ(std::isnan(out.rstd.get(row)), row == 2);
      EXPECT_EQ(row != 2, bool(same_bits(part(out.y, 0, row, row + 1), part(clean.y, 0, row, row + 1))));
      EXPECT_EQ(row != 2,
                bool(same_bits(part(gradient.dx, 0, row, row + 1), part(clean_gradient.dx, 0, row, row + 1))));
    }
    v.x.fill(0.0);
    const Tensor zeros = forward(v).y;
    for (std::int64_t i = 0; i < zeros.view().numel(); ++i) {
      ASSERT_EQ(zeros.get(i), 0.0);
    }
  });
}

TEST(RmsNorm, AnyGradientMayBeAbsent) {
  for_each_isa([] {
    Random random;
    const Norm v = make_norm(random, DType::kF32, DType::kF32, {70, 21});
    const Backward all = backward(v);
    const Backward out = gradients_of(v);
    rms_norm_bwd(v.dy, v.x, v.weight, v.rstd, out.dx, {});
    rms_norm_bwd(v.dy, v.x, v.weight, v.rstd, {}, out.dweight);
    rms_norm_bwd(v.dy, v.x, v.weight, v.rstd, {}, {});
    EXPECT_TRUE(same_bits(out.dx, all.dx) && same_bits(out.dweight, all.dweight));
  });
}

const RowNorm kNorm{
    1, true, [](const Views& in, const TensorView& y, const TensorView& rstd) { rms_norm_fwd(in[0], in[1], y, rstd); },
    [](const Views& in, const TensorView& dy, const TensorView& rstd, const Views& out) {
      rms_norm_bwd(dy, in[0], in[1], rstd, out[0], out[1]);
    }};
TEST(RmsNorm, BitsDoNotDependOnThreadsCallersOrNeighbours) { expect_bits_of_rows(kNorm); }
TEST(RmsNorm, AnyMemory) { expect_any_memory_of_rows(kNorm); }
TEST(RmsNorm, CallersFlushToZeroDoesNotMatter) { expect_rows_ignore_flush_to_zero(kNorm); }
TEST(RmsNorm, StreamedStoresHaveTheSameBits) {
  expect_streamed_rows(kNorm, DType::kF32, DType::kF32);
  expect_streamed_rows(kNorm, DType::kBF16, DType::kBF16);
}

TEST(RmsNorm, Errors) {
  Random random;
  const Norm v = make_norm(random, DType::kBF16, DType::kF32, {2, 3, 8});
  const Forward out = outputs_of(v);
  const TensorView& x = v.x;
  const TensorView& w = v.weight;
  const TensorView& y = out.y;
  const TensorView& rstd = out.rstd;
  const std::string floats = "expected dtype float32, bfloat16, float16 or float64, got dtype ";
  const auto fwd = [&](const TensorView& x_, const TensorView& w_, const TensorView& y_, const TensorView& rstd_,
                       double eps, const std::string& text) {
    expect_error([&] { rms_norm_fwd(x_, w_, y_, rstd_, eps); }, "rms_norm_fwd: " + text);
  };
  fwd({}, w, y, rstd, 1e-6, "x: expected a tensor, got none");
  fwd(ranked(x, 0), w, y, rstd, 1e-6, "x: expected at least 1 dimension, got 0");
  fwd(typed(x, DType::kI64), w, y, rstd, 1e-6, "x: " + floats + "int64");
  fwd(strided(x, 2, 3), w, y, rstd, 1e-6, "x: expected inner stride 1, got 3");
  fwd(x, {}, y, rstd, 1e-6, "weight: expected a tensor, got none");
  fwd(x, sized(w, 0, 7), y, rstd, 1e-6, "weight: expected shape [8], got [7]");
  fwd(x, typed(w, DType::kI8), y, rstd, 1e-6, "weight: " + floats + "int8");
  fwd(x, w, {}, rstd, 1e-6, "y: expected a tensor, got none");
  fwd(x, w, sized(y, 0, 1), rstd, 1e-6, "y: expected shape [2, 3, 8] (as x), got [1, 3, 8]");
  fwd(x, w, typed(y, DType::kF32), rstd, 1e-6, "y: expected dtype bfloat16 (as x), got dtype float32");
  fwd(x, w, strided(y, 2, 2), rstd, 1e-6, "y: expected inner stride 1, got 2");
  fwd(x, w, y, {}, 1e-6, "rstd: expected a tensor, got none");
  fwd(x, w, y, sized(rstd, 1, 4), 1e-6, "rstd: expected shape [2, 3] (x without its last dimension), got [2, 4]");
  fwd(x, w, y, typed(rstd, DType::kF16), 1e-6, "rstd: expected dtype float32, got dtype float16");
  fwd(x, w, y, rstd, -0.5, "eps: expected a finite number >= 0, got -0.5");
  fwd(x, w, x, rstd, 1e-6, "y: expected memory of its own, got an overlap with x");
  fwd(x, w, y, strided(rstd, 0, 0), 1e-6,
      "rstd: expected an output without repeated elements, got stride 0 in dimension 0");
  rms_norm_fwd(x, w, y, rstd);

  const Backward gradient = gradients_of(v);
  const TensorView& dy = v.dy;
  const TensorView& dx = gradient.dx;
  const TensorView& dw = gradient.dweight;
  const auto bwd = [&](const TensorView& dy_, const TensorView& x_, const TensorView& w_, const TensorView& rstd_,
                       const TensorView& dx_, const TensorView& dw_, const std::string& text) {
    expect_error([&] { rms_norm_bwd(dy_, x_, w_, rstd_, dx_, dw_); }, "rms_norm_bwd: " + text);
  };
  bwd({}, x, w, rstd, dx, dw, "dy: expected a tensor, got none");
  bwd(sized(dy, 2, 9), x, w, rstd, dx, dw, "dy: expected shape [2, 3, 8] (as x), got [2, 3, 9]");
  bwd(typed(dy, DType::kF16), x, w, rstd, dx, dw, "dy: expected dtype bfloat16 (as x), got dtype float16");
  bwd(strided(dy, 2, 2), x, w, rstd, dx, dw, "dy: expected inner stride 1, got 2");
  bwd(dy, {}, w, rstd, dx, dw, "x: expected a tensor, got none");
  bwd(dy, x, {}, rstd, dx, dw, "weight: expected a tensor, got none");
  bwd(dy, x, ranked(w, 0), rstd, dx, dw, "weight: expected shape [8], got []");
  bwd(dy, x, w, ranked(rstd, 1), dx, dw, "rstd: expected shape [2, 3] (x without its last dimension), got [2]");
  bwd(dy, x, w, rstd, ranked(dx, 2), dw, "dx: expected shape [2, 3, 8] (as x), got [2, 3]");
  bwd(dy, x, w, rstd, typed(dx, DType::kF32), dw, "dx: expected dtype bfloat16 (as x), got dtype float32");
  bwd(dy, x, w, rstd, dx, sized(dw, 0, 4), "dweight: expected shape [8], got [4]");
  bwd(dy, x, w, rstd, dx, typed(dw, DType::kBF16), "dweight: expected dtype float32, got dtype bfloat16");
  bwd(dy, x, w, rstd, dy, dw, "dx: expected memory of its own, got an overlap with dy");
  bwd(dy, x, w, rstd, dx, w, "dweight: expected memory of its own, got an overlap with weight");
  rms_norm_bwd(dy, x, w, rstd, dx, dw);
}

}  // namespace
}  // namespace tidegate::test
