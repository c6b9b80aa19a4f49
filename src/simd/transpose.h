// Matrices turned around, eight by eight in registers.
#pragma once

#include "simd/simd.h"
#if TIDEGATE_ISA_ID >= 2
#include <immintrin.h>
#endif

namespace tidegate::TIDEGATE_ISA {
namespace {

constexpr int64_t kBlock = 8;

#if TIDEGATE_ISA_ID >= 2
// Pairs of rows are interleaved, then pairs of pairs, then the halves of the registers.
TIDEGATE_INLINE void transpose_block(const float* from, int64_t pitch, float* to, int64_t to_pitch) {
  __m256 row[kBlock];
  __m256 two[kBlock];
  __m256 four[kBlock];
  for (int r = 0; r < kBlock; ++r) {
    row[r] = _mm256_loadu_ps(from + r * pitch);
  }
  for (int r = 0; r < kBlock; r += 2) {
    two[r] = _mm256_unpacklo_ps(row[r], row[r + 1]);
    two[r + 1] = _mm256_unpackhi_ps(row[r], row[r + 1]);
  }
  for (int r = 0; r < kBlock; r += 4) {
    four[r] = _mm256_shuffle_ps(two[r], two[r + 2], 0x44);
    four[r + 1] = _mm256_shuffle_ps(two[r], two[r + 2], 0xee);
    four[r + 2] = _mm256_shuffle_ps(two[r + 1], two[r + 3], 0x44);
    four[r + 3] = _mm256_shuffle_ps(two[r + 1], two[r + 3], 0xee);
  }
  for (int r = 0; r < 4; ++r) {
    _mm256_storeu_ps(to + r * to_pitch, _mm256_permute2f128_ps(four[r], four[r + 4], 0x20));
    _mm256_storeu_ps(to + (r + 4) * to_pitch, _mm256_permute2f128_ps(four[r], four[r + 4], 0x31));
  }
}
#else
inline void transpose_block(const float* from, int64_t pitch, float* to, int64_t to_pitch) {
  for (int64_t r = 0; r < kBlock; ++r) {
    for (int64_t c = 0; c < kBlock; ++c) {
      to[c * to_pitch + r] = from[r * pitch + c];
    }
  }
}
#endif

// to[c][r] = from[r][c]
inline void transpose(const float* from, int64_t pitch, int64_t rows, int64_t columns, float* to, int64_t to_pitch) {
  for (int64_t r = 0; r < rows; r += kBlock) {
    for (int64_t c = 0; c < columns; c += kBlock) {
      const int64_t m = rows - r < kBlock ? rows - r : kBlock;
      const int64_t n = columns - c < kBlock ? columns - c : kBlock;
      const float* x = from + r * pitch + c;
      float* y = to + c * to_pitch + r;
      if (m == kBlock && n == kBlock) {
        transpose_block(x, pitch, y, to_pitch);
        continue;
      }
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          y[j * to_pitch + i] = x[i * pitch + j];
        }
      }
    }
  }
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
