// l2norm_fwd and _bwd: accuracy, zero rows, strides, threads, bad input.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "ops/l2norm/reference.h"
#include "row_norm_suite.h"

namespace tidegate::test {
namespace {

struct Norm {
  Tensor x, dy, rstd;
  DType y_type = DType::kF32;
  double eps = 1e-6;

  Sizes leading() const {
    Sizes s = x.sizes();
    s.pop_back();
    return s;
  }
  DType sum_type() const { return x.view().dtype == DType::kF64 ? DType::kF64 : DType::kF32; }
};

Norm make_norm(Random& random, DType dtype, DType y_type, const Sizes& sizes) {
  Norm v;
  v.y_type = y_type;
  v.x = normal(random, dtype, sizes);
  v.dy = normal(random, y_type, sizes);
  v.rstd = Tensor(DType::kF32, v.leading());
  l2norm_fwd(v.x, Tensor(y_type, sizes), v.rstd, v.eps);
  return v;
}
Norm wide(const Norm& v) { return {wide(v.x), wide(v.dy), wide(v.rstd), DType::kF64, v.eps}; }

struct Forward {
  Tensor y, rstd;
};
Forward outputs_of(const Norm& v) { return {Tensor(v.y_type, v.x.sizes()), Tensor(v.sum_type(), v.leading())}; }
Forward forward(const Norm& v) {
  Forward out = outputs_of(v);
  l2norm_fwd(v.x, out.y, out.rstd, v.eps);
  return out;
}
Forward plain_forward(const Norm& v) {
  Forward out = outputs_of(v);
  l2norm::reference_fwd<float>(v.x, out.y, out.rstd, v.eps);
  return out;
}
Tensor backward(const Norm& v, bool zero_row_safe = false) {
  Tensor dx = like(v.x);
  l2norm_bwd(v.dy, v.x, v.rstd, dx, zero_row_safe);
  return dx;
}

TEST(L2Norm, MatchesFp64) {
  for (const DType dtype : kKernelTypes) {
    for (const DType y_type : kKernelTypes) {
      std::map<Isa, Accuracy> y, rstd, dx;
      const double y_bound = stored(y_type, 3e-7);
      const double dx_bound = stored(dtype, 3e-7);
      Random random;
      for (const std::int64_t D : kWidths) {
        Norm v = make_norm(random, dtype, y_type, {3, 7, D});
        v.eps = D % 2 == 0 ? 1e-6 : 1e-5;
        const Forward truth = forward(wide(v));
        const Forward plain = plain_forward(v);
        const Tensor truth_dx = backward(wide(v));
        Tensor plain_dx = like(v.x);
        l2norm::reference_bwd<float>(v.dy, v.x, v.rstd, plain_dx, false);
        // In narrow rows dy and its part along x nearly cancel: the error is one of the terms, not of their difference.
        double terms = 0.0;
        for (std::int64_t i = 0; i < v.dy.view().numel(); ++i) {
          terms = std::max(terms, std::abs(v.dy.get(i) * v.rstd.get(i / D)));
        }
        for_each_isa([&] {
          const Forward got = forward(v);
          y[active_isa()].add(got.y, plain.y, truth.y, 3e-7);
          rstd[active_isa()].add(got.rstd, plain.rstd, truth.rstd, 3e-7);
          Accuracy narrow;
          (D < 8 ? narrow : dx[active_isa()]).add(backward(v), plain_dx, truth_dx, 3e-7, D < 8 ? terms : 0.0);
        });
      }
      for (const auto& [isa, a] : y) {
        const std::string name = std::string(dtype_name(dtype)) + "_to_" + std::string(dtype_name(y_type)) + "_" +
                                 std::string(isa_name(isa));
        a.expect("y_" + name, y_bound);
        rstd.at(isa).expect("rstd_" + name, 3e-7);
        dx.at(isa).expect("dx_" + name, dx_bound);
      }
    }
  }
}

TEST(L2Norm, ReferenceIsTheDefinitionAndItsDerivative) {
  Random random;
  Norm v = wide(make_norm(random, DType::kF32, DType::kF32, {4, 5}));
  v.eps = 0.3;
  const Forward out = forward(v);
  for (std::int64_t i = 0; i < 20; ++i) {
    double squares = 0.3;
    for (std::int64_t c = 0; c < 5; ++c) {
      squares += v.x.get(i / 5 * 5 + c) * v.x.get(i / 5 * 5 + c);
    }
    EXPECT_NEAR(out.y.get(i), v.x.get(i) / std::sqrt(squares), 1e-14);
    EXPECT_NEAR(out.rstd.get(i / 5), 1.0 / std::sqrt(squares), 1e-14);
  }
  v.rstd = out.rstd;
  const Tensor dx = backward(v);
  expect_gradient(v.x, dx, [&] { return dot(forward(v).y, v.dy); });
}

// A row of zeros stays one. Its gradient is dy / sqrt(eps), or 0 on request; a row that only contains a zero is no such
// row.
TEST(L2Norm, ZeroRows) {
  for_each_isa([] {
    for (const DType dtype : kKernelTypes) {
      for (const std::int64_t D : {3, 16, 37}) {
        Random random;
        Norm v = make_norm(random, dtype, dtype, {4, D});
        v.x.fill([&](std::int64_t i) {
          return i / D == 1 ? (i % 2 == 0 ? 0.0 : -0.0) : i == 2 * D ? 1e-6 : i / D == 2 ? 0.0 : 1.0;
        });
        const Forward out = forward(v);
        v.rstd = out.rstd;
        EXPECT_NEAR(out.rstd.get(1), 1000.0, 0.01);
        const Tensor dx = backward(v);
        const Tensor safe = backward(v, true);
        for (std::int64_t c = 0; c < D; ++c) {
          EXPECT_EQ(out.y.get(D + c), 0.0);
          EXPECT_NEAR(dx.get(D + c), 1000.0 * v.dy.get(D + c), 10.0);
          EXPECT_EQ(safe.get(D + c), 0.0);
        }
        for (const std::int64_t row : {0, 2, 3}) {
          EXPECT_TRUE(same_bits(part(safe, 0, row, row + 1), part(dx, 0, row, row + 1))) << row;
        }
      }
    }
  });
}

TEST(L2Norm, NaNStaysInItsRow) {
  for_each_isa([] {
    Random random;
    Norm v = make_norm(random, DType::kBF16, DType::kF32, {5, 37});
    const Forward clean = forward(v);
    const Tensor clean_dx = backward(v, true);
    v.x.set(2 * 37 + 20, std::nan(""));
    const Forward out = forward(v);
    const Tensor dx = backward(v, true);
    for (std::int64_t row = 0; row < 5; ++row) {
      EXPECT_EQ(std::isnan(out.rstd.get(row)), row == 2);
      EXPECT_EQ(std::isnan(dx.get(row * 37)), row == 2);
      EXPECT_EQ(row != 2, bool(same_bits(part(out.y, 0, row, row + 1), part(clean.y, 0, row, row + 1))));
      EXPECT_EQ(row != 2, bool(same_bits(part(dx, 0, row, row + 1), part(clean_dx, 0, row, row + 1))));
    }
  });
}

const RowNorm kNorm{1, false,
                    [](const Views& in, const TensorView& y, const TensorView& rstd) { l2norm_fwd(in[0], y, rstd); },
                    [](const Views& in, const TensorView& dy, const TensorView& rstd, const Views& out) {
                      l2norm_bwd(dy, in[0], rstd, out[0]);
                    }};
TEST(L2Norm, BitsDoNotDependOnThreadsCallersOrNeighbours) { expect_bits_of_rows(kNorm); }
TEST(L2Norm, AnyMemory) { expect_any_memory_of_rows(kNorm); }
TEST(L2Norm, CallersFlushToZeroDoesNotMatter) { expect_rows_ignore_flush_to_zero(kNorm); }
TEST(L2Norm, StreamedStoresHaveTheSameBits) {
  expect_streamed_rows(kNorm, DType::kBF16, DType::kF32);
  expect_streamed_rows(kNorm, DType::kBF16, DType::kBF16);
}

TEST(L2Norm, Errors) {
  Random random;
  const Norm v = make_norm(random, DType::kBF16, DType::kF32, {2, 3, 8});
  const Forward out = outputs_of(v);
  const auto fwd = [&](const TensorView& x, const TensorView& y, const TensorView& rstd, double eps,
                       const std::string& text) {
    expect_error([&] { l2norm_fwd(x, y, rstd, eps); }, "l2norm_fwd: " + text);
  };
  const TensorView& x = v.x;
  const TensorView& y = out.y;
  const TensorView& rstd = out.rstd;
  const std::string floats = "expected dtype float32, bfloat16, float16 or float64, got dtype ";
  fwd({}, y, rstd, 1e-6, "x: expected a tensor, got none");
  fwd(ranked(x, 0), y, rstd, 1e-6, "x: expected at least 1 dimension, got 0");
  fwd(typed(x, DType::kI32), y, rstd, 1e-6, "x: " + floats + "int32");
  fwd(strided(x, 2, 2), y, rstd, 1e-6, "x: expected inner stride 1, got 2");
  fwd(x, {}, rstd, 1e-6, "y: expected a tensor, got none");
  fwd(x, sized(y, 1, 4), rstd, 1e-6, "y: expected shape [2, 3, 8] (as x), got [2, 4, 8]");
  fwd(x, typed(y, DType::kBool), rstd, 1e-6, "y: " + floats + "bool");
  fwd(x, typed(y, DType::kF64), rstd, 1e-6, "y: expected dtype bfloat16 (as x), got dtype float64");
  fwd(x, strided(y, 2, -1), rstd, 1e-6, "y: expected inner stride 1, got -1");
  fwd(x, y, {}, 1e-6, "rstd: expected a tensor, got none");
  fwd(x, y, ranked(rstd, 1), 1e-6, "rstd: expected shape [2, 3] (x without its last dimension), got [2]");
  fwd(x, y, typed(rstd, DType::kBF16), 1e-6, "rstd: expected dtype float32, got dtype bfloat16");
  fwd(x, y, rstd, -1.0, "eps: expected a finite number >= 0, got -1");
  fwd(x, y, rstd, std::nan(""), "eps: expected a finite number >= 0, got nan");
  fwd(x, typed(x, DType::kF16), rstd, 1e-6, "y: expected memory of its own, got an overlap with x");
  fwd(x, y, typed(part(part(y, 2, 0, 1), 2, 0, 1), DType::kF32), 1e-6,
      "rstd: expected shape [2, 3] (x without its last dimension), got [2, 3, 1]");
  fwd(x, y, ranked(y, 2), 1e-6, "rstd: expected memory of its own, got an overlap with y");
  fwd(x, strided(y, 0, 0), rstd, 1e-6, "y: expected an output without repeated elements, got stride 0 in dimension 0");
  l2norm_fwd(x, y, rstd);

  const Tensor gradient = like(v.x);
  const TensorView& dx = gradient;
  const TensorView& dy = v.dy;
  const auto bwd = [&](const TensorView& dy_, const TensorView& x_, const TensorView& rstd_, const TensorView& dx_,
                       const std::string& text) {
    expect_error([&] { l2norm_bwd(dy_, x_, rstd_, dx_); }, "l2norm_bwd: " + text);
  };
  bwd({}, x, rstd, dx, "dy: expected a tensor, got none");
  bwd(sized(dy, 2, 7), x, rstd, dx, "dy: expected shape [2, 3, 8] (as x), got [2, 3, 7]");
  bwd(typed(dy, DType::kI8), x, rstd, dx, "dy: " + floats + "int8");
  bwd(typed(dy, DType::kF64), x, rstd, dx, "dy: expected dtype bfloat16 (as x), got dtype float64");
  bwd(strided(dy, 2, 2), x, rstd, dx, "dy: expected inner stride 1, got 2");
  bwd(dy, {}, rstd, dx, "x: expected a tensor, got none");
  bwd(dy, x, sized(rstd, 0, 3), dx, "rstd: expected shape [2, 3] (x without its last dimension), got [3, 3]");
  bwd(dy, x, typed(rstd, DType::kF64), dx, "rstd: expected dtype float32, got dtype float64");
  bwd(dy, x, rstd, {}, "dx: expected a tensor, got none");
  bwd(dy, x, rstd, ranked(dx, 2), "dx: expected shape [2, 3, 8] (as x), got [2, 3]");
  bwd(dy, x, rstd, typed(dx, DType::kF32), "dx: expected dtype bfloat16 (as x), got dtype float32");
  bwd(dy, x, rstd, strided(dx, 2, 0), "dx: expected inner stride 1, got 0");
  bwd(dy, x, rstd, x, "dx: expected memory of its own, got an overlap with x");
  l2norm_bwd(dy, x, rstd, dx);
}

}  // namespace
}  // namespace tidegate::test
