// chunk_bwd_dv_local: every argument wrong in turn. The text names it, and nothing is written.
#include <gtest/gtest.h>

#include <cmath>

#include "tidegate/chunk_backward.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

struct Call {
  TensorView q, k, d_o, gc, dv;
  SeqLens seq;
  ChunkBwdOptions options;
  void operator()() const { chunk_bwd_dv_local(q, k, d_o, gc, dv, seq, options); }
};

TEST(ChunkBwdDvLocalErrors, EveryArgument) {
  Random random;
  const Tensor q = normal(random, DType::kBF16, {2, 20, 8});
  const Tensor k = normal(random, DType::kBF16, {2, 20, 8});
  const Tensor d_o = normal(random, DType::kBF16, {4, 20, 5});
  const Tensor gc = normal(random, DType::kF32, {4, 20});
  const Tensor dv(DType::kF32, {4, 20, 5});
  const Call good{q, k, d_o, gc, dv, SeqLens::dense(1, 20), {0.5, 16, Layout::kNTD}};
  const auto bad = [&](auto change, const std::string& text) {
    Call call = good;
    change(call);
    expect_error(call, "chunk_bwd_dv_local: " + text);
  };
  bad([](Call& c) { c.q = {}; }, "q: expected a tensor, got none");
  bad([](Call& c) { c.q.dtype = DType::kI32; },
      "q: expected dtype float32, bfloat16, float16 or float64, got dtype int32");
  bad([](Call& c) { c.q.strides[2] = 2; }, "q: expected inner stride 1, got 2");
  bad([](Call& c) { c.options.layout = Layout::kBSND; }, "q: expected 4 dimensions, got 3 in [2, 20, 8]");
  bad([](Call& c) { c.k = {}; }, "k: expected a tensor, got none");
  bad([](Call& c) { c.k.sizes[2] = 7; }, "k: expected shape [2, 20, 8] (as q), got [2, 20, 7]");
  bad([](Call& c) { c.k.dtype = DType::kF32; }, "k: expected dtype bfloat16 (as q), got dtype float32");
  bad([](Call& c) { c.k.strides[2] = 2; }, "k: expected inner stride 1, got 2");
  bad([](Call& c) { c.d_o = {}; }, "do: expected a tensor, got none");
  bad([](Call& c) { c.d_o.rank = 2; }, "do: expected 3 dimensions, got 2 in [4, 20]");
  bad([](Call& c) { c.d_o.dtype = DType::kF32; }, "do: expected dtype bfloat16 (as q), got dtype float32");
  bad([](Call& c) { c.d_o.sizes[0] = 3; }, "do: expected a multiple of 2 (key heads) heads, got 3");
  bad([](Call& c) { c.d_o.sizes[1] = 19; }, "do: expected shape [4, 20, 5], got [4, 19, 5]");
  bad([](Call& c) { c.d_o.sizes[2] = 0; }, "do: expected at least 1 channel, got 0");
  bad([](Call& c) { c.d_o.strides[2] = 0; }, "do: expected inner stride 1, got 0");
  bad([](Call& c) { c.gc = {}; }, "gc: expected a tensor, got none");
  bad([](Call& c) { c.gc.sizes[0] = 2; }, "gc: expected shape [4, 20], got [2, 20]");
  bad([](Call& c) { c.gc.dtype = DType::kF16; }, "gc: expected dtype float32, got dtype float16");
  bad([](Call& c) { c.options.chunk_size = 1; }, "chunk_size: expected a chunk size of 16, 32, 64 or 128, got 1");
  bad([](Call& c) { c.options.scale = std::nan(""); }, "scale: expected a finite number, got nan");
  bad([](Call& c) { c.dv = {}; }, "dv: expected a tensor, got none");
  bad([](Call& c) { c.dv.sizes[2] = 8; }, "dv: expected shape [4, 20, 5], got [4, 20, 8]");
  bad([](Call& c) { c.dv.dtype = DType::kF16; }, "dv: expected dtype float32 or bfloat16 (as q), got dtype float16");
  bad([](Call& c) { c.dv.strides[2] = 2; }, "dv: expected inner stride 1, got 2");
  bad([](Call& c) { c.seq = SeqLens::dense(1, 10); }, "seq: expected 1 rows of 20 tokens, got 1 rows of 10");
  bad([](Call& c) { c.dv.data = c.d_o.data; }, "dv: expected memory of its own, got an overlap with do");
  bad([](Call& c) { c.dv.strides[0] = 0; },
      "dv: expected an output without repeated elements, got stride 0 in dimension 0");
  good();
}

}  // namespace
}  // namespace tidegate::test
