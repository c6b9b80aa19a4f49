// chunk_bwd_dqkwg: every argument wrong in turn. The text names it, and nothing is written.
#include <gtest/gtest.h>

#include <cmath>

#include "tidegate/chunk_backward.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

struct Call {
  TensorView q, k, v_new, gc, h, d_o, dh, dv2, dq, dk, dw, dg;
  SeqLens seq;
  ChunkBwdOptions options;
  void operator()() const { chunk_bwd_dqkwg(q, k, v_new, gc, h, d_o, dh, dv2, dq, dk, dw, dg, seq, options); }
};

TEST(ChunkBwdDqkwgErrors, EveryArgument) {
  Random random;
  const Tensor q = normal(random, DType::kBF16, {2, 20, 8});
  const Tensor k = normal(random, DType::kBF16, {2, 20, 8});
  const Tensor v_new = normal(random, DType::kF32, {4, 20, 5});
  const Tensor gc = normal(random, DType::kF32, {4, 20});
  const Tensor h = normal(random, DType::kF32, {4, 2, 8, 5});
  const Tensor d_o = normal(random, DType::kBF16, {4, 20, 5});
  const Tensor dh = normal(random, DType::kF32, {4, 2, 8, 5});
  const Tensor dv2 = normal(random, DType::kF32, {4, 20, 5});
  const Tensor dq(DType::kF32, {2, 20, 8});
  const Tensor dk(DType::kBF16, {2, 20, 8});
  const Tensor dw(DType::kF32, {4, 20, 8});
  const Tensor dg(DType::kF32, {4, 20});
  const Call good{q, k, v_new, gc, h, d_o, dh, dv2, dq, dk, dw, dg, SeqLens::dense(1, 20), {0.5, 16, Layout::kNTD}};
  const auto bad = [&](auto change, const std::string& text) {
    Call call = good;
    change(call);
    expect_error(call, "chunk_bwd_dqkwg: " + text);
  };
  const std::string either = "expected dtype float32 or bfloat16 (as q), got dtype ";
  bad([](Call& c) { c.q = {}; }, "q: expected a tensor, got none");
  bad([](Call& c) { c.options.layout = Layout::kBSND; }, "q: expected 4 dimensions, got 3 in [2, 20, 8]");
  bad([](Call& c) { c.k = {}; }, "k: expected a tensor, got none");
  bad([](Call& c) { c.k.sizes[2] = 7; }, "k: expected shape [2, 20, 8] (as q), got [2, 20, 7]");
  bad([](Call& c) { c.d_o = {}; }, "do: expected a tensor, got none");
  bad([](Call& c) { c.d_o.dtype = DType::kF32; }, "do: expected dtype bfloat16 (as q), got dtype float32");
  bad([](Call& c) { c.d_o.sizes[0] = 5; }, "do: expected a multiple of 2 (key heads) heads, got 5");
  bad([](Call& c) { c.v_new = {}; }, "v_new: expected a tensor, got none");
  bad([](Call& c) { c.v_new.sizes[2] = 6; }, "v_new: expected shape [4, 20, 5], got [4, 20, 6]");
  bad([](Call& c) { c.v_new.dtype = DType::kF16; }, "v_new: " + either + "float16");
  bad([](Call& c) { c.gc = {}; }, "gc: expected a tensor, got none");
  bad([](Call& c) { c.gc.sizes[1] = 19; }, "gc: expected shape [4, 20], got [4, 19]");
  bad([](Call& c) { c.gc.dtype = DType::kF64; }, "gc: expected dtype float32, got dtype float64");
  bad([](Call& c) { c.h = {}; }, "h: expected a tensor, got none");
  bad([](Call& c) { c.h.sizes[1] = 3; }, "h: expected shape [4, 2, 8, 5], got [4, 3, 8, 5]");
  bad([](Call& c) { c.h.dtype = DType::kF64; }, "h: " + either + "float64");
  bad([](Call& c) { c.h.strides[3] = 3; }, "h: expected inner stride 1, got 3");
  bad([](Call& c) { c.dh = {}; }, "dh: expected a tensor, got none");
  bad([](Call& c) { c.dh.sizes[2] = 7; }, "dh: expected shape [4, 2, 8, 5], got [4, 2, 7, 5]");
  bad([](Call& c) { c.dh.dtype = DType::kF16; }, "dh: " + either + "float16");
  bad([](Call& c) { c.options.chunk_size = 32; }, "h: expected shape [4, 1, 8, 5], got [4, 2, 8, 5]");
  bad([](Call& c) { c.options.chunk_size = 0; }, "chunk_size: expected a chunk size of 16, 32, 64 or 128, got 0");
  bad([](Call& c) { c.dv2 = {}; }, "dv2: expected a tensor, got none");
  bad([](Call& c) { c.dv2.sizes[0] = 2; }, "dv2: expected shape [4, 20, 5], got [2, 20, 5]");
  bad([](Call& c) { c.dv2.dtype = DType::kF64; }, "dv2: " + either + "float64");
  bad([](Call& c) { c.options.scale = std::nan(""); }, "scale: expected a finite number, got nan");
  bad([](Call& c) { c.dq = {}; }, "dq: expected a tensor, got none");
  bad([](Call& c) { c.dq.sizes[0] = 4; }, "dq: expected shape [2, 20, 8], got [4, 20, 8]");
  bad([](Call& c) { c.dq.dtype = DType::kF64; }, "dq: " + either + "float64");
  bad([](Call& c) { c.dk.sizes[2] = 5; }, "dk: expected shape [2, 20, 8], got [2, 20, 5]");
  bad([](Call& c) { c.dk.strides[2] = 2; }, "dk: expected inner stride 1, got 2");
  bad([](Call& c) { c.dk.dtype = DType::kF16; }, "dk: " + either + "float16");
  bad([](Call& c) { c.dw.sizes[0] = 2; }, "dw: expected shape [4, 20, 8], got [2, 20, 8]");
  bad([](Call& c) { c.dw.dtype = DType::kI32; }, "dw: " + either + "int32");
  bad([](Call& c) { c.dg = {}; }, "dg: expected a tensor, got none");
  bad([](Call& c) { c.dg.sizes[0] = 2; }, "dg: expected shape [4, 20], got [2, 20]");
  bad([](Call& c) { c.dg.dtype = DType::kBF16; }, "dg: expected dtype float32, got dtype bfloat16");
  bad([](Call& c) { c.seq = SeqLens::dense(1, 10); }, "seq: expected 1 rows of 20 tokens, got 1 rows of 10");
  bad([](Call& c) { c.dw.data = c.h.data; }, "dw: expected memory of its own, got an overlap with h");
  bad([](Call& c) { c.dk.data = c.dq.data; }, "dk: expected memory of its own, got an overlap with dq");
  bad([](Call& c) { c.dg.strides[1] = 0; },
      "dg: expected an output without repeated elements, got stride 0 in dimension 1");
  good();
}

}  // namespace
}  // namespace tidegate::test
