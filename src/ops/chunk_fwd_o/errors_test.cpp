// chunk_fwd_o: every argument wrong in turn. The text names it, and nothing is written.
#include <gtest/gtest.h>

#include <cmath>

#include "tidegate/chunk.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

struct Call {
  TensorView q, k, v_new, h, gc, o;
  SeqLens seq;
  ChunkFwdOOptions options;
  void operator()() const { chunk_fwd_o(q, k, v_new, h, gc, o, seq, options); }
};

TEST(ChunkFwdOErrors, EveryArgument) {
  Random random;
  const Tensor q = normal(random, DType::kBF16, {2, 20, 8});
  const Tensor k = normal(random, DType::kBF16, {2, 20, 8});
  const Tensor v_new = normal(random, DType::kF32, {4, 20, 5});
  const Tensor h = normal(random, DType::kF32, {4, 2, 8, 5});
  const Tensor gc = normal(random, DType::kF32, {4, 20});
  const Tensor o(DType::kBF16, {4, 20, 5});
  const Call good{q, k, v_new, h, gc, o, SeqLens::dense(1, 20), {0.5, 16, Layout::kNTD}};
  const auto bad = [&](auto change, const std::string& text) {
    Call call = good;
    change(call);
    expect_error(call, "chunk_fwd_o: " + text);
  };
  const std::string either = "expected dtype float32 or bfloat16 (as q), got dtype ";
  bad([](Call& c) { c.q = {}; }, "q: expected a tensor, got none");
  bad([](Call& c) { c.options.layout = Layout::kBSND; }, "q: expected 4 dimensions, got 3 in [2, 20, 8]");
  bad([](Call& c) { c.k = {}; }, "k: expected a tensor, got none");
  bad([](Call& c) { c.k.sizes[2] = 7; }, "k: expected shape [2, 20, 8] (as q), got [2, 20, 7]");
  bad([](Call& c) { c.k.dtype = DType::kF32; }, "k: expected dtype bfloat16 (as q), got dtype float32");
  bad([](Call& c) { c.k.strides[2] = 2; }, "k: expected inner stride 1, got 2");
  bad([](Call& c) { c.v_new = {}; }, "v_new: expected a tensor, got none");
  bad([](Call& c) { c.v_new.rank = 2; }, "v_new: expected 3 dimensions, got 2 in [4, 20]");
  bad([](Call& c) { c.v_new.sizes[0] = 2; }, "v_new: expected shape [4, 20, 5], got [2, 20, 5]");
  bad([](Call& c) { c.v_new.sizes[2] = 0; }, "v_new: expected at least 1 channel, got 0");
  bad([](Call& c) { c.v_new.dtype = DType::kF16; }, "v_new: " + either + "float16");
  bad([](Call& c) { c.h = {}; }, "h: expected a tensor, got none");
  bad([](Call& c) { c.h.sizes[1] = 3; }, "h: expected shape [4, 2, 8, 5], got [4, 3, 8, 5]");
  bad([](Call& c) { c.h.dtype = DType::kF64; }, "h: " + either + "float64");
  bad([](Call& c) { c.h.strides[3] = 3; }, "h: expected inner stride 1, got 3");
  bad([](Call& c) { c.options.chunk_size = 32; }, "h: expected shape [4, 1, 8, 5], got [4, 2, 8, 5]");
  bad([](Call& c) { c.options.chunk_size = 1; }, "chunk_size: expected a chunk size of 16, 32, 64 or 128, got 1");
  bad([](Call& c) { c.gc = {}; }, "gc: expected a tensor, got none");
  bad([](Call& c) { c.gc.sizes[0] = 3; }, "gc: expected a multiple of 2 (heads of q) heads, got 3");
  bad([](Call& c) { c.gc.dtype = DType::kF16; }, "gc: expected dtype float32, got dtype float16");
  bad([](Call& c) { c.options.scale = std::nan(""); }, "scale: expected a finite number, got nan");
  bad([](Call& c) { c.o = {}; }, "o: expected a tensor, got none");
  bad([](Call& c) { c.o.sizes[2] = 8; }, "o: expected shape [4, 20, 5], got [4, 20, 8]");
  bad([](Call& c) { c.o.dtype = DType::kF32; }, "o: expected dtype bfloat16 (as q), got dtype float32");
  bad([](Call& c) { c.o.strides[2] = 2; }, "o: expected inner stride 1, got 2");
  bad([](Call& c) { c.seq = SeqLens::dense(1, 10); }, "seq: expected 1 rows of 20 tokens, got 1 rows of 10");
  bad([](Call& c) { c.o.data = c.v_new.data; }, "o: expected memory of its own, got an overlap with v_new");
  bad([](Call& c) { c.o.strides[0] = 0; },
      "o: expected an output without repeated elements, got stride 0 in dimension 0");
  good();
}

}  // namespace
}  // namespace tidegate::test
