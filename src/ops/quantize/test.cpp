// quantize: equal to the definition in every memory order, threads, broken rows, bad input.
#include <gtest/gtest.h>

#include <cmath>

#include "ops/quantize/reference.h"
#include "tidegate/quant.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

struct Result {
  Tensor q, scale;
};
Result outputs_of(const Tensor& x, int axis, const Form& form = {}) {
  Sizes sizes = x.sizes();
  sizes.erase(sizes.begin() + axis);
  return {Tensor(DType::kI8, x.sizes(), form), Tensor(DType::kF32, sizes)};
}
Result quantized(const Tensor& x, int axis, const Form& form = {}) {
  Result r = outputs_of(x, axis, form);
  quantize(x, r.q, r.scale, axis);
  return r;
}
Result expected(const Tensor& x, int axis) {
  Result r = outputs_of(x, axis);
  quantize_int8::reference(x, r.q, r.scale, axis);
  return r;
}

TEST(Quantize, IsTheDefinitionInAnyMemoryOrder) {
  for_each_isa([] {
    Random random;
    for (const DType dtype : kKernelTypes) {
      for (const std::int64_t K : {1, 7, 16, 37, 130}) {
        for (const int axis : {1, 2}) {
          for (const Form& form : {Form{}, padded(), permuted({0, 2, 1}), permuted({0, 2, 1}, 5)}) {
            Tensor x = normal(random, dtype, {3, K, 21}, form);
            x.set(5, 0.0);
            const Result want = expected(x, axis);
            const Result got = quantized(x, axis, form);
            EXPECT_TRUE(same_bits(got.q, want.q)) << K << " axis " << axis;
            EXPECT_TRUE(same_bits(got.scale, want.scale)) << K << " axis " << axis;
            EXPECT_TRUE(got.q.gaps_untouched());
          }
        }
      }
    }
  });
}

TEST(Quantize, ZeroRowsTiesAndBrokenRows) {
  for_each_isa([] {
    Tensor x(DType::kF32, {4, 5});
    x.fill(0.0);
    const double ties[] = {127.0, 0.5, 1.5, -2.5, -127.0};  // scale 1: halves go to the even neighbour
    for (int i = 0; i < 5; ++i) {
      x.set(5 + i, ties[i]);
      x.set(10 + i, i == 2 ? std::nan("") : 1.0);
      x.set(15 + i, i == 2 ? HUGE_VAL : 1.0);
    }
    const Result r = quantized(x, 1);
    EXPECT_EQ(r.scale.get(0), 1.0);
    EXPECT_EQ(r.scale.get(1), 1.0);
    EXPECT_TRUE(std::isnan(r.scale.get(2)) && std::isnan(r.scale.get(3)));
    const double want[] = {0, 0, 0, 0, 0, 127, 0, 2, -2, -127, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    for (int i = 0; i < 20; ++i) {
      EXPECT_EQ(r.q.get(i), want[i]) << i;
    }
  });
}

TEST(Quantize, BitsDoNotDependOnThreads) {
  Random random;
  const Tensor x = normal(random, DType::kBF16, {300, 513});
  const Result want = expected(x, 1);
  for_each_thread_count([&] { EXPECT_TRUE(same_bits(quantized(x, 1).q, want.q)); });
}

TEST(Quantize, Errors) {
  Random random;
  const Tensor x = normal(random, DType::kF32, {2, 3, 8});
  const Result r = outputs_of(x, 2);
  const auto bad = [&](const TensorView& x_, const TensorView& q, const TensorView& scale, int axis,
                       const std::string& text) {
    expect_error([&] { quantize(x_, q, scale, axis); }, "quantize: " + text);
  };
  bad({}, r.q, r.scale, -1, "x: expected a tensor, got none");
  bad(typed(x, DType::kF64), r.q, r.scale, -1, "x: expected dtype float32, bfloat16 or float16, got dtype float64");
  bad(x, r.q, r.scale, 0, "axis: expected one of the last two dimensions, got 0");
  bad(x, r.q, r.scale, 3, "axis: expected one of the last two dimensions, got 3");
  bad(x, sized(r.q, 2, 7), r.scale, -1, "q: expected shape [2, 3, 8] (as x), got [2, 3, 7]");
  bad(x, typed(r.q, DType::kBool), r.scale, -1, "q: expected dtype int8, got dtype bool");
  bad(x, r.q, sized(r.scale, 1, 8), -1, "scale: expected shape [2, 3] (as x without axis), got [2, 8]");
  bad(x, r.q, typed(r.scale, DType::kF16), -1, "scale: expected dtype float32, got dtype float16");
  bad(strided(x, 2, 2), r.q, r.scale, -1,
      "q: expected stride 1 where x has it, in one of the last two dimensions, got 1");
  quantize(x, r.q, r.scale);
}

}  // namespace
}  // namespace tidegate::test
