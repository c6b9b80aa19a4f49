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
using grouped_matmul::kOuterLeft;
using grouped_matmul::kOuterRight;
using grouped_matmul::OuterBlock;

constexpr int64_t kZipInner = 512;  // of a block of weights: a panel of it fills a first cache
constexpr int64_t kZipTerms = 256;  // rows of a chain of outer products
constexpr int64_t kZipLine = 64 / static_cast<int64_t>(sizeof(bf16));
constexpr int64_t kZipAhead = 16;  // rows of a weight; the hardware does not foresee the next page

// 6 x 4 accumulators + 4 vectors of the panel + 1 of the left factor = 29 of 32 registers, 10 loads for 24 products.
constexpr int kZipRows = 6, kZipVectors = 4;
constexpr int64_t kZipPanel = kZipVectors * kLanes;

constexpr int64_t kZipRoom = kBlockColumns * kZipInner / 2;
constexpr int64_t kZipLeft = 96;                                          // of a block of the left factor: 16 tiles
constexpr int64_t kZipSums = (kOuterLeft + kOuterRight) * kZipTerms / 2;  // where they begin
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

// Pair (r, k) of the left factor stands at pair(r, k); those behind the last of `pairs` at tail + 2 r, if there are
// any. store(r, v, sums) for all R rows of a panel.
template <int R, class Pair, class Store>
TIDEGATE_INLINE void zip_tile(Pair pair, const bf16* panel, int64_t pairs, const bf16* tail, Store store) {
  F32 t[R][kZipVectors];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kZipVectors; ++v) {
      t[r][v] = zero();
    }
  }
  const auto add = [&](auto factor_at) __attribute__((always_inline)) {
    Bf16Pairs right[kZipVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kZipVectors; ++v) {
      right[v] = load_pairs(panel + 2 * v * kLanes);
    }
    panel += 2 * kZipPanel;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Bf16Pairs factor = set1_pair(factor_at(r));
#pragma GCC unroll 8
      for (int v = 0; v < kZipVectors; ++v) {
        t[r][v] = dot(t[r][v], factor, right[v]);
      }
    }
  };
  for (int64_t k = 0; k < pairs; ++k) {
    add([&](int r) __attribute__((always_inline)) { return pair(r, k); });
  }
  if (tail != nullptr) {
    add([&](int r) __attribute__((always_inline)) { return tail + 2 * r; });
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
  const auto* const* rows = reinterpret_cast<const bf16* const*>(b.rows);
  bf16* panels = reinterpret_cast<bf16*>(b.room);
  for (int64_t first = 0; first < b.inner || first == 0; first += kZipInner) {
    const int64_t n = b.inner - first < kZipInner ? b.inner - first : kZipInner;
    const bf16* weight = static_cast<const bf16*>(b.weight) + first * b.weight_inner;
    if (!b.same_weight || b.inner > kZipInner) {
      zip_panels(
          [&](int64_t k) {
            const bf16* row = weight + k * b.weight_inner;
            for (int64_t c = 0; c < b.columns; c += kZipLine) {
              prefetch_far(row + kZipAhead * b.weight_inner + c);
            }
            return row;
          },
          n, b.columns, panels);
    }
    const int64_t pairs = (n + 1) / 2;
    const bool fresh = first == 0 && !b.accumulate;
    for (int64_t c = 0; c < b.columns; c += kZipPanel) {
      for_zip_tiles(b.row_count, [&](int64_t r, auto size) {
        constexpr int R = decltype(size)::value;
        const bf16* row[R];
        bf16 tail[R][2];  // with a zero behind the last element
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i) {
          row[i] = rows[r + i] + first;
          if (c == 0 && r + R + i < b.row_count) {  // rows lie anywhere: the next tile's are asked for
            for (int64_t k = 0; k < n; k += kZipLine) {
              prefetch_far(rows[r + R + i] + first + k);
            }
          }
          if (n % 2 != 0) {
            memset(tail[i], 0, sizeof tail[i]);
            memcpy(tail[i], row[i] + n - 1, sizeof(bf16));
          }
        }
        zip_tile<R>(
            [&](int i, int64_t k) __attribute__((always_inline)) { return row[i] + 2 * k; }, panels + 2 * c * pairs,
            n / 2, n % 2 != 0 ? tail[0] : nullptr,
            [&](int i, int v, F32 sum) {
              float* to = b.out + (r + i) * b.pitch + c + v * kLanes;
              const int64_t left = b.columns - c - v * kLanes;
              store_part(to, fresh ? sum : load_part(to, left) + sum, left);
            });
      });
    }
  }
}

// Rows as left factors of outer products: blocks of [pairs of rows][kZipLeft].
inline void zip_left(const OuterBlock& b, int64_t first, int64_t n, bf16* to) {
  for (int64_t k = 0; k < n; k += 2) {
    const bf16* even = static_cast<const bf16*>(b.left[first + k]) + b.left_first;
    const bf16* odd = k + 1 < n ? static_cast<const bf16*>(b.left[first + k + 1]) + b.left_first : nullptr;
    for (int64_t m = 0; m < b.left_count; m += kLanes) {
      bf16* block = to + m / kZipLeft * kZipLeft * kZipTerms;
      store_pairs(block + k * kZipLeft + 2 * (m % kZipLeft), zip_rows(even, odd, m, b.left_count));
    }
  }
}

// Where a tile of sums goes after the last term.
template <class T>
TIDEGATE_INLINE void put_sums(const OuterBlock& b, int64_t m, int64_t c, F32 total) {
  T* to = static_cast<T*>(b.out) + m * b.out_row + c;
  const int64_t rest = b.right_count - c;
  if (b.stream && rest >= kLanes) {
    stream(to, total);
  } else {
    store_part(to, b.accumulate ? load_part(to, rest) + total : total, rest);
  }
}

inline void zip_outer(const OuterBlock& b) {
  bf16* left = reinterpret_cast<bf16*>(b.room);
  bf16* panels = left + kOuterLeft * kZipTerms;
  float* sums = b.room + kZipSums;
  for (int64_t first = 0; first < b.rows || first == 0; first += kZipTerms) {
    const int64_t n = b.rows - first < kZipTerms ? b.rows - first : kZipTerms;
    const int64_t pairs = (n + 1) / 2;
    const bool ends = first + n >= b.rows;
    zip_left(b, first, n, left);
    zip_panels([&](int64_t k) { return static_cast<const bf16*>(b.right[first + k]) + b.right_first; }, n,
               b.right_count, panels);
    with_type(b.out_type, [&]<class T>(T*) {
      for (int64_t c = 0; c < b.right_count; c += kZipPanel) {
        for (int64_t block = 0; block < b.left_count; block += kZipLeft) {
          const int64_t rows = b.left_count - block < kZipLeft ? b.left_count - block : kZipLeft;
          for_zip_tiles(rows, [&](int64_t m, auto size) {
            const bf16* from = left + block * kZipTerms + 2 * m;
            zip_tile<decltype(size)::value>(
                [&](int i, int64_t k) __attribute__((always_inline)) { return from + 2 * (k * kZipLeft + i); },
                panels + 2 * c * pairs, pairs, nullptr,
                [&](int i, int v, F32 sum) {
                  const int64_t row = block + m + i, column = c + v * kLanes;
                  float* at = sums + row * kOuterRight + column;
                  const F32 total = first != 0 ? load(at) + sum : sum;
                  if (ends) {
                    put_sums<T>(b, row, column, total);
                  } else {
                    store(at, total);
                  }
                });
          });
        }
      }
    });
  }
  if (b.stream) {
    stream_fence();
  }
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
