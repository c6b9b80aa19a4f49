// swiglu_fwd and _bwd: accuracy, extremes, strides, threads, bad input.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "ops/swiglu/reference.h"
#include "row_norm_suite.h"

namespace tidegate::test {
namespace {

struct Call {
  Tensor gate, up, dy;
};
Call make_call(Random& random, DType dtype, const Sizes& sizes) {
  return {normal(random, dtype, sizes, {}, 3.0), normal(random, dtype, sizes), normal(random, dtype, sizes)};
}
Call wide(const Call& v) { return {test::wide(v.gate), test::wide(v.up), test::wide(v.dy)}; }

Tensor forward(const Call& v) {
  Tensor y = like(v.gate);
  swiglu_fwd(v.gate, v.up, y);
  return y;
}
struct Gradients {
  Tensor dgate, dup;
};
Gradients backward(const Call& v) {
  Gradients out = {like(v.gate), like(v.gate)};
  swiglu_bwd(v.dy, v.gate, v.up, out.dgate, out.dup);
  return out;
}

TEST(Swiglu, MatchesFp64) {
  for (const DType dtype : kKernelTypes) {
    std::map<Isa, Accuracy> y, dgate, dup;
    Random random;
    for (const std::int64_t D : kWidths) {
      const Call v = make_call(random, dtype, {3, 7, D});
      const Tensor truth = forward(wide(v));
      const Gradients exact = backward(wide(v));
      Tensor plain = like(v.gate);
      swiglu::reference_fwd<float>(v.gate, v.up, plain);
      Gradients loops = {like(v.gate), like(v.gate)};
      swiglu::reference_bwd<float>(v.dy, v.gate, v.up, loops.dgate, loops.dup);
      for_each_isa([&] {
        const Gradients got = backward(v);
        y[active_isa()].add(forward(v), plain, truth, 3e-7);
        dgate[active_isa()].add(got.dgate, loops.dgate, exact.dgate, 3e-7);
        dup[active_isa()].add(got.dup, loops.dup, exact.dup, 3e-7);
      });
    }
    for (const auto& [isa, a] : y) {
      const std::string name = std::string(dtype_name(dtype)) + "_" + std::string(isa_name(isa));
      a.expect("y_" + name, stored(dtype, 3e-7));
      dgate.at(isa).expect("dgate_" + name, stored(dtype, 3e-7));
      dup.at(isa).expect("dup_" + name, stored(dtype, 3e-7));
    }
  }
}

TEST(Swiglu, ReferenceIsTheDefinitionAndItsDerivative) {
  Random random;
  Call v = wide(make_call(random, DType::kF32, {4, 5}));
  const Tensor y = forward(v);
  for (std::int64_t i = 0; i < 20; ++i) {
    const double g = v.gate.get(i);
    EXPECT_NEAR(y.get(i), g / (1.0 + std::exp(-g)) * v.up.get(i), 1e-14);
  }
  const Gradients out = backward(v);
  expect_gradient(v.gate, out.dgate, [&] { return dot(forward(v), v.dy); });
  expect_gradient(v.up, out.dup, [&] { return dot(forward(v), v.dy); });
}

TEST(Swiglu, ExtremesAndNaNStayWhereTheyAre) {
  const double inf = std::numeric_limits<double>::infinity();
  for_each_isa([&] {
    for (const DType dtype : kKernelTypes) {
      Random random;
      Call v = make_call(random, dtype, {2, 70});
      const Tensor before = forward(v);
      v.gate.set(3, 60000.0);
      v.gate.set(5, -60000.0);
      v.gate.set(7, inf);
      v.gate.set(11, std::nan(""));
      v.up.set(3, 0.5);
      v.up.set(5, 2.0);
      v.up.set(7, 1.0);
      const Tensor y = forward(v);
      EXPECT_NEAR(y.get(3), 30000.0, 200.0);
      EXPECT_NEAR(y.get(5), 0.0, 1e-30);
      EXPECT_EQ(y.get(7), inf);
      EXPECT_TRUE(std::isnan(y.get(11)));
      for (std::int64_t i = 0; i < 140; ++i) {
        if (i != 3 && i != 5 && i != 7 && i != 11) {
          ASSERT_EQ(y.get(i), before.get(i)) << i;
        }
      }
    }
  });
}

TEST(Swiglu, AbsentGradientsChangeNothing) {
  for_each_isa([] {
    Random random;
    const Call v = make_call(random, DType::kBF16, {5, 37});
    const Gradients both = backward(v);
    const Tensor dgate = like(v.gate), dup = like(v.gate);
    swiglu_bwd(v.dy, v.gate, v.up, dgate, {});
    swiglu_bwd(v.dy, v.gate, v.up, {}, dup);
    EXPECT_TRUE(same_bits(dgate, both.dgate) && same_bits(dup, both.dup));
  });
}

// The suite of the norms; there is no rstd, which stays as it was.
const RowNorm kRows{2, false,
                    [](const Views& in, const TensorView& y, const TensorView&) { swiglu_fwd(in[0], in[1], y); },
                    [](const Views& in, const TensorView& dy, const TensorView&, const Views& out) {
                      swiglu_bwd(dy, in[0], in[1], out[0], out[1]);
                    }};
TEST(Swiglu, BitsDoNotDependOnThreadsCallersOrNeighbours) { expect_bits_of_rows(kRows); }
TEST(Swiglu, AnyMemory) { expect_any_memory_of_rows(kRows); }
TEST(Swiglu, CallersFlushToZeroDoesNotMatter) { expect_rows_ignore_flush_to_zero(kRows); }
TEST(Swiglu, StreamedStoresHaveTheSameBits) {
  expect_streamed_rows(kRows, DType::kBF16, DType::kBF16);
  expect_streamed_rows(kRows, DType::kF32, DType::kF32);
}

TEST(Swiglu, Errors) {
  Random random;
  const Call v = make_call(random, DType::kBF16, {2, 3, 8});
  const Tensor out = like(v.gate), more = like(v.gate);
  const TensorView &gate = v.gate, &up = v.up, &dy = v.dy, &y = out, &other = more;
  const auto fwd = [&](const TensorView& g, const TensorView& u, const TensorView& o, const std::string& text) {
    expect_error([&] { swiglu_fwd(g, u, o); }, "swiglu_fwd: " + text);
  };
  const std::string floats = "expected dtype float32, bfloat16, float16 or float64, got dtype ";
  fwd({}, up, y, "gate: expected a tensor, got none");
  fwd(ranked(gate, 0), up, y, "gate: expected at least 1 dimension, got 0");
  fwd(typed(gate, DType::kI32), up, y, "gate: " + floats + "int32");
  fwd(strided(gate, 2, 2), up, y, "gate: expected inner stride 1, got 2");
  fwd(gate, {}, y, "up: expected a tensor, got none");
  fwd(gate, sized(up, 2, 7), y, "up: expected shape [2, 3, 8] (as gate), got [2, 3, 7]");
  fwd(gate, typed(up, DType::kF16), y, "up: expected dtype bfloat16 (as gate), got dtype float16");
  fwd(gate, strided(up, 2, 0), y, "up: expected inner stride 1, got 0");
  fwd(gate, up, {}, "y: expected a tensor, got none");
  fwd(gate, up, ranked(y, 2), "y: expected shape [2, 3, 8] (as gate), got [2, 3]");
  fwd(gate, up, typed(y, DType::kF16), "y: expected dtype bfloat16 (as gate), got dtype float16");
  fwd(gate, up, gate, "y: expected memory of its own, got an overlap with gate");
  fwd(gate, up, strided(y, 0, 0), "y: expected an output without repeated elements, got stride 0 in dimension 0");

  const auto bwd = [&](const TensorView& d, const TensorView& g, const TensorView& u, const TensorView& dg,
                       const TensorView& du, const std::string& text) {
    expect_error([&] { swiglu_bwd(d, g, u, dg, du); }, "swiglu_bwd: " + text);
  };
  bwd({}, gate, up, y, other, "dy: expected a tensor, got none");
  bwd(sized(dy, 0, 3), gate, up, y, other, "dy: expected shape [2, 3, 8] (as gate), got [3, 3, 8]");
  bwd(dy, {}, up, y, other, "gate: expected a tensor, got none");
  bwd(dy, gate, {}, y, other, "up: expected a tensor, got none");
  bwd(dy, gate, up, typed(y, DType::kF16), other, "dgate: expected dtype bfloat16 (as gate), got dtype float16");
  bwd(dy, gate, up, y, strided(other, 2, 2), "dup: expected inner stride 1, got 2");
  bwd(dy, gate, up, dy, other, "dgate: expected memory of its own, got an overlap with dy");
  bwd(dy, gate, up, y, y, "dup: expected memory of its own, got an overlap with dgate");
}

}  // namespace
}  // namespace tidegate::test
