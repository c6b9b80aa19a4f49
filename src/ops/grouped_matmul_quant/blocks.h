// Checks and blocks of rows that the quantised products and the quantised experts share.
#pragma once

#include <algorithm>

#include "base/arena.h"
#include "base/checks.h"
#include "ops/grouped_matmul_quant/kernel.h"
#include "tidegate/quant.h"

namespace tidegate::quant_products {

// The largest row block: 128 rows of 2048 channels as words fill a second-level cache, and a panel of weights that was
// widened and turned serves as many rows as possible.
inline constexpr std::int64_t kBlockRows = 128;
// Sums of this many products of int8 fit into int32.
inline constexpr std::int64_t kMaxWidth = 131071;

// Even blocks of the rows of every group that has rows.
class RowBlocks {
 public:
  RowBlocks(const std::int64_t* offsets, std::int64_t groups, Scratch& scratch) : offsets_(offsets), groups_(groups) {
    first_ = static_cast<std::int64_t*>(scratch.bytes(static_cast<std::size_t>(groups + 1) * sizeof(std::int64_t)));
    first_[0] = 0;
    for (std::int64_t g = 0; g < groups; ++g) {
      first_[g + 1] = first_[g] + blocks(g);
    }
  }
  std::int64_t count() const { return first_[groups_]; }
  struct Rows {
    std::int64_t group, first, count;
  };
  Rows operator[](std::int64_t i) const {
    const std::int64_t g = std::upper_bound(first_, first_ + groups_ + 1, i) - first_ - 1;
    const std::int64_t rows = offsets_[g + 1] - offsets_[g];
    const std::int64_t begin = rows * (i - first_[g]) / blocks(g);
    return {g, offsets_[g] + begin, rows * (i - first_[g] + 1) / blocks(g) - begin};
  }

 private:
  std::int64_t blocks(std::int64_t g) const { return (offsets_[g + 1] - offsets_[g] + kBlockRows - 1) / kBlockRows; }
  const std::int64_t* offsets_;
  std::int64_t groups_;
  std::int64_t* first_;
};

// Quantised weights of all groups.
struct Weights {
  const std::int8_t* data;
  std::int64_t N, K, group, column, inner;
  const float* scales;
  std::int64_t scale_group;
};
Weights weights_of(const TensorView& weight, const TensorView& scale, WeightAxes axes);

// int8 [G,N,K] by its axes, scales fp32 [G,N].
void check_weights(std::string_view op, Named weight, Named scale, std::int64_t G, std::int64_t N, std::int64_t K,
                   WeightAxes axes);

// A block of all columns from `first` on.
Block block_of(const Weights& w, std::int64_t group, std::int64_t first, std::int64_t columns);

}  // namespace tidegate::quant_products
