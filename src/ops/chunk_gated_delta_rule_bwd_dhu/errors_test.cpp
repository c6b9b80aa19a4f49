// chunk_gated_delta_rule_bwd_dhu: every argument wrong in turn. The text names it, and nothing is written.
#include <gtest/gtest.h>

#include <cmath>

#include "tidegate/chunk_backward.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

struct Call {
  TensorView q, k, w, d_o, dv, gc, dfinal, dh, dh0, dv2;
  SeqLens seq;
  ChunkBwdDhuOptions options;
  void operator()() const { chunk_gated_delta_rule_bwd_dhu(q, k, w, d_o, dv, gc, dfinal, dh, dh0, dv2, seq, options); }
};

TEST(ChunkBwdDhuErrors, EveryArgument) {
  Random random;
  const Tensor q = normal(random, DType::kBF16, {20, 2, 8});
  const Tensor k = normal(random, DType::kBF16, {20, 2, 8});
  const Tensor w = normal(random, DType::kF32, {20, 4, 8});
  const Tensor d_o = normal(random, DType::kBF16, {20, 4, 5});
  const Tensor dv = normal(random, DType::kF32, {20, 4, 5});
  const Tensor gc = normal(random, DType::kF32, {20, 4});
  const Tensor dfinal = normal(random, DType::kF32, {2, 4, 8, 5});
  const Tensor dh(DType::kF32, {2, 4, 8, 5});
  const Tensor dh0(DType::kF32, {2, 4, 8, 5});
  const Tensor dv2(DType::kF32, {20, 4, 5});
  const SeqLens seq = SeqLens::from_lengths(std::vector<std::int64_t>{16, 4});
  const Call good{q, k, w, d_o, dv, gc, dfinal, dh, dh0, dv2, seq, {0.5, 16, false, Layout::kTND}};
  const auto bad = [&](auto change, const std::string& text) {
    Call call = good;
    change(call);
    expect_error(call, "chunk_gated_delta_rule_bwd_dhu: " + text);
  };
  const std::string either = "expected dtype float32 or bfloat16 (as q), got dtype ";
  bad([](Call& c) { c.q = {}; }, "q: expected a tensor, got none");
  bad([](Call& c) { c.options.layout = Layout::kBNSD; }, "q: expected 4 dimensions, got 3 in [20, 2, 8]");
  bad([](Call& c) { c.k = {}; }, "k: expected a tensor, got none");
  bad([](Call& c) { c.k.sizes[1] = 3; }, "k: expected shape [20, 2, 8] (as q), got [20, 3, 8]");
  bad([](Call& c) { c.w = {}; }, "w: expected a tensor, got none");
  bad([](Call& c) { c.w.sizes[2] = 9; }, "w: expected shape [20, 4, 8], got [20, 4, 9]");
  bad([](Call& c) { c.w.dtype = DType::kF16; }, "w: " + either + "float16");
  bad([](Call& c) { c.d_o = {}; }, "do: expected a tensor, got none");
  bad([](Call& c) { c.d_o.sizes[1] = 3; }, "do: expected a multiple of 2 (key heads) heads, got 3");
  bad([](Call& c) { c.d_o.dtype = DType::kF16; }, "do: expected dtype bfloat16 (as q), got dtype float16");
  bad([](Call& c) { c.dv = {}; }, "dv: expected a tensor, got none");
  bad([](Call& c) { c.dv.sizes[2] = 4; }, "dv: expected shape [20, 4, 5], got [20, 4, 4]");
  bad([](Call& c) { c.dv.dtype = DType::kF64; }, "dv: " + either + "float64");
  bad([](Call& c) { c.gc = {}; }, "gc: expected a tensor, got none");
  bad([](Call& c) { c.gc.sizes[0] = 19; }, "gc: expected shape [20, 4], got [19, 4]");
  bad([](Call& c) { c.gc.dtype = DType::kBF16; }, "gc: expected dtype float32, got dtype bfloat16");
  bad([](Call& c) { c.dfinal.sizes[0] = 3; }, "dfinal_state: expected 2 states (one per sequence), got 3");
  bad([](Call& c) { c.dfinal.rank = 3; }, "dfinal_state: expected 4 dimensions, got 3 in [2, 4, 8]");
  bad([](Call& c) { c.dfinal.sizes[1] = 2; }, "dfinal_state: expected shape [2, 4, 8, 5], got [2, 2, 8, 5]");
  bad([](Call& c) { c.dfinal.dtype = DType::kF64; },
      "dfinal_state: expected dtype float32, bfloat16 or float16 (as q), got float64");
  bad([](Call& c) { c.dfinal.strides[3] = 2; }, "dfinal_state: expected inner stride 1, got 2");
  bad([](Call& c) { c.options.state_v_first = true; }, "dfinal_state: expected shape [2, 4, 5, 8], got [2, 4, 8, 5]");
  bad([](Call& c) { c.options.chunk_size = 8; }, "chunk_size: expected a chunk size of 16, 32, 64 or 128, got 8");
  bad([](Call& c) { c.options.scale = HUGE_VAL; }, "scale: expected a finite number, got inf");
  bad([](Call& c) { c.dh = {}; }, "dh: expected a tensor, got none");
  bad([](Call& c) { c.dh.sizes[0] = 3; }, "dh: expected shape [2, 4, 8, 5], got [3, 4, 8, 5]");
  bad([](Call& c) { c.dh.dtype = DType::kF16; }, "dh: " + either + "float16");
  bad([](Call& c) { c.dh.strides[3] = 2; }, "dh: expected inner stride 1, got 2");
  bad([](Call& c) { c.dh0 = {}; }, "dh0: expected a tensor, got none");
  bad([](Call& c) { c.dh0.sizes[0] = 1; }, "dh0: expected 2 states (one per sequence), got 1");
  bad([](Call& c) { c.dh0.sizes[1] = 2; }, "dh0: expected shape [2, 4, 8, 5], got [2, 2, 8, 5]");
  bad([](Call& c) { c.dh0.dtype = DType::kBF16; }, "dh0: expected dtype float32, got dtype bfloat16");
  bad([](Call& c) { c.dh0.strides[3] = 0; }, "dh0: expected inner stride 1, got 0");
  bad([](Call& c) { c.dv2.sizes[2] = 8; }, "dv2: expected shape [20, 4, 5], got [20, 4, 8]");
  bad([](Call& c) { c.dv2.dtype = DType::kI8; }, "dv2: " + either + "int8");
  bad([](Call& c) { c.seq = SeqLens::dense(1, 21); }, "seq: expected 1 rows of 20 tokens, got 1 rows of 21");
  bad([](Call& c) { c.dh0.data = c.dfinal.data; }, "dh0: expected memory of its own, got an overlap with dfinal_state");
  bad([](Call& c) { c.dv2.data = c.dv.data; }, "dv2: expected memory of its own, got an overlap with dv");
  bad([](Call& c) { c.dh.data = c.k.data; }, "dh: expected memory of its own, got an overlap with k");
  bad([](Call& c) { c.dh.strides[2] = 0; },
      "dh: expected an output without repeated elements, got stride 0 in dimension 2");
  good();
}

}  // namespace
}  // namespace tidegate::test
