// Rows times weights whose inner index runs along memory, straight from where both stand: for few rows, where packing
// weights would cost more than multiplying by them.
//
// The order of every sum, here and in chains.kernel.h: stretches of kStretch inner indices, added up in their order; in
// a stretch lane l takes the elements l, l + kLanes, ... (bf16 times bf16: the pairs l, l + kLanes, ...), and the lanes
// are added as sum() does. Both files give the same bits for any number of rows.
#pragma once

#include "simd/panels.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

constexpr int64_t kStretch = 256;  // a panel of so many rows stays in the first cache
constexpr int64_t kEarly = 1024;   // elements of a weight between what is asked for and what is multiplied

// Accumulators, both vectors of every row and one weight fill the register file.
#if TIDEGATE_ISA_ID == 1
constexpr int kDotRows = 2, kDotColumns = 2;
#else
constexpr int kDotRows = 2, kDotColumns = 4;
#endif

// The two vectors of a group of 2 kLanes elements; of pairs if both factors are bf16.
template <class T>
TIDEGATE_INLINE F32x2 load_group(const T* p, const void*) {
  return {load(p), load(p + kLanes)};
}
TIDEGATE_INLINE F32x2 load_group(const bf16* p, const bf16*) { return load2(p); }

template <int R, int C>
struct Dots {
  F32 v[R][C];
};

template <int R, int C, class X, class W>
TIDEGATE_INLINE void add_group(Dots<R, C>& t, const X* const* x, const W* const* w, int64_t i) {
  F32x2 rows[R];
  for (int r = 0; r < R; ++r) {
    rows[r] = load_group(x[r] + i, w[0]);
  }
  for (int c = 0; c < C; ++c) {
    const F32x2 column = load_group(w[c] + i, x[0]);
    for (int r = 0; r < R; ++r) {
      t.v[r][c] = fma(rows[r].b, column.b, t.v[r][c]);
    }
    for (int r = 0; r < R; ++r) {
      t.v[r][c] = fma(rows[r].a, column.a, t.v[r][c]);
    }
  }
}

// Weights that are multiplied later, `offset` elements behind these (0: none). The tiles of a column share the asking,
// a cache line each in turn: one tile alone would wait for memory and leave it idle under the others.
struct Early {
  int64_t offset, turn, turns;
};

// out[r * pitch + c * far] = or += <x_r, w_c> over a stretch of n elements from `begin` on
template <int R, int C, class X, class W>
inline void dot_tile(const X* const* x, const W* const* w, int64_t begin, int64_t n, Early early, float* out,
                     int64_t pitch, int64_t far, bool fresh) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(W));
  const int64_t end = begin + n;
  int64_t ask = early.offset != 0 ? begin + early.turn * kLine : end;
  Dots<R, C> t;
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      t.v[r][c] = zero();
    }
  }
  int64_t i = begin;
  for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
    if (i >= ask) {
      for (int c = 0; c < C; ++c) {
        prefetch(w[c] + early.offset + ask);
      }
      ask += early.turns * kLine;
    }
    add_group(t, x, w, i);
  }
  for_lanes(end - i, [&](int64_t k, auto lanes) {
    for (int c = 0; c < C; ++c) {
      const F32 column = lanes.get(w[c] + i + k);
      for (int r = 0; r < R; ++r) {
        t.v[r][c] = fma(lanes.get(x[r] + i + k), column, t.v[r][c]);
      }
    }
  });
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      float& to = out[r * pitch + c * far];
      to = fresh ? sum(t.v[r][c]) : to + sum(t.v[r][c]);
    }
  }
}

// C columns, `far` apart; a stretch of them stays in the first cache while the rows pass by.
template <int C, class X, class W>
inline void dot_columns(const X* const* x, int64_t rows, const W* weight, int64_t step, int64_t far, int64_t n,
                        float* out, int64_t pitch, bool accumulate) {
  const W* w[C];
  for (int c = 0; c < C; ++c) {
    w[c] = weight + c * far * step;
  }
  const int64_t turns = (rows + kDotRows - 1) / kDotRows;
  for (int64_t begin = 0; begin < n || begin == 0; begin += kStretch) {
    const int64_t count = n - begin < kStretch ? n - begin : kStretch;
    const int64_t offset = begin + kEarly < n ? kEarly : kEarly - n + step;
    for (int64_t r = 0; r < rows; r += kDotRows) {
      const auto tile = [&](int64_t, auto size) {
        dot_tile<decltype(size)::value, C>(x + r, w, begin, count, {offset, r / kDotRows, turns}, out + r * pitch,
                                           pitch, far, begin == 0 && !accumulate);
      };
      one_tile<kDotRows>(r, rows - r < kDotRows ? rows - r : kDotRows, tile);
    }
  }
}

// The columns of a tile come from kDotColumns parts of the block: streams that share a page are read from memory at
// half the rate.
template <class X, class W>
void dot_block(const X* const* x, int64_t rows, const W* weight, int64_t step, int64_t columns, int64_t n, float* out,
               int64_t pitch, bool accumulate) {
  const int64_t far = columns / kDotColumns;
  for (int64_t c = 0; c < far; ++c) {
    dot_columns<kDotColumns>(x, rows, weight + c * step, step, far, n, out + c, pitch, accumulate);
  }
  for (int64_t c = far * kDotColumns; c < columns; ++c) {
    dot_columns<1>(x, rows, weight + c * step, step, 1, n, out + c, pitch, accumulate);
  }
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
