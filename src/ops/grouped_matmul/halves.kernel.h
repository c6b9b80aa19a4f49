// bf16 rows times bf16 weights, many rows; few rows are in lines.kernel.h, where the order of sums is told.
//
// A vector takes half a line of two rows, and a weight's half is broadcast to the two, so its lanes are eight sums of
// both: the left halves of all lines first, then the right ones. The rows, which are fewer, are packed for that.
#pragma once

#include "ops/grouped_matmul/lines.kernel.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using grouped_matmul::kBlockRows;

constexpr int64_t kHalf = kLine / 2;
// 8 x 3 accumulators + 3 vectors of rows + 1 of a weight = 28 of 32 registers, and 11 loads for 24 dot products.
constexpr int kTileVectors = 3;

constexpr int64_t kHalvesRoom = kBlockRows * kInner / 2;
constexpr int64_t line_count(int64_t n) { return (n + kLine - 1) / kLine; }
constexpr int64_t vector_count(int64_t rows) { return (rows + 1) / 2; }

// Vectors [first, first + V) of rows, n <= kInner inner indices from `begin` on: [2 sides][lines][V] vectors; zeros
// beyond n. A row that is missing repeats the last one. The sides are `right` elements apart.
inline void pack_halves(const bf16* const* rows, int64_t row_count, int64_t begin, int64_t n, int64_t first, int64_t V,
                        int64_t right, bf16* panel) {
  for (int64_t v = 0; v < V; ++v) {
    const auto row = [&](int64_t r) { return rows[r < row_count ? r : row_count - 1] + begin; };
    const int64_t r = 2 * (first + v);
    const bf16 *a = row(r), *b = row(r + 1);
    const bf16 *later_a = row(r + 2), *later_b = row(r + 3);  // rows lie anywhere
    bf16* to = panel + v * kLine;
    for (int64_t i = 0; i < n; i += kLine, to += V * kLine) {
      prefetch(later_a + i);
      prefetch(later_b + i);
      const bool whole = n - i >= kLine;
      const Bf16Pairs x = whole ? load_pairs(a + i) : load_pairs_n(a + i, n - i);
      const Bf16Pairs y = whole ? load_pairs(b + i) : load_pairs_n(b + i, n - i);
      store_pairs(to, left_halves(x, y));
      store_pairs(to + right, right_halves(x, y));
    }
  }
}

// Weights that are multiplied later, `next` elements behind these: a tile asks for columns [first, last) of them.
struct Ahead {
  int64_t next, first, last;
};

// 2 V rows with eight columns, which share the loads of the rows. Columns that are missing repeat the last one.
template <int V>
inline void half_tile(const bf16* panel, const bf16* weight, int64_t step, int64_t n, const Ahead& ahead,
                      const TileSums& s) {
  const int64_t whole = n / kLine * kLine;
  bf16 rest[kSumColumns][kLine];  // with zeros behind it
  if (whole < n) {
    memset(rest, 0, sizeof rest);
    for (int64_t c = 0; c < kSumColumns && c < s.columns; ++c) {
      memcpy(rest[c], weight + c * step + whole, static_cast<size_t>(n - whole) * sizeof(bf16));
    }
  }
  F32 left[V][kSumColumns];
  for (int64_t side = 0; side < 2; ++side) {
    const bf16* w[kSumColumns];
    F32 t[V][kSumColumns];
#pragma GCC unroll 8
    for (int c = 0; c < kSumColumns; ++c) {
      w[c] = weight + (c < s.columns ? c : s.columns - 1) * step + side * kHalf;
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        t[v][c] = zero();
      }
    }
    const auto add = [&](int64_t i) __attribute__((always_inline)) {
      Bf16Pairs x[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        x[v] = load_pairs(panel + v * kLine);
      }
      panel += V * kLine;
#pragma GCC unroll 8
      for (int c = 0; c < kSumColumns; ++c) {
        const Bf16Pairs factor = set1_half(w[c] + i);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          t[v][c] = dot(t[v][c], factor, x[v]);
        }
      }
    };
    const int64_t middle = (ahead.first + ahead.last) / 2;
    const int64_t first = side == 0 ? ahead.first : middle, last = side == 0 ? middle : ahead.last;
    int64_t i = 0;
    for (; i + 2 * kLine <= whole; i += 2 * kLine) {
      for (int64_t c = first; c < last; ++c) {
        prefetch_far(weight + ahead.next + c * step + i);
        prefetch_far(weight + ahead.next + c * step + i + kLine);
      }
      add(i);
      add(i + kLine);
    }
    if (i < whole) {
      add(i);
    }
    if (whole < n) {
#pragma GCC unroll 8
      for (int c = 0; c < kSumColumns; ++c) {
        w[c] = rest[c] + side * kHalf;
      }
      add(0);
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 8
      for (int c = 0; c < kSumColumns; ++c) {
        if (side == 0) {
          left[v][c] = t[v][c];
        } else {
          t[v][c] = left[v][c] + t[v][c];
        }
      }
      if (side == 1) {
        store_sums(t[v], s, 2 * v);
      }
    }
  }
}

// The tiles of a block: group g has the vectors [first(g), first(g + 1)).
struct HalfGroups {
  int64_t vectors, count;
  int64_t first(int64_t g) const { return vectors * g / count; }
};
inline HalfGroups half_groups(const Block& b) {
  const int64_t vectors = vector_count(b.row_count);
  return {vectors, (vectors + kTileVectors - 1) / kTileVectors};
}

// Elements of a stretch of n inner indices of two rows.
constexpr int64_t stretch_size(int64_t n) { return line_count(n) * 2 * kLine; }

// Elements [begin, begin + n) of the rows as inner indices `at` and following of a stretch of `whole`, for all groups.
inline void pack_stretch(const Block& b, int64_t begin, int64_t n, int64_t at, int64_t whole, bf16* panels) {
  const HalfGroups groups = half_groups(b);
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t first = groups.first(g), V = groups.first(g + 1) - first;
    pack_halves(reinterpret_cast<const bf16* const*>(b.rows), b.row_count, begin, n, first, V,
                line_count(whole) * V * kLine, panels + first * stretch_size(whole) + at / kLine * V * kLine);
  }
}

inline int64_t half_bytes(const Block& b) {
  const int64_t last = b.inner % kInner;
  return vector_count(b.row_count) * (b.inner / kInner * stretch_size(kInner) + stretch_size(last)) *
         static_cast<int64_t>(sizeof(bf16));
}

inline void half_pack(const Block& b, int64_t first, int64_t n, bf16* to) {
  const int64_t stretch = first / kInner * kInner;
  const int64_t whole = b.inner - stretch < kInner ? b.inner - stretch : kInner;
  pack_stretch(b, 0, n, first - stretch, whole, to + vector_count(b.row_count) * 2 * stretch);
}

inline void half_block(const Block& b) {
  const auto* weight = static_cast<const bf16*>(b.weight);
  bf16* room = reinterpret_cast<bf16*>(b.room);
  const auto* packed = static_cast<const bf16*>(b.packed);
  const int64_t step = b.weight_column;
  const HalfGroups all = half_groups(b);
  const int64_t groups = all.count;
  for (int64_t begin = 0; begin < b.inner || begin == 0; begin += kInner) {
    const int64_t n = b.inner - begin < kInner ? b.inner - begin : kInner;
    const int64_t size = stretch_size(n);
    const bf16* panels = packed != nullptr ? packed + all.vectors * 2 * begin : room;
    // Packing takes a tenth of the time of a product with 128 columns.
    if (packed == nullptr && !(b.same_rows && b.inner <= kInner)) {
      pack_stretch(b, begin, n, 0, n, room);
    }
    for (int64_t c = 0; c < b.columns; c += kSumColumns) {
      const int64_t rest = b.columns - c - kSumColumns;
      const int64_t asked = rest > 0 && rest < kSumColumns ? rest : kSumColumns;
      const bf16* tile_weight = weight + c * step + begin;
      int64_t next = kSumColumns * step;
      if (rest <= 0) {
        next = b.later == nullptr ? 0 : static_cast<const bf16*>(b.later) + begin - tile_weight;
      }
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t first = all.first(g);
        const Ahead ahead = {next, asked * g / groups, asked * (g + 1) / groups};
        const TileSums s = {b.out + 2 * first * b.pitch + c, b.pitch, b.row_count - 2 * first, b.columns - c,
                            begin == 0 && !b.accumulate};
        const auto tile = [&](int64_t, auto vectors) {
          half_tile<decltype(vectors)::value>(panels + first * size, tile_weight, step, n, ahead, s);
        };
        one_tile<kTileVectors>(0, all.first(g + 1) - first, tile);
      }
    }
  }
}

// Any number of rows.
inline void pair_block(const Block& b) {
  if (b.row_count > kLineRows) {
    half_block(b);
    return;
  }
  const auto lines = [&](int64_t, auto rows) { line_block<decltype(rows)::value>(b); };
  one_tile<kLineRows>(0, b.row_count, lines);
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
