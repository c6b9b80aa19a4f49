// chunk_gated_delta_rule_fwd_h: every argument wrong in turn. The text names it, and nothing is written.
#include <gtest/gtest.h>

#include "tidegate/chunk.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

struct Call {
  TensorView k, w, u, gc, initial, h, v_new, final;
  SeqLens seq;
  ChunkFwdHOptions options;
  void operator()() const { chunk_gated_delta_rule_fwd_h(k, w, u, gc, initial, h, v_new, final, seq, options); }
};

TEST(ChunkFwdHErrors, EveryArgument) {
  Random random;
  const Tensor k = normal(random, DType::kBF16, {20, 2, 8});
  const Tensor w = normal(random, DType::kF32, {20, 4, 8});
  const Tensor u = normal(random, DType::kF32, {20, 4, 5});
  const Tensor gc = normal(random, DType::kF32, {20, 4});
  const Tensor initial = normal(random, DType::kF32, {2, 4, 8, 5});
  const Tensor h(DType::kF32, {2, 4, 8, 5});
  const Tensor v_new(DType::kF32, {20, 4, 5});
  const Tensor final(DType::kF32, {2, 4, 8, 5});
  const SeqLens seq = SeqLens::from_lengths(std::vector<std::int64_t>{16, 4});
  const Call good{k, w, u, gc, initial, h, v_new, final, seq, {16, false, Layout::kTND}};
  const auto bad = [&](auto change, const std::string& text) {
    Call call = good;
    change(call);
    expect_error(call, "chunk_gated_delta_rule_fwd_h: " + text);
  };
  const std::string either = "expected dtype float32 or bfloat16 (as k), got dtype ";
  bad([](Call& c) { c.k = {}; }, "k: expected a tensor, got none");
  bad([](Call& c) { c.k.sizes[1] = 3; }, "gc: expected a multiple of 3 (heads of k) heads, got 4");
  bad([](Call& c) { c.options.layout = Layout::kBNSD; }, "k: expected 4 dimensions, got 3 in [20, 2, 8]");
  bad([](Call& c) { c.w = {}; }, "w: expected a tensor, got none");
  bad([](Call& c) { c.w.sizes[2] = 9; }, "w: expected shape [20, 4, 8], got [20, 4, 9]");
  bad([](Call& c) { c.w.dtype = DType::kF16; }, "w: " + either + "float16");
  bad([](Call& c) { c.u = {}; }, "u: expected a tensor, got none");
  bad([](Call& c) { c.u.rank = 2; }, "u: expected 3 dimensions, got 2 in [20, 4]");
  bad([](Call& c) { c.u.sizes[1] = 2; }, "u: expected shape [20, 4, 5], got [20, 2, 5]");
  bad([](Call& c) { c.u.sizes[2] = 0; }, "u: expected at least 1 channel, got 0");
  bad([](Call& c) { c.u.dtype = DType::kF64; }, "u: " + either + "float64");
  bad([](Call& c) { c.gc = {}; }, "gc: expected a tensor, got none");
  bad([](Call& c) { c.gc.sizes[0] = 19; }, "gc: expected shape [20, 4], got [19, 4]");
  bad([](Call& c) { c.gc.dtype = DType::kBF16; }, "gc: expected dtype float32, got dtype bfloat16");
  bad([](Call& c) { c.initial.sizes[0] = 3; }, "initial_state: expected 2 states (one per sequence), got 3");
  bad([](Call& c) { c.initial.rank = 3; }, "initial_state: expected 4 dimensions, got 3 in [2, 4, 8]");
  bad([](Call& c) { c.initial.sizes[1] = 2; }, "initial_state: expected shape [2, 4, 8, 5], got [2, 2, 8, 5]");
  bad([](Call& c) { c.initial.dtype = DType::kF64; },
      "initial_state: expected dtype float32, bfloat16 or float16 (as k), got float64");
  bad([](Call& c) { c.initial.strides[3] = 2; }, "initial_state: expected inner stride 1, got 2");
  bad([](Call& c) { c.options.state_v_first = true; }, "initial_state: expected shape [2, 4, 5, 8], got [2, 4, 8, 5]");
  bad([](Call& c) { c.options.chunk_size = 8; }, "chunk_size: expected a chunk size of 16, 32, 64 or 128, got 8");
  bad([](Call& c) { c.h = {}; }, "h: expected a tensor, got none");
  bad([](Call& c) { c.h.sizes[0] = 3; }, "h: expected shape [2, 4, 8, 5], got [3, 4, 8, 5]");
  bad([](Call& c) { c.h.dtype = DType::kF16; }, "h: " + either + "float16");
  bad([](Call& c) { c.h.strides[3] = 2; }, "h: expected inner stride 1, got 2");
  bad([](Call& c) { c.v_new.sizes[2] = 8; }, "v_new: expected shape [20, 4, 5], got [20, 4, 8]");
  bad([](Call& c) { c.v_new.dtype = DType::kI8; }, "v_new: " + either + "int8");
  bad([](Call& c) { c.final.sizes[0] = 1; }, "final_state: expected 2 states (one per sequence), got 1");
  bad([](Call& c) { c.final.dtype = DType::kBF16; }, "final_state: expected dtype float32, got dtype bfloat16");
  bad([](Call& c) { c.final.strides[3] = 0; }, "final_state: expected inner stride 1, got 0");
  bad([](Call& c) { c.seq = SeqLens::dense(1, 21); }, "seq: expected 1 rows of 20 tokens, got 1 rows of 21");
  bad([](Call& c) { c.final.data = c.initial.data; },
      "final_state: expected memory of its own, got an overlap with initial_state");
  bad([](Call& c) { c.v_new.data = c.u.data; }, "v_new: expected memory of its own, got an overlap with u");
  bad([](Call& c) { c.h.data = c.k.data; }, "h: expected memory of its own, got an overlap with k");
  bad([](Call& c) { c.h.strides[2] = 0; },
      "h: expected an output without repeated elements, got stride 0 in dimension 2");
  good();
}

}  // namespace
}  // namespace tidegate::test
