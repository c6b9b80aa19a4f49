// Rows of a matrix to panels of its transpose: panel[k][c] = row c, element k (see tile.h). What a panel holds beyond
// the last column is 0.
#pragma once

#include "simd/panels.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

constexpr int64_t kTurnedStep = 64;  // elements of a row that are turned at a time

#if TIDEGATE_ISA_ID == 2
// Sixteen rows of eight bf16, as words: the rows of one register half end up in neighbouring lanes, and a word under 16
// zero bits is a float. Which rows share a register is chosen so that the columns come out in their order.
TIDEGATE_INLINE void turn_words(const bf16* from, int64_t step, float* panel) {
  __m256i a[8];
  for (int i = 0; i < 8; ++i) {
    const int64_t row = i < 4 ? i : i + 4;
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + row * step));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + (row + 4) * step));
    a[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  }
  __m256i b[8];
  for (int i = 0; i < 4; ++i) {
    b[2 * i] = _mm256_unpacklo_epi16(a[2 * i], a[2 * i + 1]);      // k 0..3 of rows 2i, 2i+1
    b[2 * i + 1] = _mm256_unpackhi_epi16(a[2 * i], a[2 * i + 1]);  // k 4..7
  }
  __m256i c[8];  // c[4 h + j]: four rows (h = 0, 1), k 2j and 2j + 1
  for (int h = 0; h < 2; ++h) {
    c[4 * h] = _mm256_unpacklo_epi32(b[4 * h], b[4 * h + 2]);
    c[4 * h + 1] = _mm256_unpackhi_epi32(b[4 * h], b[4 * h + 2]);
    c[4 * h + 2] = _mm256_unpacklo_epi32(b[4 * h + 1], b[4 * h + 3]);
    c[4 * h + 3] = _mm256_unpackhi_epi32(b[4 * h + 1], b[4 * h + 3]);
  }
  const __m256i none = _mm256_setzero_si256();
  for (int j = 0; j < 4; ++j) {
    for (int h = 0; h < 2; ++h) {  // rows 0..7, then rows 8..15
      float* to = panel + 2 * j * kPanel + h * kLanes;
      _mm256_storeu_ps(to, _mm256_castsi256_ps(_mm256_unpacklo_epi16(none, c[4 * h + j])));
      _mm256_storeu_ps(to + kPanel, _mm256_castsi256_ps(_mm256_unpackhi_epi16(none, c[4 * h + j])));
    }
  }
}
#endif

// n <= kTurnedStep elements of `columns` <= kPanel rows, `step` apart.
template <class T>
inline void turn_rows(const T* from, int64_t step, int64_t columns, int64_t n, float* panel) {
  float rows[kPanel * kTurnedStep];
  for (int64_t c = 0; c < columns; ++c) {
    for_lanes(n, [&](int64_t k, auto lanes) { lanes.put(rows + c * kTurnedStep + k, lanes.get(from + c * step + k)); });
  }
  transpose(rows, kTurnedStep, columns, n, panel, kPanel);
  for (int64_t k = 0; k < n && columns < kPanel; ++k) {
    memset(panel + k * kPanel + columns, 0, static_cast<size_t>(kPanel - columns) * sizeof(float));
  }
}

template <class T>
inline void load_turned_panel(const T* from, int64_t step, int64_t columns, int64_t n, float* panel) {
  turn_rows(from, step, columns, n, panel);
}
#if TIDEGATE_ISA_ID == 2
// The rows are copied first: they often lie a multiple of 4096 bytes apart, and then the first cache cannot hold
// sixteen of them until all their elements are turned.
inline void load_turned_panel(const bf16* from, int64_t step, int64_t columns, int64_t n, float* panel) {
  if (columns != kPanel || n != kTurnedStep) {
    turn_rows(from, step, columns, n, panel);
    return;
  }
  bf16 rows[kPanel * kTurnedStep];
  for (int64_t c = 0; c < kPanel; ++c) {
    memcpy(rows + c * kTurnedStep, from + c * step, kTurnedStep * sizeof(bf16));
  }
  for (int64_t k = 0; k < n; k += 8) {
    turn_words(rows + k, kTurnedStep, panel + k * kPanel);
  }
}
#endif

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
