// bf16 rows times bf16 weights with the dot product of pairs. The inner index runs along memory in both, and weights
// are used as they stand, whatever the number of rows.
//
// Order of a sum, here and in halves.kernel.h: stretches of kInner inner indices, added up in their order. In a stretch
// lane l of 16 takes the pairs l, l + 16, ... as one chain; lanes l and l + 8 are added, and of those eight
// ((0 + 2) + (1 + 3)) + ((4 + 6) + (5 + 7)). It is the same for any number of rows and columns.
//
// This file is for few rows: a vector is a line of one row, and columns pass one by one, in the order of memory.
#pragma once

#include "ops/grouped_matmul/kernel.h"
#include "simd/panels.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using grouped_matmul::Block;

constexpr int64_t kLine = 32;     // elements of a cache line, and of a vector
constexpr int64_t kInner = 2048;  // 128 rows of them are half of a second cache
constexpr int kSumColumns = 8;    // as many as are added up at a time
// Every row is loaded anew for every column: with more of them a core multiplies for longer than it reads.
constexpr int kLineRows = 6;
// What is asked for before it is used: as much as a core has under way while it reads as fast as memory lets it.
constexpr int64_t kUnderWay = 2048;

// Where the sums of a tile go: out[r * pitch + c], instead of what is there (fresh) or added to it.
struct TileSums {
  float* out;
  int64_t pitch, rows, columns;
  bool fresh;
};

// Two rows, `first` and the next, of eight columns: t holds eight sums of each for every column.
TIDEGATE_INLINE void store_sums(const F32 (&t)[kSumColumns], const TileSums& s, int64_t first) {
  float* out = s.out + first * s.pitch;
  const F32 total = sum_halves(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]);
  if (s.fresh && s.columns >= kSumColumns) {
    store_halves(out, s.pitch, total, s.rows - first);
    return;
  }
  float sums[2 * kSumColumns];
  store_halves(sums, kSumColumns, total, 2);
  for (int64_t r = 0; r < 2 && first + r < s.rows; ++r) {
    for (int64_t k = 0; k < kSumColumns && k < s.columns; ++k) {
      float& to = out[r * s.pitch + k];
      to = s.fresh ? sums[kSumColumns * r + k] : to + sums[kSumColumns * r + k];
    }
  }
}

// sums[r * kSumColumns]: what n inner indices of R rows, from `begin` on, give with those of a column. The lines of
// `next` are asked for meanwhile.
template <int R>
TIDEGATE_INLINE void column_sums(const bf16* const* rows, int64_t begin, const bf16* column, int64_t n,
                                 const bf16* next, F32* sums) {
  F32 t[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    t[r] = zero();
  }
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + kLine <= n; i += kLine) {
    prefetch(next + i);
    const Bf16Pairs weight = load_pairs(column + i);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      t[r] = dot(t[r], weight, load_pairs(rows[r] + begin + i));
    }
  }
  if (i < n) {
    const Bf16Pairs weight = load_pairs_n(column + i, n - i);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      t[r] = dot(t[r], weight, load_pairs_n(rows[r] + begin + i, n - i));
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    sums[r * kSumColumns] = t[r];
  }
}

// So many columns of n inner indices are asked for early.
constexpr int64_t columns_ahead(int64_t n) { return n <= 0 ? 1 : (kUnderWay + n - 1) / n; }

template <int R>
inline void line_block(const Block& b) {
  const auto* rows = reinterpret_cast<const bf16* const*>(b.rows);
  const auto* weight = static_cast<const bf16*>(b.weight);
  const auto* later = static_cast<const bf16*>(b.later != nullptr ? b.later : b.weight);
  const int64_t step = b.weight_column;
  const auto column = [&](int64_t c) { return c < b.columns ? weight + c * step : later + (c - b.columns) * step; };
  for (int64_t c = 0; c < b.columns; c += kSumColumns) {
    const int64_t columns = b.columns - c < kSumColumns ? b.columns - c : kSumColumns;
    for (int64_t begin = 0; begin < b.inner || begin == 0; begin += kInner) {
      const int64_t n = b.inner - begin < kInner ? b.inner - begin : kInner;
      const bool last = begin + n >= b.inner;
      F32 t[R][kSumColumns] = {};
      for (int64_t k = 0; k < columns; ++k) {
        const int64_t ahead = k + columns_ahead(n);
        const bf16* next = ahead < kSumColumns ? column(c + ahead) + begin
                           : last              ? column(c + ahead)
                                               : column(c) + begin + n;
        column_sums<R>(rows, begin, column(c + k) + begin, n, next, &t[0][k]);
      }
      const TileSums s = {b.out + c, b.pitch, R, columns, begin == 0 && !b.accumulate};
      for (int r = 0; r < R; r += 2) {
        F32 both[kSumColumns];
#pragma GCC unroll 8
        for (int k = 0; k < kSumColumns; ++k) {
          both[k] = add_halves(t[r][k], t[r + 1 < R ? r + 1 : r][k]);
        }
        store_sums(both, s, r);
      }
    }
  }
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
