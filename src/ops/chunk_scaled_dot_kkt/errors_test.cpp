// chunk_scaled_dot_kkt: every argument wrong in turn. The text names it, and nothing is written.
#include <gtest/gtest.h>

#include "tidegate/chunk.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

struct Call {
  TensorView k, gc, beta, A0;
  SeqLens seq;
  ChunkOptions options;
  void operator()() const { chunk_scaled_dot_kkt(k, gc, beta, A0, seq, options); }
};

TEST(ChunkScaledDotKktErrors, EveryArgument) {
  Random random;
  const Tensor k = normal(random, DType::kBF16, {1, 6, 2, 8});
  const Tensor gc = normal(random, DType::kF32, {1, 6, 4});
  const Tensor beta = normal(random, DType::kF32, {1, 6, 4});
  const Tensor A0(DType::kF32, {1, 6, 4, 16});
  const Call good{k, gc, beta, A0, SeqLens::dense(1, 6), {16, Layout::kBSND}};
  const auto bad = [&](auto change, const std::string& text) {
    Call call = good;
    change(call);
    expect_error(call, "chunk_scaled_dot_kkt: " + text);
  };
  bad([](Call& c) { c.k = {}; }, "k: expected a tensor, got none");
  bad([](Call& c) { c.k.dtype = DType::kI8; },
      "k: expected dtype float32, bfloat16, float16 or float64, got dtype int8");
  bad([](Call& c) { c.k.strides[3] = 2; }, "k: expected inner stride 1, got 2");
  bad([](Call& c) { c.options.layout = Layout::kTND; }, "k: expected 3 dimensions, got 4 in [1, 6, 2, 8]");
  bad([](Call& c) { c.k.sizes[3] = 0; }, "k: expected at least 1 channel, got 0");
  bad([](Call& c) { c.beta = {}; }, "beta: expected a tensor, got none");
  bad([](Call& c) { c.beta.sizes[2] = 3; }, "beta: expected a multiple of 2 (heads of k) heads, got 3");
  bad([](Call& c) { c.beta.sizes[1] = 5; }, "beta: expected shape [1, 6, 4], got [1, 5, 4]");
  bad([](Call& c) { c.beta.dtype = DType::kF16; },
      "beta: expected dtype float32 or bfloat16 (as k), got dtype float16");
  bad([](Call& c) { c.gc.sizes[2] = 2; }, "gc: expected shape [1, 6, 4], got [1, 6, 2]");
  bad([](Call& c) { c.gc.dtype = DType::kBF16; }, "gc: expected dtype float32, got dtype bfloat16");
  bad([](Call& c) { c.options.chunk_size = 24; }, "chunk_size: expected a chunk size of 16, 32, 64 or 128, got 24");
  bad([](Call& c) { c.options.chunk_size = 32; }, "A0: expected shape [1, 6, 4, 32], got [1, 6, 4, 16]");
  bad([](Call& c) { c.A0 = {}; }, "A0: expected a tensor, got none");
  bad([](Call& c) { c.A0.dtype = DType::kF64; }, "A0: expected dtype float32 or bfloat16 (as k), got dtype float64");
  bad([](Call& c) { c.A0.strides[3] = 2; }, "A0: expected inner stride 1, got 2");
  bad([](Call& c) { c.seq = SeqLens::dense(1, 7); }, "seq: expected 1 rows of 6 tokens, got 1 rows of 7");
  bad([](Call& c) { c.A0.data = c.k.data; }, "A0: expected memory of its own, got an overlap with k");
  bad([](Call& c) { c.A0.data = c.gc.data; }, "A0: expected memory of its own, got an overlap with gc");
  bad([](Call& c) { c.A0.strides[1] = 0; },
      "A0: expected an output without repeated elements, got stride 0 in dimension 1");
  good();
}

}  // namespace
}  // namespace tidegate::test
