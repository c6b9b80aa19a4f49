// bf16 rows times bf16 weights with the dot product of pairs. The inner index runs along memory in both, and weights
// are used as they stand, whatever the number of rows.
//
// Order of a sum, here and in halves.kernel.h: stretches of kInner inner indices, added up in their order. In a stretch
// lane l of 16 takes the pairs l, l + 16, ... as one chain; lanes l and l + 8 are added, and of those eight
// ((0 + 2) + (1 + 3)) + ((4 + 6) + (5 + 7)). It is the same for any number of rows and columns.
//
// This file is for few rows: a vector is a line of one row, and columns pass in the order of memory, one by one or, as
// more rows leave a core less time to ask for weights, one in each of four places of a block.
#pragma once

#include "ops/grouped_matmul/kernel.h"
#include "simd/panels.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using grouped_matmul::Block;

constexpr int64_t kLine = 32;     // elements of a cache line, and of a vector
constexpr int64_t kInner = 2048;  // 128 rows of them are half of a second cache
constexpr int kSumColumns = 8;    // as many as are added up at a time
constexpr int kLineRows = 6;      // 6 x 4 sums + 4 vectors of weights + 1 of a row = 29 of 32 registers
// So many rows leave a core too little time to ask for the next lines of a long column. Four distant columns at a time
// share the loads of rows, and the hardware foresees four streams further than one: 4 to 6 rows an expert then take
// 0.83 to 0.86 of the time. Fewer rows, and shorter columns, are faster one by one.
constexpr int kManyRows = 4, kPlaces = 4;
constexpr int64_t kLongColumn = 1024;
// What is asked for before it is used, in all places together: as much as a core has under way while it reads as fast
// as memory lets it.
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

// Columns from `first` on, one by one: kRun stretches of each, then of the next.
template <int R, int kRun>
inline void line_columns(const Block& b, int64_t first) {
  const auto* rows = reinterpret_cast<const bf16* const*>(b.rows);
  const auto* weight = static_cast<const bf16*>(b.weight);
  const auto* later = static_cast<const bf16*>(b.later != nullptr ? b.later : b.weight);
  const int64_t step = b.weight_column;
  const auto column = [&](int64_t c) { return c < b.columns ? weight + c * step : later + (c - b.columns) * step; };
  for (int64_t c = first; c < b.columns; c += kSumColumns) {
    const int64_t columns = b.columns - c < kSumColumns ? b.columns - c : kSumColumns;
    for (int64_t run = 0; run < b.inner || run == 0; run += kRun * kInner) {
      const int64_t end = b.inner - run < kRun * kInner ? b.inner : run + kRun * kInner;
      const auto length = [&](int64_t begin) { return end - begin < kInner ? end - begin : kInner; };
      F32 t[kRun][R][kSumColumns] = {};
      for (int64_t k = 0; k < columns; ++k) {
        int64_t begin = run;
        for (int q = 0; q < kRun && (q == 0 || begin < end); ++q, begin += kInner) {
          const int64_t n = length(begin);
          const int64_t ahead = k + columns_ahead(n);
          const bf16* next = begin + n < end       ? column(c + k) + begin + n
                             : ahead < kSumColumns ? column(c + ahead) + run
                             : end >= b.inner      ? column(c + ahead)
                                                   : column(c) + end;
          column_sums<R>(rows, begin, column(c + k) + begin, n, next, &t[q][0][k]);
        }
      }
      int64_t begin = run;
      for (int q = 0; q < kRun && (q == 0 || begin < end); ++q, begin += kInner) {
        const TileSums s = {b.out + c, b.pitch, R, columns, begin == 0 && !b.accumulate};
        for (int r = 0; r < R; r += 2) {
          F32 both[kSumColumns];
#pragma GCC unroll 8
          for (int k = 0; k < kSumColumns; ++k) {
            both[k] = add_halves(t[q][r][k], t[q][r + 1 < R ? r + 1 : r][k]);
          }
          store_sums(both, s, r);
        }
      }
    }
  }
}

// What a stretch of n inner indices from `begin` on gives of R rows with a column in each of kPlaces places, two rows
// at a time: sums[s][r / 2]. The next column of a place stands `step` further.
constexpr int kLinePairs = kLineRows / 2;
template <int R>
TIDEGATE_INLINE void place_sums(const bf16* const* rows, int64_t begin, const bf16* const (&column)[kPlaces],
                                int64_t step, int64_t n, F32 (&sums)[kPlaces][kLinePairs]) {
  F32 t[R][kPlaces];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int s = 0; s < kPlaces; ++s) {
      t[r][s] = zero();
    }
  }
  const auto add = [&](int64_t i, auto load) __attribute__((always_inline)) {
    Bf16Pairs w[kPlaces];
#pragma GCC unroll 4
    for (int s = 0; s < kPlaces; ++s) {
      w[s] = load(column[s] + i);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Bf16Pairs row = load(rows[r] + begin + i);
#pragma GCC unroll 4
      for (int s = 0; s < kPlaces; ++s) {
        t[r][s] = dot(t[r][s], w[s], row);
      }
    }
  };
  const auto line = [&](int64_t i, int64_t ahead) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int s = 0; s < kPlaces; ++s) {
      prefetch(column[s] + ahead);
    }
    add(i, load_pairs);
  };
  constexpr int64_t kAhead = kUnderWay / kPlaces;
  const int64_t whole = n / kLine * kLine;
  int64_t i = 0;
#pragma GCC unroll 2
  for (; i < whole - kAhead; i += kLine) {
    line(i, i + kAhead);
  }
#pragma GCC unroll 2
  for (; i < whole; i += kLine) {
    line(i, step + i + kAhead - whole);  // of the next column
  }
  if (i < n) {
    add(i, [&](const bf16* p) { return load_pairs_n(p, n - i); });
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r += 2) {
#pragma GCC unroll 4
    for (int s = 0; s < kPlaces; ++s) {
      sums[s][r / 2] = add_halves(t[r][s], t[r + 1 < R ? r + 1 : r][s]);
    }
  }
}

// Columns [0, kPlaces * part): place s begins at s * part, a multiple of kSumColumns.
template <int R>
inline void place_columns(const Block& b, int64_t part) {
  const auto* weight = static_cast<const bf16*>(b.weight);
  const int64_t step = b.weight_column;
  for (int64_t c = 0; c < part; c += kSumColumns) {
    for (int64_t begin = 0; begin < b.inner; begin += kInner) {
      const int64_t n = b.inner - begin < kInner ? b.inner - begin : kInner;
      F32 t[kSumColumns][kPlaces][kLinePairs];
      for (int64_t k = 0; k < kSumColumns; ++k) {
        const bf16* column[kPlaces];
        for (int64_t s = 0; s < kPlaces; ++s) {
          column[s] = weight + (s * part + c + k) * step + begin;
        }
        place_sums<R>(reinterpret_cast<const bf16* const*>(b.rows), begin, column, step, n, t[k]);
      }
      for (int64_t s = 0; s < kPlaces; ++s) {
        const TileSums to = {b.out + s * part + c, b.pitch, R, kSumColumns, begin == 0 && !b.accumulate};
        for (int r = 0; r < R; r += 2) {
          F32 both[kSumColumns];
#pragma GCC unroll 8
          for (int k = 0; k < kSumColumns; ++k) {
            both[k] = t[k][s][r / 2];
          }
          store_sums(both, to, r);
        }
      }
    }
  }
}

template <int R>
inline void line_block(const Block& b) {
  int64_t first = 0;
  if constexpr (R >= kManyRows) {
    // Whole groups of columns in every place; what is left passes one by one.
    const int64_t part = b.inner >= kLongColumn ? b.columns / (kPlaces * kSumColumns) * kSumColumns : 0;
    place_columns<R>(b, part);
    first = kPlaces * part;
  }
  b.inner <= kInner ? line_columns<R, 1>(b, first) : line_columns<R, 4>(b, first);
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
