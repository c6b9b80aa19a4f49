// What grouped_matmul.cpp (and the fused experts) hand to the kernels: products of blocks that fit into the caches.
#pragma once

#include <stdint.h>

#include "base/dispatch.h"

namespace tidegate::grouped_matmul {

// A block is at most this large. Columns: what a task of few rows streams at a time. Rows: 128 rows of 2048 16-bit
// channels are half of a second-level cache.
inline constexpr int64_t kBlockRows = 128;
inline constexpr int64_t kBlockColumns = 128;

// out[r][c] = sum over i of rows[r][i] * weight(c, i). Sums are fp32; their order (see dots.kernel.h,
// lines.kernel.h and zips.kernel.h) depends on the types, the direction of the weight's memory and the instruction set,
// never on the number of rows or columns.
struct Block {
  const void* const* rows;  // elements of row_type, neighbours in memory
  int64_t row_count, columns, inner;
  const void* weight;  // weight(c, i) stands at c * weight_column + i * weight_inner; one of the two is 1
  int64_t weight_column, weight_inner;
  int row_type, weight_type;
  float* out;  // out[r * pitch + c]
  int64_t pitch;
  bool accumulate;    // to what out holds
  float* room;        // room_floats of scratch
  const void* later;  // a weight of the same strides that comes next and may be asked for early, or null
  // As in the product before, whose weight had the same type and strides, with the same room: they may still be packed
  // there.
  bool same_rows;
  bool same_weight;    // likewise, where it was the rows that changed
  const void* packed;  // the rows as `pack` leaves them, or null
};

// out(m, n) = sum over r ascending of factors[r] * left[r][m] * right[r][n]; absent factors are 1.
struct OuterBlock {
  const void* const* left;
  const void* const* right;
  const float* factors;
  int64_t rows;                      // any number
  int64_t left_first, left_count;    // m, at most kOuterLeft
  int64_t right_first, right_count;  // n, at most kOuterRight
  int left_type, right_type;
  void* out;  // element (m, n) at m * out_row + n
  int64_t out_row;
  int out_type;
  bool accumulate;  // to what is there
  bool stream;      // out is larger than the caches and its rows are whole cache lines: it may be written past them
  float* room;
};
// Every row of a factor is rearranged once for each block of the other one, so blocks are as large as a second-level
// cache lets them be: both factors of 256 rows, and the sums, are 570 KB.
inline constexpr int64_t kOuterLeft = 288;
inline constexpr int64_t kOuterRight = 256;

struct Kernels {
  int64_t room_floats, outer_room_floats;
  void (*product)(const Block&) noexcept;
  // For rows that meet many weights: how many bytes they take in the form in which a product like this one wants them,
  // 0 if it takes them as they stand. pack brings elements [first, first + n) into it, where b.rows point to the first
  // of them; both are multiples of kBlockColumns, but for the end of a row.
  int64_t (*packed_bytes)(const Block&) noexcept;
  void (*pack)(const Block&, int64_t first, int64_t n, void* to) noexcept;
  void (*outer)(const OuterBlock&) noexcept;
  // Rows [row_count][columns] of fp32, `pitch` apart, plus bias (absent: 0), to rows of a data type.
  void (*store)(const float* from, int64_t pitch, int64_t rows, int64_t columns, const float* bias, void* to,
                int64_t to_row, int to_type) noexcept;
};

}  // namespace tidegate::grouped_matmul

TIDEGATE_KERNEL_TABLE(grouped_matmul::Kernels, grouped_matmul_kernels)
