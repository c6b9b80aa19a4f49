// bf16 rows times bf16 weights with the dot product of pairs. Weights are used as they stand, whatever the number of
// rows; the rows, which are fewer, are packed.
//
// The inner index runs along memory in both. A vector takes eight inner indices of four rows (a quad), so its lanes are
// four partial sums of each; a weight's eight are broadcast to the four. Order of a sum: lane l of 4 takes the pairs l,
// l + 4, ... as one chain, then (0 + 2) + (1 + 3). It is the same for any number of rows and columns.
#pragma once

#include "ops/grouped_matmul/kernel.h"
#include "simd/panels.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using grouped_matmul::Block;
using grouped_matmul::kBlockColumns;
using grouped_matmul::kBlockRows;

constexpr int64_t kQuad = 8;   // inner indices of a vector
constexpr int64_t kLine = 32;  // elements of a cache line

// 8 x 3 accumulators + 3 vectors of rows + 1 of a weight = 28 of 32 registers, and 11 loads for 24 dot products. One
// vector of rows still has eight chains to hide the latency of a dot product with.
constexpr int kQuadColumns = 8, kQuadVectors = 3;
constexpr int64_t kQuadInner = 2048;  // packed at a time: 128 rows of them are half of a second cache

constexpr int64_t quad_count(int64_t rows) { return (rows + 3) / 4; }
// Room: the packed rows, then partial sums of the block between two stretches of kQuadInner.
constexpr int64_t kQuadPanels = quad_count(kBlockRows) * 4 * kQuadInner / 2;
constexpr int64_t kQuadRoom = kQuadPanels + quad_count(kBlockRows) * kLanes * kBlockColumns;

// Vectors [first, first + V) of rows, n <= kQuadInner inner indices from `begin` on: [n / 8][V] vectors; zeros beyond
// n. Rows that are missing repeat the last one.
inline void pack_quads(const bf16* const* rows, int64_t row_count, int64_t begin, int64_t n, int64_t first, int64_t V,
                       bf16* panel) {
  for (int64_t v = 0; v < V; ++v) {
    const auto row = [&](int64_t r) { return rows[r < row_count ? r : row_count - 1] + begin; };
    const int64_t r = 4 * (first + v);
    const bf16 *a = row(r), *b = row(r + 1), *c = row(r + 2), *d = row(r + 3);
    const bf16* const later[4] = {row(r + 4), row(r + 5), row(r + 6), row(r + 7)};  // rows lie anywhere
    bf16* to = panel + v * 2 * kLanes;
    int64_t i = 0;
    for (; i + kLine <= n; i += kLine) {
      Bf16Pairs q[4] = {load_pairs(a + i), load_pairs(b + i), load_pairs(c + i), load_pairs(d + i)};
      turn_quads(q);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j, to += V * 2 * kLanes) {
        prefetch(later[j] + i);
        store_pairs(to, q[j]);
      }
    }
    for (; i + kQuad <= n; i += kQuad, to += V * 2 * kLanes) {
      store_quad(to, load_quad(a + i), load_quad(b + i), load_quad(c + i), load_quad(d + i));
    }
    if (const int64_t rest = n - i; rest > 0) {
      store_quad(to, load_quad_n(a + i, rest), load_quad_n(b + i, rest), load_quad_n(c + i, rest),
                 load_quad_n(d + i, rest));
    }
  }
}

// Where the sums of one tile go. partial: where those of earlier stretches are (begins: there are none) and where those
// for later ones go (ends: none will come).
struct QuadSums {
  float* partial;
  bool begins, ends;
  float* out;  // out[r * pitch + c]
  int64_t pitch, rows, columns;
  bool fresh;
};

// What is asked for line by line as a tile goes on; `next`: elements from its weight to that of the next tile. A tile
// that is alone with its columns asks for them kNear inner indices ahead, beyond their ends for the next tile's: the
// 128 lines of eight columns are what memory has under way at a time while one core reads as fast as it can. They go
// into the first cache, because they are wanted at once. Of several tiles that share columns each takes longer than
// memory does, and asks for columns [first, last) of the next ones.
constexpr int64_t kNear = 512;
struct QuadsAhead {
  int64_t next;
  bool near;
  int64_t first, last;
};

// Four rows of four columns, from the sums of a quad of rows with each of them.
TIDEGATE_INLINE void store_quads(F32 a, F32 b, F32 c, F32 d, float* out, int64_t pitch, int64_t rows, int64_t columns,
                                 bool fresh) {
  const F32 total = sum_quads(a, b, c, d);
  if (fresh && columns >= 4) {
    store_quarters(out, pitch, total, rows);
    return;
  }
  float sums[kLanes];
  store(sums, total);
  for (int64_t r = 0; r < 4 && r < rows; ++r) {
    for (int64_t k = 0; k < 4 && k < columns; ++k) {
      float& to = out[r * pitch + k];
      to = fresh ? sums[4 * r + k] : to + sums[4 * r + k];
    }
  }
}

template <int V>
inline void quad_tile(const bf16* panel, const bf16* weight, int64_t step, int64_t n, const QuadsAhead& ahead,
                      const QuadSums& s) {
  const bf16* w[kQuadColumns];
  F32 t[kQuadColumns][V];
#pragma GCC unroll 8
  for (int c = 0; c < kQuadColumns; ++c) {
    w[c] = weight + (c < s.columns ? c : s.columns - 1) * step;
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      t[c][v] = s.begins ? zero() : load(s.partial + (c * V + v) * kLanes);
    }
  }
  const auto add = [&](int64_t i) __attribute__((always_inline)) {
    Bf16Pairs x[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      x[v] = load_pairs(panel + i * V * (2 * kLanes / kQuad) + 2 * v * kLanes);
    }
#pragma GCC unroll 8
    for (int c = 0; c < kQuadColumns; ++c) {
      const Bf16Pairs factor = set1_quad(w[c] + i);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        t[c][v] = dot(t[c][v], x[v], factor);
      }
    }
  };
  int64_t i = 0;
  for (; i + kLine <= n; i += kLine) {
    if (ahead.near) {
      const int64_t at = i + kNear < n ? i + kNear : ahead.next + i + kNear - n;
#pragma GCC unroll 8
      for (int c = 0; c < kQuadColumns; ++c) {
        prefetch(w[c] + at);
      }
    } else {
      for (int64_t c = ahead.first; c < ahead.last; ++c) {
        prefetch_far(weight + ahead.next + c * step + i);
      }
    }
    add(i);
    add(i + kQuad);
    add(i + 2 * kQuad);
    add(i + 3 * kQuad);
  }
  for (; i + kQuad <= n; i += kQuad) {
    add(i);
  }
  if (i < n) {  // with zeros behind it
    bf16 rest[kQuadColumns][kQuad];
    memset(rest, 0, sizeof rest);
#pragma GCC unroll 8
    for (int c = 0; c < kQuadColumns; ++c) {
      memcpy(rest[c], w[c] + i, static_cast<size_t>(n - i) * sizeof(bf16));
      w[c] = rest[c];
    }
    panel += i * V * (2 * kLanes / kQuad);
    add(0);
  }
  if (!s.ends) {
#pragma GCC unroll 8
    for (int c = 0; c < kQuadColumns; ++c) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        store(s.partial + (c * V + v) * kLanes, t[c][v]);
      }
    }
    return;
  }
#pragma GCC unroll 8
  for (int c = 0; c < kQuadColumns; c += 4) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      store_quads(t[c][v], t[c + 1][v], t[c + 2][v], t[c + 3][v], s.out + 4 * v * s.pitch + c, s.pitch, s.rows - 4 * v,
                  s.columns - c, s.fresh);
    }
  }
}

inline void quad_block(const Block& b) {
  const auto* const* rows = reinterpret_cast<const bf16* const*>(b.rows);
  const auto* weight = static_cast<const bf16*>(b.weight);
  bf16* panels = reinterpret_cast<bf16*>(b.room);
  const int64_t step = b.weight_column;
  const int64_t all = quad_count(b.row_count);
  const int64_t groups = (all + kQuadVectors - 1) / kQuadVectors;
  for (int64_t begin = 0; begin < b.inner || begin == 0; begin += kQuadInner) {
    const int64_t count = b.inner - begin < kQuadInner ? b.inner - begin : kQuadInner;
    const int64_t size = (count + kQuad - 1) / kQuad * 2 * kLanes;  // of a vector's row of quads
    // Packing takes a tenth of the time of a product with kBlockColumns columns.
    for (int64_t g = b.same_rows && b.inner <= kQuadInner ? groups : 0; g < groups; ++g) {
      const int64_t first = all * g / groups;
      pack_quads(rows, b.row_count, begin, count, first, all * (g + 1) / groups - first, panels + first * size);
    }
    float* partial = b.room + kQuadPanels;
    for (int64_t c = 0; c < b.columns; c += kQuadColumns) {
      const int64_t rest = b.columns - c - kQuadColumns;
      const int64_t asked = rest > 0 && rest < kQuadColumns ? rest : kQuadColumns;
      const bf16* tile_weight = weight + c * step + begin;
      int64_t next = kQuadColumns * step;
      if (rest <= 0) {
        next = b.later == nullptr ? 0 : static_cast<const bf16*>(b.later) + begin - tile_weight;
      }
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t first = all * g / groups, V = all * (g + 1) / groups - first;
        const QuadsAhead ahead = {next, groups == 1 && count >= kNear, asked * g / groups, asked * (g + 1) / groups};
        const QuadSums s = {partial,
                            begin == 0,
                            begin + count >= b.inner,
                            b.out + 4 * first * b.pitch + c,
                            b.pitch,
                            b.row_count - 4 * first,
                            b.columns - c,
                            !b.accumulate};
        const auto tile = [&](int64_t, auto vectors) {
          quad_tile<decltype(vectors)::value>(panels + first * size, tile_weight, step, count, ahead, s);
        };
        one_tile<kQuadVectors>(0, V, tile);
        partial += kQuadColumns * V * kLanes;
      }
    }
  }
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
