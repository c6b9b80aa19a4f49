// Rows that were packed beforehand, weights that stay zipped, and blocks of gradients that are written past the caches
// have the bits of the plain way.
#include <gtest/gtest.h>

#include "base/row_views.h"
#include "ops/grouped_matmul/tasks.h"
#include "tidegate/cpu.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

using namespace grouped_matmul;

// x [M,K] times weight [N,K] (or stored [K,N]) in one block.
struct OneBlock {
  Tensor x, weight, out;
  const void** rows;
  Block block{};
  OneBlock(const Tensor& x_, const Tensor& weight_, bool turned, Scratch& scratch)
      : x(x_), weight(weight_), out(DType::kF32, {x.sizes()[0], weight.sizes()[turned ? 1 : 0]}) {
    rows = row_pointers(x.sizes()[0], scratch, [&](std::int64_t r) { return row_at(x, r); });
    block.rows = rows;
    block.row_count = x.sizes()[0];
    block.columns = out.sizes()[1];
    block.inner = x.sizes()[1];
    block.row_type = data_type_index(x.view().dtype);
    block.out = out.view().as<float>();
    block.pitch = block.columns;
    block.room = scratch.floats(grouped_matmul_kernels_for(active_isa()).room_floats);
    const std::int64_t width = weight.sizes()[1];
    set_weight(block, weight.view().data, turned ? 1 : width, turned ? width : 1, data_type_index(weight.view().dtype));
  }
  void run() { grouped_matmul_kernels_for(active_isa()).product(block); }
};

TEST(GroupedMatmulBlocks, PackedRows) {
  Random random;
  bool packs = false;
  for_each_isa([&] {
    const Kernels& kernels = grouped_matmul_kernels_for(active_isa());
    for (const std::int64_t M : {1, 6, 7, 12, 13, 127, 128}) {
      for (const std::int64_t K : {0, 5, 32, 300, 2048, 2100, 4500}) {
        Scratch scratch;
        OneBlock b(normal(random, DType::kBF16, {M, K}), normal(random, DType::kBF16, {11, K}), false, scratch);
        b.run();
        const Tensor want = copied(b.out);
        const std::int64_t bytes = kernels.packed_bytes(b.block);
        if (bytes == 0) {
          continue;
        }
        packs = true;
        auto* packed = static_cast<char*>(scratch.bytes(static_cast<std::size_t>(bytes)));
        std::fill_n(packed, bytes, '\xff');  // NaN
        for (std::int64_t first = 0; first < K; first += kBlockColumns) {
          Block part = b.block;
          part.rows = row_pointers(M, scratch, [&](std::int64_t r) { return row_at(b.x, r) + first * 2; });
          kernels.pack(part, first, std::min(kBlockColumns, K - first), packed);
        }
        b.out.fill(-1.0);
        b.block.packed = packed;
        b.block.rows = nullptr;
        b.run();
        EXPECT_TRUE(same_bits(b.out, want)) << M << " " << K;
      }
    }
    EXPECT_EQ(packs, active_isa() == Isa::kAvx512Bf16);
  });
}

TEST(GroupedMatmulBlocks, WeightsStayForOtherRows) {
  Random random;
  for_each_isa([&] {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const std::int64_t K : {1, 77, 512, 513, 1100}) {  // rows of an odd number of elements, several stretches
        Scratch scratch;
        const Tensor weight = normal(random, dtype, {K, 70});
        OneBlock first(normal(random, dtype, {9, K}), weight, true, scratch);
        OneBlock second(normal(random, dtype, {20, K}), weight, true, scratch);
        second.run();
        const Tensor want = copied(second.out);
        first.run();
        second.out.fill(-1.0);
        second.block.room = first.block.room;
        second.block.same_weight = true;
        second.run();
        EXPECT_TRUE(same_bits(second.out, want)) << dtype_name(dtype) << " " << K;
      }
    }
  });
}

// 19 MB of gradients, once in rows of whole cache lines, once a little apart: the first are written past the caches.
TEST(GroupedMatmulBlocks, LargeGradients) {
  Random random;
  constexpr std::int64_t N = 2300, K = 4128, M = 5;
  for_each_isa([&] {
    if (active_isa() == Isa::kScalar) {
      return;  // takes seconds
    }
    for (const DType out : {DType::kBF16, DType::kF32}) {
      const Tensor dy = normal(random, DType::kBF16, {M, N}), x = normal(random, DType::kBF16, {M, K});
      Tensor groups(DType::kI64, {1});
      groups.view().as<std::int64_t>()[0] = M;
      const auto run = [&](const Form& form) {
        Tensor dweight(out, {1, N, K}, form);
        grouped_matmul_bwd(dy, x, {}, groups, {}, dweight, {});
        return dweight;
      };
      const Tensor whole = run({});
      EXPECT_TRUE(same_bits(whole, run(padded(3))));
      EXPECT_TRUE(same_bits(whole, run(permuted({0, 2, 1}))));
    }
  });
}

}  // namespace
}  // namespace tidegate::test
