// chunk_local_cumsum: every argument wrong in turn. The text names it, and nothing is written.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tidegate/chunk.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

struct Call {
  TensorView g, out;
  std::int64_t chunk_size;
  SeqLens seq;
  ChunkLocalCumsumOptions options;
  void operator()() const { chunk_local_cumsum(g, out, chunk_size, seq, options); }
};

TEST(ChunkLocalCumsumErrors, EveryArgument) {
  Random random;
  const Tensor g = normal(random, DType::kF32, {2, 6, 4});
  const Tensor out(DType::kF32, {2, 6, 4});
  const Call good{g, out, 16, SeqLens::dense(2, 6), {}};
  const auto bad = [&](auto change, const std::string& text) {
    Call call = good;
    change(call);
    expect_error(call, "chunk_local_cumsum: " + text);
  };
  bad([](Call& c) { c.g = {}; }, "g: expected a tensor, got none");
  bad([](Call& c) { c.g.dtype = DType::kI32; },
      "g: expected dtype float32, bfloat16, float16 or float64, got dtype int32");
  bad([](Call& c) { c.options.layout = Layout::kNTD; }, "g: expected 2 dimensions, got 3 in [2, 6, 4]");
  bad([](Call& c) { c.options.layout = Layout::kBNSD; }, "seq: expected 2 rows of 4 tokens, got 2 rows of 6");
  bad([](Call& c) { c.out = {}; }, "out: expected a tensor, got none");
  bad([](Call& c) { c.out.sizes[2] = 3; }, "out: expected shape [2, 6, 4] (as g), got [2, 6, 3]");
  bad([](Call& c) { c.out.dtype = DType::kBF16; }, "out: expected dtype float32 or float64, got dtype bfloat16");
  bad([](Call& c) { c.chunk_size = 0; }, "chunk_size: expected a power of two, got 0");
  bad([](Call& c) { c.chunk_size = -16; }, "chunk_size: expected a power of two, got -16");
  bad([](Call& c) { c.chunk_size = 48; }, "chunk_size: expected a power of two, got 48");
  bad([](Call& c) { c.options.scale = std::nan(""); }, "scale: expected a finite number, got nan");
  bad([](Call& c) { c.options.floor = -std::numeric_limits<double>::infinity(); },
      "floor: expected a finite number or none, got -inf");
  bad([](Call& c) { c.seq = SeqLens::dense(2, 5); }, "seq: expected 2 rows of 6 tokens, got 2 rows of 5");
  bad([](Call& c) { c.out.data = c.g.data; }, "out: expected memory of its own, got an overlap with g");
  bad([](Call& c) { c.out.strides[2] = 0; },
      "out: expected an output without repeated elements, got stride 0 in dimension 2");
  good();
}

}  // namespace
}  // namespace tidegate::test
