// solve_tril: every argument wrong in turn. The text names it, and nothing is written.
#include <gtest/gtest.h>

#include "tidegate/chunk.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

struct Call {
  TensorView A0, A;
  SeqLens seq;
  Layout layout;
  void operator()() const { solve_tril(A0, A, seq, layout); }
};

TEST(SolveTrilErrors, EveryArgument) {
  Random random;
  const Tensor A0 = normal(random, DType::kF32, {6, 2, 16});
  const Tensor A(DType::kF32, {6, 2, 16});
  const Call good{A0, A, SeqLens::dense(1, 6), Layout::kTND};
  const auto bad = [&](auto change, const std::string& text) {
    Call call = good;
    change(call);
    expect_error(call, "solve_tril: " + text);
  };
  const std::string floats = "expected dtype float32, bfloat16, float16 or float64, got dtype ";
  bad([](Call& c) { c.A0 = {}; }, "A0: expected a tensor, got none");
  bad([](Call& c) { c.A0.dtype = DType::kI64; }, "A0: " + floats + "int64");
  bad([](Call& c) { c.A0.strides[2] = 0; }, "A0: expected inner stride 1, got 0");
  bad([](Call& c) { c.A0.sizes[2] = 8; }, "A0: expected a last size of 16, 32, 64 or 128, got 8");
  bad([](Call& c) { c.layout = Layout::kBSND; }, "A0: expected 4 dimensions, got 3 in [6, 2, 16]");
  bad([](Call& c) { c.layout = Layout::kNTD; }, "seq: expected 1 rows of 2 tokens, got 1 rows of 6");
  bad([](Call& c) { c.A = {}; }, "A: expected a tensor, got none");
  bad([](Call& c) { c.A.sizes[1] = 3; }, "A: expected shape [6, 2, 16], got [6, 3, 16]");
  bad([](Call& c) { c.A.dtype = DType::kBool; }, "A: " + floats + "bool");
  bad([](Call& c) { c.A.dtype = DType::kF64; }, "A: expected dtype float32, bfloat16 or float16 (as A0), got float64");
  bad([](Call& c) { c.A.strides[2] = 2; }, "A: expected inner stride 1, got 2");
  bad([](Call& c) { c.seq = SeqLens::dense(2, 3); }, "seq: expected 1 rows of 6 tokens, got 2 rows of 3");
  bad([](Call& c) { c.A.data = c.A0.data; }, "A: expected memory of its own, got an overlap with A0");
  bad([](Call& c) { c.A.strides[0] = 0; },
      "A: expected an output without repeated elements, got stride 0 in dimension 0");
  good();
}

}  // namespace
}  // namespace tidegate::test
