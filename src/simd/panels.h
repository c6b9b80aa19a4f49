// Between tensors of any type and fp32 scratch memory: rows for the left factor of a product, panels for the right one
// and for results (see tile.h). What a panel holds beyond the last column is 0 when packed and dropped when unpacked.
#pragma once

#include "base/chunk_data.h"
#include "simd/lanes.h"
#include "simd/tile.h"
#include "simd/transpose.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

// Parts of one block of scratch memory, each on a cache line. Without a block it only counts.
struct Room {
  float* block;
  int64_t used = 0;
  float* take(int64_t n) {
    float* p = block == nullptr ? nullptr : block + used;
    used += (n + 15) / 16 * 16;
    return p;
  }
  double* take_doubles(int64_t n) { return reinterpret_cast<double*>(take(2 * n)); }
};

inline int64_t panel_count(int64_t columns) { return (columns + kPanel - 1) / kPanel; }
inline int64_t whole_panels(int64_t columns) { return panel_count(columns) * kPanel; }

// Rows of neighbouring elements, `pitch` elements apart.
struct Matrix {
  char* data;
  int64_t pitch;
  int type;
};
inline Matrix matrix_at(const TypedHeads& t, int64_t row, int64_t token, int64_t head, int64_t pitch) {
  const int64_t offset = row * t.at.row + token * t.at.token + head * t.at.head;
  return {static_cast<char*>(t.at.data) + offset * (t.type == 0 ? 4 : 2), pitch, t.type};
}
// One head of a chunk: a row is a token.
inline Matrix chunk_rows(const TypedHeads& t, const ChunkSpan& c, int64_t head) {
  return matrix_at(t, c.row, c.begin, head, t.at.token);
}

// f(null pointer to the element type)
template <class F>
[[gnu::always_inline]] inline void with_type(int type, F f) {
  if (type == 0) {
    f(static_cast<float*>(nullptr));
  } else if (type == 1) {
    f(static_cast<bf16*>(nullptr));
  } else {
    f(static_cast<f16*>(nullptr));
  }
}

// The first n elements, at most a vector of them; n may be negative.
template <class T>
TIDEGATE_INLINE F32 load_part(const T* p, int64_t n) {
  return n >= kLanes ? load(p) : n > 0 ? load_n(p, n) : zero();
}
template <class T>
TIDEGATE_INLINE void store_part(T* p, F32 a, int64_t n) {
  if (n >= kLanes) {
    store(p, a);
  } else if (n > 0) {
    store_n(p, a, n);
  }
}

// All columns of some rows, one row after the other without gaps.
inline void pack_rows(const Matrix& m, int64_t rows, int64_t columns, float* to) {
  with_type(m.type, [&]<class T>(T*) {
    for (int64_t r = 0; r < rows; ++r) {
      const T* from = reinterpret_cast<const T*>(m.data) + r * m.pitch;
      for_lanes(columns, [&](int64_t c, auto lanes) { lanes.put(to + r * columns + c, lanes.get(from + c)); });
    }
  });
}

inline void unpack_row(const float* from, const Matrix& m, int64_t row, int64_t columns) {
  with_type(m.type, [&]<class T>(T*) {
    T* to = reinterpret_cast<T*>(m.data) + row * m.pitch;
    for_lanes(columns, [&](int64_t c, auto lanes) { lanes.put(to + c, lanes.get(from + c)); });
  });
}

// Columns [c0, c0 + kPanel) of rows to a panel; columns beyond `width` are 0.
template <class T>
inline void load_panel(const T* from, int64_t step, int64_t rows, int64_t c0, int64_t width, float* panel) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int c = 0; c < kPanel; c += kLanes) {
      store(panel + r * kPanel + c, load_part(from + r * step + c0 + c, width - c0 - c));
    }
  }
}

template <class T>
inline void store_panel(const float* panel, int64_t rows, int64_t c0, int64_t width, T* to, int64_t step) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int c = 0; c < kPanel; c += kLanes) {
      store_part(to + r * step + c0 + c, load(panel + r * kPanel + c), width - c0 - c);
    }
  }
}

// True if the rows of a panel are whole and on cache lines, so that they may be written past the caches.
inline bool can_stream_panel(const float* to, int64_t step, int64_t c0, int64_t width) {
  return (reinterpret_cast<uintptr_t>(to + c0) | static_cast<uintptr_t>(step * 4)) % 64 == 0 && c0 + kPanel <= width;
}

// The panel that begins at column `first` of `columns`. Row r is multiplied by factor[r] if there are factors.
inline void pack_panel(const Matrix& m, int64_t rows, int64_t first, int64_t columns, const float* factor,
                       float* panel) {
  with_type(m.type,
            [&]<class T>(T*) { load_panel(reinterpret_cast<const T*>(m.data), m.pitch, rows, first, columns, panel); });
  for (int64_t r = 0; factor != nullptr && r < rows; ++r) {
    for (int c = 0; c < kPanel; c += kLanes) {
      store(panel + r * kPanel + c, set1(factor[r]) * load(panel + r * kPanel + c));
    }
  }
}

inline void unpack_panel(const float* panel, const Matrix& m, int64_t rows, int64_t first, int64_t columns) {
  with_type(m.type,
            [&]<class T>(T*) { store_panel(panel, rows, first, columns, reinterpret_cast<T*>(m.data), m.pitch); });
}

// Rows [count][width], `pitch` apart, to the panels of their transpose: panel p holds columns p kPanel .. of
// [width][count].
inline void transpose_panels(const float* rows, int64_t pitch, int64_t count, int64_t width, float* panels) {
  for (int64_t first = 0; first < count; first += kPanel, panels += width * kPanel) {
    const int64_t n = count - first < kPanel ? count - first : kPanel;
    transpose(rows + first * pitch, pitch, n, width, panels, kPanel);
    for (int64_t c = 0; c < width && n < kPanel; ++c) {
      memset(panels + c * kPanel + n, 0, static_cast<size_t>(kPanel - n) * sizeof(float));
    }
  }
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
