// Rows of int8 times weights as they stand, with the dot product of four bytes. Rows, which are fewer, are packed: a
// vector takes sixteen inner indices of four rows (a quad), so its lanes are four partial sums of each; a weight's
// sixteen are broadcast to the four.
//
// The instruction wants one factor without sign, so rows are shifted by 128. One row of zeros more, which is 128 then,
// gives what the shift adds to the sums of the others. Integer sums are exact: no order of theirs can be seen.
#pragma once

#include "simd/int8_product.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

constexpr int64_t kQuadBytes = 16;  // inner indices of a vector
constexpr int64_t kLineBytes = 64;
// 8 x 3 sums + 3 vectors of rows + 1 of a weight = 28 of 32 registers.
constexpr int kQuadColumns = 8, kQuadVectors = 3;
static_assert(kInt8Panel % kQuadColumns == 0);

constexpr int64_t quad_size(int64_t width) { return (width + kQuadBytes - 1) / kQuadBytes * 4 * kQuadBytes; }
// Quads of so many rows and the row of zeros.
constexpr int64_t quad_count(int64_t rows) { return (rows + 1 + 3) / 4; }

// All rows and the zeros, a quad after the other. What stands beyond the width meets zeros of the weight.
inline void pack_int8_quads(const int8_t* const* rows, int64_t row_count, int64_t width, uint8_t* to) {
  const int8_t zeros[kQuadBytes] = {};
  for (int64_t q = 0; q < quad_count(row_count); ++q) {
    const int8_t* row[4];
    int64_t move[4];
    for (int64_t r = 0; r < 4; ++r) {
      const bool real = 4 * q + r < row_count;
      row[r] = real ? rows[4 * q + r] : zeros;
      move[r] = real ? 1 : 0;
    }
    int64_t i = 0;
    for (; i + kQuadBytes <= width; i += kQuadBytes, to += 4 * kQuadBytes) {
      store_shifted_quad(to, row[0] + i * move[0], row[1] + i * move[1], row[2] + i * move[2], row[3] + i * move[3]);
    }
    if (i < width) {
      int8_t rest[4][kQuadBytes] = {};
      for (int64_t r = 0; r < 4; ++r) {
        memcpy(rest[r], row[r] + i * move[r], static_cast<size_t>(width - i));
      }
      store_shifted_quad(to, rest[0], rest[1], rest[2], rest[3]);
      to += 4 * kQuadBytes;
    }
  }
}

// What is asked for line by line as a tile goes on; `next`: bytes from its weight to that of the next tile. A tile that
// is alone with its columns asks for them kNearBytes ahead, beyond their ends for the next tile's. Of several that
// share columns each takes longer than memory does, and asks for columns [first, last) of the next ones.
constexpr int64_t kNearBytes = 1024;
struct QuadsAhead {
  int64_t next;
  bool near;
  int64_t first, last;
};

// sums[r * kInt8Panel + c] of 4 V rows and 8 columns; columns that are missing repeat the last one.
template <int V>
inline void int8_quad_tile(const uint8_t* quads, int64_t size, const int8_t* weight, int64_t step, int64_t columns,
                           int64_t n, const QuadsAhead& ahead, int32_t* sums) {
  const int8_t* w[kQuadColumns];
  I32 t[kQuadColumns][V];
#pragma GCC unroll 8
  for (int c = 0; c < kQuadColumns; ++c) {
    w[c] = weight + (c < columns ? c : columns - 1) * step;
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      t[c][v] = integer_zero();
    }
  }
  const auto add = [&](int64_t i) __attribute__((always_inline)) {
    I32 x[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      x[v] = load_group(quads + v * size + 4 * i);
    }
#pragma GCC unroll 8
    for (int c = 0; c < kQuadColumns; ++c) {
      const I32 factor = set1_quad(w[c] + i);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        t[c][v] = add_groups(t[c][v], x[v], factor);
      }
    }
  };
  int64_t i = 0;
  for (; i + kLineBytes <= n; i += kLineBytes) {
    if (ahead.near) {
      const int64_t at = i + kNearBytes < n ? i + kNearBytes : ahead.next + i + kNearBytes - n;
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
    add(i + kQuadBytes);
    add(i + 2 * kQuadBytes);
    add(i + 3 * kQuadBytes);
  }
  for (; i + kQuadBytes <= n; i += kQuadBytes) {
    add(i);
  }
  if (i < n) {  // with zeros behind it
    int8_t rest[kQuadColumns][kQuadBytes] = {};
#pragma GCC unroll 8
    for (int c = 0; c < kQuadColumns; ++c) {
      memcpy(rest[c], w[c] + i, static_cast<size_t>(n - i));
      w[c] = rest[c];
    }
    quads += 4 * i;
    add(0);
  }
#pragma GCC unroll 8
  for (int c = 0; c < kQuadColumns; c += 4) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      store_quarters(sums + 4 * v * kInt8Panel + c, kInt8Panel,
                     sum_quads(t[c][v], t[c + 1][v], t[c + 2][v], t[c + 3][v]));
    }
  }
}

// sums[r][c] of all rows, and of the zeros behind them, with up to kInt8Panel columns. next: the weight after these.
inline void int8_quad_sums(const uint8_t* quads, int64_t row_count, const int8_t* weight, int64_t step, int64_t columns,
                           int64_t width, const int8_t* next, int32_t* sums) {
  const int64_t size = quad_size(width);
  const int64_t all = quad_count(row_count);
  const int64_t groups = (all + kQuadVectors - 1) / kQuadVectors;
  for (int64_t c = 0; c < columns; c += kQuadColumns) {
    const int64_t rest = columns - c - kQuadColumns;
    const int8_t* tile_weight = weight + c * step;
    const int64_t later = rest > 0 ? kQuadColumns * step : next - tile_weight;
    const int64_t asked = rest > 0 && rest < kQuadColumns ? rest : kQuadColumns;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = all * g / groups;
      const QuadsAhead ahead = {later, groups == 1 && width >= kNearBytes, asked * g / groups,
                                asked * (g + 1) / groups};
      const auto tile = [&](int64_t, auto vectors) {
        int8_quad_tile<decltype(vectors)::value>(quads + first * size, size, tile_weight, step, columns - c, width,
                                                 ahead, sums + 4 * first * kInt8Panel + c);
      };
      one_tile<kQuadVectors>(0, all * (g + 1) / groups - first, tile);
    }
  }
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
