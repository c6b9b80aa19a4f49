// bf16 products whose inner index runs across memory: rows times weights that are neighbours along their columns, and
// sums of outer products. Two neighbours of the inner index are zipped into pairs for the dot product. Every result is
// one chain of pairs in their order, and such chains in theirs.
#pragma once

#include "ops/grouped_matmul/kernel.h"
#include "simd/panels.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using grouped_matmul::Block;
using grouped_matmul::kBlockColumns;
using grouped_matmul::kBlockRows;
using grouped_matmul::kOuterLeft;
using grouped_matmul::kOuterRight;
using grouped_matmul::OuterBlock;

constexpr int64_t kZipInner = 512;  // of a block of weights: a panel of it fills a first cache
constexpr int64_t kZipTerms = 256;  // rows of a chain of outer products
constexpr int64_t kZipAhead = 16;   // rows of a weight; the hardware does not foresee the next page

// 6 x 4 accumulators + 4 vectors of the panel + 1 of the left factor = 29 of 32 registers, 10 loads for 24 products.
constexpr int kZipRows = 6, kZipVectors = 4;
constexpr int64_t kZipPanel = kZipVectors * kLanes;

constexpr int64_t kZipRoom = (kBlockRows + kBlockColumns) * kZipInner / 2;
constexpr int64_t kZipSums = (2 * kOuterLeft + kOuterRight) * kZipTerms / 2;  // where they begin
constexpr int64_t kZipOuterRoom = kZipSums + kOuterLeft * kOuterRight;

// Two rows, columns [c, c + kLanes) of `width`, as pairs. A missing second row counts as 0.
TIDEGATE_INLINE Bf16Pairs zip_rows(const bf16* even, const bf16* odd, int64_t c, int64_t width) {
  return zip(load_part(even + c, width - c), odd != nullptr ? load_part(odd + c, width - c) : zero());
}

// Rows [0, n) of `columns` columns, row k at `at(k)`: panels of [pairs of rows][kZipPanel columns], 0 beyond both.
template <class At>
inline void zip_panels(At at, int64_t n, int64_t columns, bf16* panels) {
  const int64_t pairs = (n + 1) / 2;
  for (int64_t k = 0; k < n; k += 2) {
    const bf16 *even = at(k), *odd = k + 1 < n ? at(k + 1) : nullptr;
    for (int64_t c = 0; c < columns; c += kZipPanel) {
      bf16* to = panels + 2 * (c * pairs + k / 2 * kZipPanel);
      for (int v = 0; v < kZipPanel; v += kLanes) {
        store_pairs(to + 2 * v, zip_rows(even, odd, c + v, columns));
      }
    }
  }
}

// Pair (r, k) of the left factor stands at left[2 * (r * row + k * step)]; it is the sum of `parts` of them, the second
// kOuterLeft * kZipTerms elements on. store(r, v, sums) for all R rows of a panel.
template <int R, class Store>
TIDEGATE_INLINE void zip_tile(const bf16* left, int64_t row, int64_t step, int parts, const bf16* panel, int64_t pairs,
                              Store store) {
  F32 t[R][kZipVectors];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kZipVectors; ++v) {
      t[r][v] = zero();
    }
  }
  for (int part = 0; part < parts; ++part) {
    const bf16* from = left + part * kOuterLeft * kZipTerms;
    const bf16* along = panel;
    for (int64_t k = 0; k < pairs; ++k) {
      Bf16Pairs right[kZipVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kZipVectors; ++v) {
        right[v] = load_pairs(along + 2 * v * kLanes);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Bf16Pairs factor = set1_pair(from + 2 * r * row);
#pragma GCC unroll 8
        for (int v = 0; v < kZipVectors; ++v) {
          t[r][v] = dot(t[r][v], factor, right[v]);
        }
      }
      from += 2 * step;
      along += 2 * kZipPanel;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kZipVectors; ++v) {
      store(r, v, t[r][v]);
    }
  }
}

// body(first row, TileRows<R>) for even tiles of at most kZipRows rows.
template <class Body>
TIDEGATE_INLINE void for_zip_tiles(int64_t rows, Body body) {
  const int64_t tiles = (rows + kZipRows - 1) / kZipRows;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t r = rows * i / tiles;
    one_tile<kZipRows>(r, rows * (i + 1) / tiles - r, body);
  }
}

// out = or += rows times a weight with neighbouring columns.
inline void zip_block(const Block& b) {
  bf16* rows = reinterpret_cast<bf16*>(b.room);
  bf16* panels = rows + kBlockRows * kZipInner;
  for (int64_t first = 0; first < b.inner || first == 0; first += kZipInner) {
    const int64_t n = b.inner - first < kZipInner ? b.inner - first : kZipInner;
    for (int64_t r = 0; r < b.row_count; ++r) {
      memcpy(rows + r * kZipInner, static_cast<const bf16*>(b.rows[r]) + first, static_cast<size_t>(n) * sizeof(bf16));
      memset(rows + r * kZipInner + n, 0, static_cast<size_t>(n % 2) * sizeof(bf16));
    }
    const bf16* weight = static_cast<const bf16*>(b.weight) + first * b.weight_inner;
    zip_panels(
        [&](int64_t k) {
          const bf16* row = weight + k * b.weight_inner;
          for (int64_t c = 0; c < b.columns; c += 64 / static_cast<int64_t>(sizeof(bf16))) {
            prefetch_far(row + kZipAhead * b.weight_inner + c);
          }
          return row;
        },
        n, b.columns, panels);
    const int64_t pairs = (n + 1) / 2;
    const bool fresh = first == 0 && !b.accumulate;
    for (int64_t c = 0; c < b.columns; c += kZipPanel) {
      for_zip_tiles(b.row_count, [&](int64_t r, auto size) {
        zip_tile<decltype(size)::value>(rows + r * kZipInner, kZipInner / 2, 1, 1, panels + 2 * c * pairs, pairs,
                                        [&](int i, int v, F32 sum) {
                                          float* to = b.out + (r + i) * b.pitch + c + v * kLanes;
                                          const int64_t left = b.columns - c - v * kLanes;
                                          store_part(to, fresh ? sum : load_part(to, left) + sum, left);
                                        });
      });
    }
  }
}

// Rows as left factors of outer products: [pairs of rows][kOuterLeft]. Products with the factors of the rows are two
// bf16 numbers each, what is left after the first rounding in a second array: no bit that fp32 sums would see is lost.
inline void zip_left(const OuterBlock& b, int64_t first, int64_t n, bf16* to) {
  for (int64_t k = 0; k < n; k += 2, to += 2 * kOuterLeft) {
    const bf16* even = static_cast<const bf16*>(b.left[first + k]) + b.left_first;
    const bf16* odd = k + 1 < n ? static_cast<const bf16*>(b.left[first + k + 1]) + b.left_first : nullptr;
    for (int64_t m = 0; m < b.left_count; m += kLanes) {
      if (b.factors == nullptr) {
        store_pairs(to + 2 * m, zip_rows(even, odd, m, b.left_count));
        continue;
      }
      const F32 x = set1(b.factors[first + k]) * load_part(even + m, b.left_count - m);
      const F32 y = odd != nullptr ? set1(b.factors[first + k + 1]) * load_part(odd + m, b.left_count - m) : zero();
      const F32 high_x = round_to(x, even), high_y = round_to(y, even);
      store_pairs(to + 2 * m, zip(high_x, high_y));
      store_pairs(to + kOuterLeft * kZipTerms + 2 * m, zip(round_to(x - high_x, even), round_to(y - high_y, even)));
    }
  }
}

inline void zip_outer(const OuterBlock& b) {
  bf16* left = reinterpret_cast<bf16*>(b.room);
  bf16* panels = left + 2 * kOuterLeft * kZipTerms;
  float* sums = b.room + kZipSums;
  const int parts = b.factors != nullptr ? 2 : 1;
  for (int64_t first = 0; first < b.rows || first == 0; first += kZipTerms) {
    const int64_t n = b.rows - first < kZipTerms ? b.rows - first : kZipTerms;
    const int64_t pairs = (n + 1) / 2;
    const bool ends = first + n >= b.rows;
    zip_left(b, first, n, left);
    zip_panels([&](int64_t k) { return static_cast<const bf16*>(b.right[first + k]) + b.right_first; }, n,
               b.right_count, panels);
    with_type(b.out_type, [&]<class T>(T*) {
      for (int64_t c = 0; c < b.right_count; c += kZipPanel) {
        for_zip_tiles(b.left_count, [&](int64_t m, auto size) {
          zip_tile<decltype(size)::value>(left + 2 * m, 1, kOuterLeft, parts, panels + 2 * c * pairs, pairs,
                                          [&](int i, int v, F32 sum) {
                                            float* at = sums + (m + i) * kOuterRight + c + v * kLanes;
                                            const F32 total = first != 0 ? load(at) + sum : sum;
                                            if (!ends) {
                                              store(at, total);
                                              return;
                                            }
                                            T* to = static_cast<T*>(b.out) + (m + i) * b.out_row + c + v * kLanes;
                                            const int64_t rest = b.right_count - c - v * kLanes;
                                            store_part(to, b.accumulate ? load_part(to, rest) + total : total, rest);
                                          });
        });
      }
    });
  }
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
