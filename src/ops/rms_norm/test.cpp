// rms_norm_fwd and _bwd (zero-centred): accuracy, strides, threads, bad input.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "ops/rms_norm/reference.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

struct Norm {
  Tensor x, weight, dy, rstd;
  Form form = {};
  double eps = 1e-6;

  DType dtype() const { return x.view().dtype; }
  DType sum_type() const { return dtype() == DType::kF64 ? DType::kF64 : DType::kF32; }
  Sizes leading() const {
    Sizes s = x.sizes();
    s.pop_back();
    return s;
  }
};

Norm make_norm(Random& random, DType dtype, DType weight_type, const Sizes& sizes, const Form& form = {}) {
  Norm v;
  v.form = form;
  v.x = normal(random, dtype, sizes, form);
  v.weight = normal(random, weight_type, {sizes.back()}, {}, 0.3);
  v.dy = normal(random, dtype, sizes, form);
  v.rstd = Tensor(DType::kF32, v.leading());
  rms_norm_fwd(v.x, v.weight, Tensor(dtype, sizes), v.rstd, v.eps);
  return v;
}
Norm wide(const Norm& v) { return {wide(v.x), wide(v.weight), wide(v.dy), wide(v.rstd), {}, v.eps}; }

struct Forward {
  Tensor y, rstd;
};
Forward outputs_of(const Norm& v) { return {like(v.x), Tensor(v.sum_type(), v.leading(), v.form)}; }
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

TEST(RmsNorm, BitsDoNotDependOnThreadsCallersOrNeighbours) {
  for_each_isa([] {
    Random random;
    const Norm v = make_norm(random, DType::kBF16, DType::kBF16, {700, 100});
    const Forward once = forward(v);
    const Backward gradient = backward(v);
    const auto again = [&] {
      EXPECT_TRUE(same_bits(forward(v).y, once.y));
      const Backward got = backward(v);
      EXPECT_TRUE(same_bits(got.dx, gradient.dx) && same_bits(got.dweight, gradient.dweight));
    };
    for_each_thread_count(again);
    on_eight_callers([&](int) { again(); });
    const Tensor y(DType::kBF16, {3, 100});
    rms_norm_fwd(part(v.x, 0, 350, 353), v.weight, y, Tensor(DType::kF32, {3}), v.eps);
    EXPECT_TRUE(same_bits(y, part(once.y, 0, 350, 353)));
  });
}

TEST(RmsNorm, AnyMemory) {
  for_each_isa([] {
    for (const DType dtype : kKernelTypes) {
      for (const std::int64_t D : {1, 7, 21, 131}) {
        Random random(3);
        const Norm dense = make_norm(random, dtype, dtype, {2, 3, 5, D});
        const Forward once = forward(dense);
        const Backward gradient = backward(dense);
        for (const Form& form : {low(), padded(), low(reversed()), permuted({2, 0, 1, 3}, 3)}) {
          Random again(3);
          Norm v = make_norm(again, dtype, dtype, {2, 3, 5, D}, form);
          v.form.order.clear();  // rstd has no last dimension
          const Forward out = forward(v);
          const Backward got = backward(v);
          EXPECT_TRUE(same_bits(out.y, once.y) && same_bits(out.rstd, once.rstd));
          EXPECT_TRUE(same_bits(got.dx, gradient.dx) && same_bits(got.dweight, gradient.dweight));
          EXPECT_TRUE(out.y.gaps_untouched() && out.rstd.gaps_untouched() && got.dx.gaps_untouched());
        }
      }
      Random random(5);  // one row, no leading dimension; and none at all
      EXPECT_EQ(forward(make_norm(random, dtype, dtype, {9})).rstd.view().rank, 0);
      const Backward none = backward(make_norm(random, dtype, dtype, {0, 9}));
      EXPECT_EQ(none.dweight.get(8), 0.0);
    }
  });
}

TEST(RmsNorm, CallersFlushToZeroDoesNotMatter) {
  for_each_isa([] {
    Random random;
    Norm v = make_norm(random, DType::kF32, DType::kF32, {6, 21});
    v.x.fill([&](std::int64_t) { return random.normal() * 1e-41; });
    v.dy.fill([&](std::int64_t) { return random.normal() * 1e-39; });
    v.rstd.fill(1.0);
    const Forward once = forward(v);
    const Backward gradient = backward(v);
    ASSERT_NE(once.y.get(3), 0.0);
    const Forward out = outputs_of(v);
    const Backward got = gradients_of(v);
    const FlushDenormals flush;
    rms_norm_fwd(v.x, v.weight, out.y, out.rstd, v.eps);
    rms_norm_bwd(v.dy, v.x, v.weight, v.rstd, got.dx, got.dweight);
    EXPECT_TRUE(flush.still_set());
    EXPECT_TRUE(same_bits(out.y, once.y));
    EXPECT_TRUE(same_bits(got.dx, gradient.dx) && same_bits(got.dweight, gradient.dweight));
  });
}

TEST(RmsNorm, StreamedStoresHaveTheSameBits) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Random random;
    const Tensor source = sliding_source(random, dtype, 70000, 128);
    const Tensor weight = normal(random, dtype, {128});
    for_each_isa([&] {
      const Tensor rstd(DType::kF32, {70000});
      expect_streamed_bits(dtype, 70000, 128,
                           [&](const TensorView& y) { rms_norm_fwd(sliding(source, 70000, 128), weight, y, rstd); });
    });
  }
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
