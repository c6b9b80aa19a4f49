// recompute_w_u: every argument wrong in turn. The text names it, and nothing is written.
#include <gtest/gtest.h>

#include "tidegate/chunk.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

struct Call {
  TensorView k, v, beta, A, gc, w, u;
  SeqLens seq;
  Layout layout;
  void operator()() const { recompute_w_u(k, v, beta, A, gc, w, u, seq, layout); }
};

TEST(RecomputeWUErrors, EveryArgument) {
  Random random;
  const Tensor k = normal(random, DType::kBF16, {6, 2, 8});
  const Tensor v = normal(random, DType::kBF16, {6, 4, 5});
  const Tensor beta = normal(random, DType::kBF16, {6, 4});
  const Tensor A = normal(random, DType::kF32, {6, 4, 16});
  const Tensor gc = normal(random, DType::kF32, {6, 4});
  const Tensor w(DType::kF32, {6, 4, 8});
  const Tensor u(DType::kBF16, {6, 4, 5});
  const Call good{k, v, beta, A, gc, w, u, SeqLens::dense(1, 6), Layout::kTND};
  const auto bad = [&](auto change, const std::string& text) {
    Call call = good;
    change(call);
    expect_error(call, "recompute_w_u: " + text);
  };
  const std::string either = "expected dtype float32 or bfloat16 (as k), got dtype ";
  bad([](Call& c) { c.k = {}; }, "k: expected a tensor, got none");
  bad([](Call& c) { c.k.sizes[1] = 3; }, "v: expected a multiple of 3 (key heads) heads, got 4");
  bad([](Call& c) { c.layout = Layout::kBSND; }, "k: expected 4 dimensions, got 3 in [6, 2, 8]");
  bad([](Call& c) { c.v = {}; }, "v: expected a tensor, got none");
  bad([](Call& c) { c.v.dtype = DType::kF16; }, "v: expected dtype bfloat16 (as k), got dtype float16");
  bad([](Call& c) { c.v.sizes[0] = 5; }, "v: expected shape [6, 4, 5], got [5, 4, 5]");
  bad([](Call& c) { c.v.strides[2] = 2; }, "v: expected inner stride 1, got 2");
  bad([](Call& c) { c.beta.sizes[1] = 2; }, "beta: expected shape [6, 4], got [6, 2]");
  bad([](Call& c) { c.beta.dtype = DType::kF64; }, "beta: " + either + "float64");
  bad([](Call& c) { c.A = {}; }, "A: expected a tensor, got none");
  bad([](Call& c) { c.A.rank = 2; }, "A: expected 3 dimensions, got 2 in [6, 4]");
  bad([](Call& c) { c.A.sizes[2] = 20; }, "A: expected a last size of 16, 32, 64 or 128, got 20");
  bad([](Call& c) { c.A.sizes[1] = 2; }, "A: expected shape [6, 4, 16], got [6, 2, 16]");
  bad([](Call& c) { c.A.dtype = DType::kF16; }, "A: " + either + "float16");
  bad([](Call& c) { c.gc = {}; }, "gc: expected a tensor, got none");
  bad([](Call& c) { c.gc.dtype = DType::kF64; }, "gc: expected dtype float32, got dtype float64");
  bad([](Call& c) { c.w.sizes[2] = 5; }, "w: expected shape [6, 4, 8], got [6, 4, 5]");
  bad([](Call& c) { c.w.dtype = DType::kF64; }, "w: " + either + "float64");
  bad([](Call& c) { c.u = {}; }, "u: expected a tensor, got none");
  bad([](Call& c) { c.u.strides[2] = -1; }, "u: expected inner stride 1, got -1");
  bad([](Call& c) { c.u.dtype = DType::kI32; }, "u: " + either + "int32");
  bad([](Call& c) { c.seq = SeqLens::dense(1, 5); }, "seq: expected 1 rows of 6 tokens, got 1 rows of 5");
  bad([](Call& c) { c.w.data = c.A.data; }, "w: expected memory of its own, got an overlap with A");
  bad([](Call& c) { c.u.data = c.w.data; }, "u: expected memory of its own, got an overlap with w");
  bad([](Call& c) { c.u.strides[1] = 0; },
      "u: expected an output without repeated elements, got stride 0 in dimension 1");
  good();
}

}  // namespace
}  // namespace tidegate::test
