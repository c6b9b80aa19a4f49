// Products of small matrices, kept in registers: a tile of R rows by kPanel columns.
//
// The right factor lies in panels: kPanel columns wide, row after row without gaps, so that one panel stays in the
// first cache while the rows of the left factor pass by. Every element of a result is one chain of fused
// multiply-adds in the order of the inner index. Its bits do not depend on which tile it stood in.
#pragma once

#include "simd/simd.h"

namespace tidegate::TIDEGATE_ISA {

// Accumulators + one row of the panel + one broadcast fill the register file: 12 + 2 + 1 of 16, 16 + 2 + 1 of 32.
#if TIDEGATE_ISA_ID == 1
constexpr int kTileRows = 2, kTileVectors = 1;
#elif TIDEGATE_ISA_ID == 2
constexpr int kTileRows = 6, kTileVectors = 2;
#else
constexpr int kTileRows = 8, kTileVectors = 2;
#endif
constexpr int kPanel = kTileVectors * kLanes;

namespace {

template <int R>
struct Tile {
  F32 v[R][kTileVectors];
};

// The left factor: element (r, k) stands at data[r * row + k * step].
struct Left {
  const float* data;
  int64_t row, step;
};

template <int R>
[[gnu::always_inline]] inline void clear(Tile<R>& t) {
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < kTileVectors; ++c) {
      t.v[r][c] = zero();
    }
  }
}

// t += a b over n inner steps; b is a panel of n rows.
template <int R>
[[gnu::always_inline]] inline void add_product(Tile<R>& t, Left a, const float* b, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    F32 row[kTileVectors];
    for (int c = 0; c < kTileVectors; ++c) {
      row[c] = load(b + c * kLanes);
    }
    for (int r = 0; r < R; ++r) {
      const F32 x = set1(a.data[r * a.row]);
      for (int c = 0; c < kTileVectors; ++c) {
        t.v[r][c] = fma(x, row[c], t.v[r][c]);
      }
    }
    a.data += a.step;
    b += kPanel;
  }
}

// The same with bf16 factors, two inner steps at a time: element pair (r, k) of the left one stands at
// data[2 * (r * row + k * step)], and a row of b holds kPanel pairs. n counts pairs.
struct LeftPairs {
  const bf16* data;
  int64_t row, step;
};
template <int R>
[[gnu::always_inline]] inline void add_product(Tile<R>& t, LeftPairs a, const bf16* b, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    Bf16Pairs row[kTileVectors];
    for (int c = 0; c < kTileVectors; ++c) {
      row[c] = load_pairs(b + 2 * c * kLanes);
    }
    for (int r = 0; r < R; ++r) {
      const Bf16Pairs x = set1_pair(a.data + 2 * r * a.row);
      for (int c = 0; c < kTileVectors; ++c) {
        t.v[r][c] = dot(t.v[r][c], x, row[c]);
      }
    }
    a.data += 2 * a.step;
    b += 2 * kPanel;
  }
}

// t[r] = factor[r] * t[r]
template <int R>
[[gnu::always_inline]] inline void scale_rows(Tile<R>& t, const float* factor) {
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < kTileVectors; ++c) {
      t.v[r][c] = set1(factor[r]) * t.v[r][c];
    }
  }
}

template <int R>
[[gnu::always_inline]] inline void load_tile(Tile<R>& t, const float* panel) {
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < kTileVectors; ++c) {
      t.v[r][c] = load(panel + r * kPanel + c * kLanes);
    }
  }
}

// t += what stands in a panel, or in any matrix with `pitch` elements from row to row.
template <int R>
[[gnu::always_inline]] inline void add_tile(Tile<R>& t, const float* from, int64_t pitch = kPanel) {
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < kTileVectors; ++c) {
      t.v[r][c] = load(from + r * pitch + c * kLanes) + t.v[r][c];
    }
  }
}

// Rows of a panel, or of any matrix with `pitch` elements from row to row.
template <int R>
[[gnu::always_inline]] inline void store_tile(const Tile<R>& t, float* to, int64_t pitch = kPanel) {
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < kTileVectors; ++c) {
      store(to + r * pitch + c * kLanes, t.v[r][c]);
    }
  }
}

// Long sums of products have two levels: this many terms in one chain, then the chains.
constexpr int64_t kTerms = 64;

// t = a b over n inner steps, chains of kTerms; `room` has place for the tile in between.
template <int R>
[[gnu::always_inline]] inline void long_product(Tile<R>& t, Left a, const float* b, int64_t n, float* room,
                                                int64_t pitch = kPanel) {
  clear(t);
  add_product(t, a, b, n < kTerms ? n : kTerms);
  for (int64_t k = kTerms; k < n; k += kTerms) {
    store_tile(t, room, pitch);
    clear(t);
    add_product(t, Left{a.data + k * a.step, a.row, a.step}, b + k * kPanel, n - k < kTerms ? n - k : kTerms);
    add_tile(t, room, pitch);
  }
}

// The number of rows of a tile as a type, so that a generic lambda can use it as a constant.
template <int R>
struct TileRows {
  static constexpr int value = R;
};

template <int R, class Body>
[[gnu::always_inline]] inline void one_tile(int64_t first, int64_t rows, Body& body) {
  if constexpr (R > 0) {
    if (rows == R) {
      body(first, TileRows<R>{});
    } else {
      one_tile<R - 1>(first, rows, body);
    }
  }
}

// body(first row, TileRows<R>) for tiles that cover the rows [first, last). What is left at the end, between one tile
// and two, goes in two tiles of about the same size: a tile of one or two rows would wait for its own results. Tiles
// begin an even number of rows after the first.
template <class Body>
[[gnu::always_inline]] inline void for_tiles(int64_t first, int64_t last, Body body) {
  for (; last - first >= 2 * kTileRows || last - first == kTileRows; first += kTileRows) {
    body(first, TileRows<kTileRows>{});
  }
  if (last - first > kTileRows) {
    const int64_t half = (last - first + 3) / 4 * 2;
    one_tile<kTileRows>(first, half, body);
    first += half;
  }
  one_tile<kTileRows>(first, last - first, body);
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
