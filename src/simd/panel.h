// Between matrices of any element type and the panels that tile.h multiplies with.
#pragma once

#include "simd/tile.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

// Columns [c0, c0 + kPanel) of rows to a panel; columns beyond `width` are 0.
template <class T>
inline void load_panel(const T* from, int64_t step, int64_t rows, int64_t c0, int64_t width, float* panel) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int c = 0; c < kPanel; c += kLanes) {
      const int64_t n = width - c0 - c;
      const T* x = from + r * step + c0 + c;
      store(panel + r * kPanel + c, n >= kLanes ? load(x) : n > 0 ? load_n(x, n) : zero());
    }
  }
}

template <class T>
inline void store_panel(const float* panel, int64_t rows, int64_t c0, int64_t width, T* to, int64_t step) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int c = 0; c < kPanel; c += kLanes) {
      const int64_t n = width - c0 - c;
      T* y = to + r * step + c0 + c;
      const F32 x = load(panel + r * kPanel + c);
      if (n >= kLanes) {
        store(y, x);
      } else if (n > 0) {
        store_n(y, x, n);
      }
    }
  }
}

// The same past the caches, where every row is whole and on a cache line.
inline bool can_stream_panel(const float* to, int64_t step, int64_t c0, int64_t width) {
  return (reinterpret_cast<uintptr_t>(to + c0) | static_cast<uintptr_t>(step * 4)) % 64 == 0 && c0 + kPanel <= width;
}
inline void stream_panel(const float* panel, int64_t rows, int64_t c0, float* to, int64_t step) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int c = 0; c < kPanel; c += kLanes) {
      stream(to + r * step + c0 + c, load(panel + r * kPanel + c));
    }
  }
}

// to[c][r] = from[r][c]; columns of `to` from `rows` to `pitch` become 0.
inline void transpose(const float* from, int64_t from_pitch, int64_t rows, int64_t width, float* to, int64_t pitch) {
  for (int64_t c = 0; c < width; ++c) {
    for (int64_t r = 0; r < rows; ++r) {
      to[c * pitch + r] = from[r * from_pitch + c];
    }
    for (int64_t r = rows; r < pitch; ++r) {
      to[c * pitch + r] = 0.0f;
    }
  }
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
