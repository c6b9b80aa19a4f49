// Products with a lower triangle or its transpose, and the decays inside a chunk. A row never touches what lies across
// the diagonal: a product of zeros with the NaN of a later token would be NaN.
#pragma once

#include "simd/panels.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

// t += a b, where row r of the tile adds the inner steps 0 .. first + r only.
template <int R>
[[gnu::always_inline]] inline void add_lower_product(Tile<R>& t, Left a, const float* b, int64_t first) {
  add_product(t, a, b, first);
  for (int s = 0; s < R; ++s) {
    const int64_t k = first + s;
    for (int r = s; r < R; ++r) {
      const F32 x = set1(a.data[r * a.row + k * a.step]);
      for (int c = 0; c < kTileVectors; ++c) {
        t.v[r][c] = fma(x, load(b + k * kPanel + c * kLanes), t.v[r][c]);
      }
    }
  }
}

// t += a b, where row r of the tile adds the inner steps first + r .. n - 1 only: a is the transpose of a lower
// triangle.
template <int R>
[[gnu::always_inline]] inline void add_upper_product(Tile<R>& t, Left a, const float* b, int64_t first, int64_t n) {
  for (int s = 0; s < R; ++s) {
    const int64_t k = first + s;
    for (int r = 0; r <= s; ++r) {
      const F32 x = set1(a.data[r * a.row + k * a.step]);
      for (int c = 0; c < kTileVectors; ++c) {
        t.v[r][c] = fma(x, load(b + k * kPanel + c * kLanes), t.v[r][c]);
      }
    }
  }
  add_product(t, Left{a.data + (first + R) * a.step, a.row, a.step}, b + (first + R) * kPanel, n - first - R);
}

// Row r of the tile, from the first to the last, adds its factors a(r, s) times the finished rows s < r.
template <int R>
[[gnu::always_inline]] inline void substitute(Tile<R>& t, Left a) {
  for (int r = 1; r < R; ++r) {
    for (int s = 0; s < r; ++s) {
      const F32 x = set1(a.data[r * a.row + s * a.step]);
      for (int c = 0; c < kTileVectors; ++c) {
        t.v[r][c] = fma(x, t.v[s][c], t.v[r][c]);
      }
    }
  }
}

// out(i, j) = <rows_i, columns_j> for j <= i; what lies above the diagonal in the same panel is written and worthless.
// rows [count][width] packed, columns as panels of the transpose, out with `pitch` elements from row to row.
inline void lower_products(const float* rows, const float* columns, int64_t count, int64_t width, float* out,
                           int64_t pitch) {
  for (int64_t first = 0; first < count; first += kPanel, columns += width * kPanel) {
    for_tiles(first, count, [&](int64_t i, auto size) {
      float* to = out + i * pitch + first;
      Tile<decltype(size)::value> t;
      long_product(t, Left{rows + i * width, width, 1}, columns, width, to, pitch);
      store_tile(t, to, pitch);
    });
  }
}

// out[r] += <row r of the tile, row r of a panel>: fp32 in a panel, panels in fp64
template <int R>
[[gnu::always_inline]] inline void add_row_products(const Tile<R>& t, const float* panel, double* out) {
  for (int r = 0; r < R; ++r) {
    F32 total = zero();
    for (int c = 0; c < kTileVectors; ++c) {
      total = fma(t.v[r][c], load(panel + r * kPanel + c * kLanes), total);
    }
    out[r] += static_cast<double>(sum(total));
  }
}

// A gate of every token of a chunk as fp32.
inline void gather_gates(const TypedHeads& t, const ChunkSpan& c, int64_t head, float* out) {
  with_type(t.type, [&]<class T>(T*) {
    for (int64_t i = 0; i < c.length; ++i) {
      out[i] = widen(*at<const T>(t.at, c.row, c.begin + i, head));
    }
  });
}

// Gates of every token of a chunk to an fp32 tensor.
inline void scatter_gates(const double* from, const TypedHeads& t, const ChunkSpan& c, int64_t head) {
  for (int64_t i = 0; i < c.length; ++i) {
    *at<float>(t.at, c.row, c.begin + i, head) = static_cast<float>(from[i]);
  }
}

inline void exp_row(const float* x, int64_t n, float* out) {
  for_lanes(n, [&](int64_t c, auto lanes) { lanes.put(out + c, exp(lanes.get(x + c))); });
}

// out_j = factor e^(gc_i - gc_j) x_j for j < n; n <= i + 1, so that no exponent is positive where no gate is.
inline void decay_row(float factor, const float* gc, int64_t i, int64_t n, const float* x, float* out) {
  for_lanes(n, [&](int64_t j, auto lanes) {
    lanes.put(out + j, set1(factor) * exp(set1(gc[i]) - lanes.get(gc + j)) * lanes.get(x + j));
  });
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
