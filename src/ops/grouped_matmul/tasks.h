// Groups of rows cut into blocks, and weights of either orientation. Shared by grouped_matmul and the fused experts.
#pragma once

#include <algorithm>

#include "base/arena.h"
#include "base/checks.h"
#include "base/element.h"
#include "ops/grouped_matmul/kernel.h"
#include "tidegate/moe.h"
#include "tidegate/parallel.h"

namespace tidegate::grouped_matmul {

// Weights W_g [N,K] of all groups: element (g, n, k) stands at g * group + n * row + k * column, row or column is 1.
struct Weights {
  char* data;
  std::int64_t N, K, group, row, column;
  int type;
  int bytes;
  char* at(std::int64_t g, std::int64_t n, std::int64_t k) const {
    return data + (g * group + n * row + k * column) * bytes;
  }
};
inline Weights weights_of(const TensorView& t, WeightAxes axes) {
  const int n = axes == WeightAxes::kNK ? 1 : 2;
  return {static_cast<char*>(t.data), t.sizes[n],          t.sizes[3 - n], t.strides[0], t.strides[n], t.strides[3 - n],
          data_type_index(t.dtype),   dtype_bytes(t.dtype)};
}

// A weight [G,N,K] by its axes; a stride of 1 counts where there is more than one element.
inline void check_weight_shape(std::string_view op, Named w, std::int64_t G, std::int64_t N, std::int64_t K,
                               WeightAxes axes) {
  if (axes == WeightAxes::kNK) {
    check_shape(op, w, {G, N, K});
  } else {
    check_shape(op, w, {G, K, N});
  }
  const std::int64_t* strides = w.tensor.strides;
  check(w.tensor.numel() == 0 || strides[1] == 1 || strides[2] == 1 || N == 1 || K == 1, op, ": ", w.name,
        ": expected stride 1 in one of the last two dimensions, got ", strides[1], " and ", strides[2]);
}
inline void check_weight_view(std::string_view op, Named w, std::int64_t G, std::int64_t N, std::int64_t K,
                              WeightAxes axes) {
  check_float(op, w);
  check_weight_shape(op, w, G, N, K, axes);
}

// Where the groups begin: [G + 1].
std::int64_t* group_offsets(std::string_view op, const TensorView& groups, std::int64_t rows, GroupList kind,
                            Scratch& scratch);

// Rows by pointers: row j of a matrix.
template <class F>
const void** row_pointers(std::int64_t count, Scratch& scratch, F row) {
  auto** list = static_cast<const void**>(
      scratch.bytes(static_cast<std::size_t>(std::max<std::int64_t>(count, 1)) * sizeof(void*)));
  for (std::int64_t j = 0; j < count; ++j) {
    list[j] = row(j);
  }
  return list;
}
inline const char* row_at(const TensorView& t, std::int64_t r) {
  return static_cast<const char*>(t.data) + r * t.strides[0] * dtype_bytes(t.dtype);
}

// The weight of a block. An inner stride that is never taken counts as 1; so does the step to a second column.
inline void set_weight(Block& b, const void* weight, std::int64_t column, std::int64_t inner, int type) {
  b.weight = weight;
  b.weight_column = column;
  b.weight_inner = b.inner <= 1 ? 1 : inner;
  b.weight_type = type;
}

// Column blocks that one task takes one after the other, so that its rows are packed once: at most 8 of them, and only
// as long as every thread has 16 tasks.
inline std::int64_t blocks_per_task(std::int64_t row_blocks, std::int64_t column_blocks, std::int64_t threads) {
  std::int64_t run = 8;
  while (run > 1 && row_blocks * ((column_blocks + run - 1) / run) < 16 * threads) {
    run /= 2;
  }
  return run;
}

// Blocks of rows and columns of every group that has rows, in an order that reuses a block of weights. With `runs` a
// task has the columns of several blocks.
class BlockTasks {
 public:
  BlockTasks(const std::int64_t* offsets, std::int64_t groups, std::int64_t columns, Scratch& scratch,
             bool runs = false)
      : offsets_(offsets), groups_(groups), columns_(columns), width_(kBlockColumns) {
    blocks_ = static_cast<std::int64_t*>(scratch.bytes(static_cast<std::size_t>(groups + 1) * sizeof(std::int64_t)));
    blocks_[0] = 0;
    for (std::int64_t g = 0; g < groups; ++g) {
      blocks_[g + 1] = blocks_[g] + (offsets[g + 1] - offsets[g] + kBlockRows - 1) / kBlockRows;
    }
    if (runs) {
      width_ *= blocks_per_task(row_blocks(), (columns + kBlockColumns - 1) / kBlockColumns, parallel_threads());
    }
    column_blocks_ = (columns + width_ - 1) / width_;
  }
  std::int64_t count() const { return row_blocks() * column_blocks_; }
  std::int64_t column_blocks() const { return column_blocks_; }

  struct Task {
    std::int64_t group, row, rows, column, columns, column_block;
    std::int64_t row_block;  // counted through all groups
  };
  std::int64_t row_blocks() const { return blocks_[groups_]; }
  std::int64_t first_row_block(std::int64_t group) const { return blocks_[group]; }
  struct Rows {
    std::int64_t first, count;
  };
  // Even blocks: a full one and a single row would read the weights for that row alone.
  Rows rows_of(std::int64_t group, std::int64_t row_block) const {
    const std::int64_t rows = offsets_[group + 1] - offsets_[group];
    const std::int64_t blocks = blocks_[group + 1] - blocks_[group];
    const std::int64_t r = row_block - blocks_[group];
    const std::int64_t begin = rows * r / blocks;
    return {offsets_[group] + begin, rows * (r + 1) / blocks - begin};
  }
  Task operator[](std::int64_t i) const {
    const std::int64_t g = std::upper_bound(blocks_, blocks_ + groups_ + 1, i / column_blocks_) - blocks_ - 1;
    const std::int64_t blocks = blocks_[g + 1] - blocks_[g];
    const std::int64_t c = (i - blocks_[g] * column_blocks_) / blocks;
    const std::int64_t r = (i - blocks_[g] * column_blocks_) % blocks;
    const Rows rows = rows_of(g, blocks_[g] + r);
    return {g, rows.first, rows.count, c * width_, std::min(width_, columns_ - c * width_), c, blocks_[g] + r};
  }

 private:
  const std::int64_t* offsets_;
  std::int64_t groups_, columns_, width_, column_blocks_;
  std::int64_t* blocks_;  // [groups + 1]: row blocks before those of a group
};

// dW_g for all groups: left [.,N] and right [.,K] rows of the groups, each left row times its factor.
struct OuterProducts {
  const void* const* left;
  const void* const* right;
  const float* factors;  // absent: 1; with factors bf16 rows are multiplied in fp32
  int left_type, right_type;
  const std::int64_t* offsets;
  std::int64_t groups;
  bool accumulate;
};
void outer_products(const OuterProducts& p, const Weights& out);

}  // namespace tidegate::grouped_matmul
