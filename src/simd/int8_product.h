// Blocks of products of int8 over the words of int8.h: rows times panels, and few rows times a weight as it lies.
#pragma once

#include "simd/int8.h"
#include "simd/tile.h"
#include "simd/transpose.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

inline int64_t group_count(int64_t n) { return (n + kGroup - 1) / kGroup; }

// A row of int8 as a left factor; whole groups are written.
inline void load_int8_left(const int8_t* from, int64_t n, Int8Left* to) {
  for (int64_t k = 0; k < n; ++k) {
    to[k] = static_cast<Int8Left>(from[k] + kInt8Shift);
  }
  for (int64_t k = n; k < group_count(n) * kGroup; ++k) {
    to[k] = 0;
  }
}

constexpr int64_t kInt8Step = 256;  // inner indices of a panel: it stays in the first cache
constexpr int64_t kInt8PanelSize = kInt8Step * kInt8Panel;

// Columns [0, columns) of a weight, n <= kInt8Step inner indices, as [groups][vectors * kLanes][kGroup]; 0 beyond both.
// One of the strides is 1. `rows` has the size of the panel.
inline void load_int8_panel(const int8_t* from, int64_t column, int64_t inner, int64_t columns, int64_t n,
                            Int8Right* rows, Int8Right* panel) {
  const int64_t width = (columns + kLanes - 1) / kLanes * kLanes;
  const int64_t whole = group_count(n) * kGroup;
  if (inner != 1) {
    memset(panel, 0, static_cast<size_t>(whole * width) * sizeof(Int8Right));
    for (int64_t k = 0; k < n; ++k) {
      const int8_t* row = from + k * inner;
      Int8Right* to = panel + k / kGroup * width * kGroup + k % kGroup;
      for (int64_t c = 0; c < columns; ++c) {
        to[c * kGroup] = row[c * column];
      }
    }
    return;
  }
  // Widened in the order of memory, then turned group by group: a group has the size of a float.
  for (int64_t c = 0; c < columns; ++c) {
    Int8Right* to = rows + c * kInt8Step;
    for (int64_t k = 0; k < n; ++k) {
      to[k] = from[c * column + k];
    }
    for (int64_t k = n; k < whole; ++k) {
      to[k] = 0;
    }
  }
  if (columns < width) {
    memset(rows + columns * kInt8Step, 0, static_cast<size_t>((width - columns) * kInt8Step) * sizeof(Int8Right));
  }
  transpose(reinterpret_cast<const float*>(rows), kInt8Step / kGroup, width, whole / kGroup,
            reinterpret_cast<float*>(panel), width);
}

// sums[r][c] (+)= left_r . panel_c over n groups; the rows of the left factor lie `row` elements apart.
template <int R, int V>
inline void add_int8_product(const Int8Left* left, int64_t row, const Int8Right* panel, int64_t n, bool first,
                             const I32* less, int32_t* sums) {
  I32 t[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      t[r][v] = first ? integer_zero() : load(sums + r * kInt8Panel + v * kLanes);
      t[r][v] = kInt8Shift != 0 ? t[r][v] - less[v] : t[r][v];
    }
  }
  for (int64_t k = 0; k < n; ++k) {
    I32 columns[V];
    for (int v = 0; v < V; ++v) {
      columns[v] = load_group(panel + v * kLanes * kGroup);
    }
    for (int r = 0; r < R; ++r) {
      const I32 x = set1_group(left + r * row);
      for (int v = 0; v < V; ++v) {
        t[r][v] = add_groups(t[r][v], x, columns[v]);
      }
    }
    left += kGroup;
    panel += V * kLanes * kGroup;
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      store(sums + r * kInt8Panel + v * kLanes, t[r][v]);
    }
  }
}

// Rows of a weight that come next: they lie too far apart for the hardware to see them coming.
struct Ahead {
  const int8_t* from;
  int64_t step, count, bytes;
  void ask(int64_t begin, int64_t end) const {
    for (int64_t c = begin; c < end && c < count; ++c) {
      for (int64_t b = 0; b < bytes; b += 64) {
        prefetch(from + c * step + b);
      }
    }
  }
};

// All rows times a panel of V vectors. Every tile asks for its share of what comes next.
template <int V>
inline void add_int8_rows(const Int8Left* left, int64_t row, int64_t rows, const Int8Right* panel, int64_t n,
                          bool first, int32_t* sums, const Ahead& ahead) {
  I32 less[V];  // what the shift of the left factor adds
  for (int v = 0; v < V && kInt8Shift != 0; ++v) {
    const uint8_t shift[4] = {kInt8Shift & 255, kInt8Shift & 255, kInt8Shift & 255, kInt8Shift & 255};
    less[v] = integer_zero();
    for (int64_t k = 0; k < n; ++k) {
      less[v] = add_groups(less[v], set1_group(shift), load_group(panel + (k * V + v) * kLanes * kGroup));
    }
  }
  const int64_t tiles = (rows + kInt8Rows - 1) / kInt8Rows;
  const int64_t share = (ahead.count + tiles - 1) / tiles;
  const auto tile = [&](int64_t r, auto size) {
    ahead.ask(r / kInt8Rows * share, (r / kInt8Rows + 1) * share);
    add_int8_product<decltype(size)::value, V>(left + r * row, row, panel, n, first, less, sums + r * kInt8Panel);
  };
  int64_t r = 0;
  for (; r + kInt8Rows <= rows; r += kInt8Rows) {
    tile(r, TileRows<kInt8Rows>{});
  }
  one_tile<kInt8Rows - 1>(r, rows - r, tile);
}

template <int V>
[[gnu::always_inline]] inline void with_vectors(int64_t columns, const Int8Left* left, int64_t row, int64_t rows,
                                                const Int8Right* panel, int64_t n, bool first, int32_t* sums,
                                                const Ahead& ahead) {
  if constexpr (V > 1) {
    if (columns <= (V - 1) * kLanes) {
      with_vectors<V - 1>(columns, left, row, rows, panel, n, first, sums, ahead);
      return;
    }
  }
  add_int8_rows<V>(left, row, rows, panel, n, first, sums, ahead);
}

// Few rows take the weight as it streams in, along its rows: turning a panel for them would take longer than memory
// does.
constexpr int kInt8Few = 4;

inline int32_t sum_lanes(I32 a) {
  int32_t lane[kLanes];
  store(lane, a);
  int32_t total = 0;
  for (int i = 0; i < kLanes; ++i) {
    total += lane[i];
  }
  return total;
}

// sums[r * kInt8Panel + c * far] = left_r . weight_c over n inner indices; rows of the weight lie `step` apart. Rows of
// the left factor may be read to the end of a vector.
template <int R, int C>
inline void dot_int8_columns(const Int8Left* left, int64_t row, const int8_t* weight, int64_t step, int64_t n,
                             int32_t* sums, int64_t far) {
  const uint8_t shift[4] = {kInt8Shift & 255, kInt8Shift & 255, kInt8Shift & 255, kInt8Shift & 255};
  I32 t[R][C];
  I32 less[C];
  for (int c = 0; c < C; ++c) {
    less[c] = integer_zero();
    for (int r = 0; r < R; ++r) {
      t[r][c] = integer_zero();
    }
  }
  const auto add = [&](int c, I32 b, int64_t k) {
    less[c] = kInt8Shift != 0 ? add_groups(less[c], set1_group(shift), b) : less[c];
    for (int r = 0; r < R; ++r) {
      t[r][c] = add_groups(t[r][c], load_group(left + r * row + k), b);
    }
  };
  constexpr int64_t kVector = kLanes * kGroup;
  int64_t k = 0;
  for (; k + kVector <= n; k += kVector) {
    for (int c = 0; c < C; ++c) {
      add(c, load_widened(weight + c * step + k), k);
    }
  }
  // The rest with zeros behind it; what the left factor has there does not matter. A plain loop will not do: g++ 12
  // makes a wrong vpdpbusd of it.
  for (int c = 0; c < C && k < n; ++c) {
    int8_t rest[kVector] = {};
    memcpy(rest, weight + c * step + k, static_cast<size_t>(n - k));
    add(c, load_widened(rest), k);
  }
  for (int c = 0; c < C; ++c) {
    for (int r = 0; r < R; ++r) {
      sums[r * kInt8Panel + c * far] = sum_lanes(t[r][c] - less[c]);
    }
  }
}

// Columns from distant parts of the panel at a time, as many as registers allow: memory is read faster along several
// streams if they do not share a page.
template <int R>
inline void dot_int8_rows(const Int8Left* left, int64_t row, const int8_t* weight, int64_t column, int64_t columns,
                          int64_t n, int32_t* sums) {
  constexpr int kStreams = R <= 2 ? 4 : 2;
  const int64_t far = columns / kStreams;
  for (int64_t c = 0; c < far; ++c) {
    dot_int8_columns<R, kStreams>(left, row, weight + c * column, far * column, n, sums + c, far);
  }
  for (int64_t c = far * kStreams; c < columns; ++c) {
    dot_int8_columns<R, 1>(left, row, weight + c * column, column, n, sums + c, 1);
  }
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
