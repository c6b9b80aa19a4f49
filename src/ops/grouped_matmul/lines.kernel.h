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

// n inner indices, from `begin` on, of a column in each of S places; `next` is read later.
template <int S>
struct Columns {
  int64_t begin, n;
  const bf16 *at[S], *next[S];
};

// What R rows give with them: two rows at a time, of place s and rows r and r + 1 at sums[s * kLinePairs + r / 2].
constexpr int kLinePairs = kLineRows / 2;
template <int R, int S>
TIDEGATE_INLINE void add_lines(const bf16* const* rows, const Columns<S>& columns, F32* sums) {
  F32 t[R][S];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) {
      t[r][s] = zero();
    }
  }
  const auto add = [&](int64_t i, auto weight, auto row) __attribute__((always_inline)) {
    Bf16Pairs w[S];
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) {
      w[s] = weight(columns.at[s] + i);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Bf16Pairs x = row(rows[r] + columns.begin + i);
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) {
        t[r][s] = dot(t[r][s], w[s], x);
      }
    }
  };
  const auto line = [&](int64_t i, const bf16* const* ahead, int64_t at) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) {
      prefetch(ahead[s] + at);
    }
    add(i, load_pairs, load_pairs);
  };
  const int64_t whole = columns.n / kLine * kLine;
  const int64_t ahead = whole < kUnderWay / S ? whole : kUnderWay / S;
  int64_t i = 0;
#pragma GCC unroll 2
  for (; i < whole - ahead; i += kLine) {
    line(i, columns.at, i + ahead);
  }
#pragma GCC unroll 2
  for (; i < whole; i += kLine) {
    line(i, columns.next, i + ahead - whole);
  }
  if (const int64_t rest = columns.n - i; rest > 0) {
    const auto load = [&](const bf16* p) { return load_pairs_n(p, rest); };
    add(i, load, load);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r += 2) {
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) {
      sums[s * kLinePairs + r / 2] = add_halves(t[r][s], t[r + 1 < R ? r + 1 : r][s]);
    }
  }
}

// So many columns of n inner indices further stands what is asked for at the end of one.
constexpr int64_t columns_ahead(int64_t n, int64_t places) { return n <= 0 ? 1 : (kUnderWay / places + n - 1) / n; }

// Columns [first, first + S * part) of a block: those of place s begin at first + s * part.
template <int R, int S>
inline void line_columns(const Block& b, int64_t first, int64_t part) {
  const auto* weight = static_cast<const bf16*>(b.weight);
  const auto* later = static_cast<const bf16*>(b.later != nullptr ? b.later : b.weight);
  const int64_t step = b.weight_column;
  // A single place ends with the block; several end where the next one began, and the last of them with the block.
  const auto column = [&](int64_t s, int64_t c) {
    const int64_t at = first + s * part + c;
    return S > 1 || at < b.columns ? weight + at * step : later + (at - b.columns) * step;
  };
  for (int64_t c = 0; c < part; c += kSumColumns) {
    const int64_t width = part - c < kSumColumns ? part - c : kSumColumns;
    for (int64_t begin = 0; begin < b.inner || begin == 0; begin += kInner) {
      const int64_t n = b.inner - begin < kInner ? b.inner - begin : kInner;
      const bool last = begin + n >= b.inner;
      F32 t[kSumColumns][S][kLinePairs] = {};
      for (int64_t k = 0; k < width; ++k) {
        const int64_t next = k + columns_ahead(n, S);
        Columns<S> columns{begin, n, {}, {}};
        for (int64_t s = 0; s < S; ++s) {
          columns.at[s] = column(s, c + k) + begin;
          columns.next[s] = next < kSumColumns ? column(s, c + next) + begin
                            : last             ? column(s, c + next)
                                               : column(s, c) + begin + n;
        }
        add_lines<R>(reinterpret_cast<const bf16* const*>(b.rows), columns, &t[k][0][0]);
      }
      for (int64_t s = 0; s < S; ++s) {
        const TileSums to = {b.out + first + s * part + c, b.pitch, R, width, begin == 0 && !b.accumulate};
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
    line_columns<R, kPlaces>(b, 0, part);
    first = kPlaces * part;
  }
  line_columns<R, 1>(b, first, b.columns - first);
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
