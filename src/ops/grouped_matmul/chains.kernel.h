// Rows times panels of weights, in the order of sums that dots.kernel.h describes: a tile takes the lanes one after the
// other, each as a chain of fused multiply-adds.
#pragma once

#include "ops/grouped_matmul/dots.kernel.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

// l with its bits reversed: sum() adds lanes kLanes / 2 apart first.
TIDEGATE_INLINE int reversed_lane(int l) {
  int reversed = 0;
  for (int bit = 1, other = kLanes / 2; bit < kLanes; bit <<= 1, other >>= 1) {
    reversed |= (l & bit) != 0 ? other : 0;
  }
  return reversed;
}

template <int R>
TIDEGATE_INLINE void add_step(Tile<R>& t, const float* x, int64_t x_pitch, const float* panel, int64_t k) {
  F32 row[kTileVectors];
  for (int v = 0; v < kTileVectors; ++v) {
    row[v] = load(panel + k * kPanel + v * kLanes);
  }
  for (int r = 0; r < R; ++r) {
    const F32 factor = set1(x[r * x_pitch + k]);
    for (int v = 0; v < kTileVectors; ++v) {
      t.v[r][v] = fma(factor, row[v], t.v[r][v]);
    }
  }
}

// out = or += x times a panel of n <= kStretch rows. pairs: a lane takes pairs of elements, the second one first.
template <int R>
inline void chain_tile(const float* x, int64_t x_pitch, const float* panel, int64_t n, bool pairs, bool fresh,
                       float* out, int64_t pitch, int64_t columns) {
  float sums[6][R * kPanel];  // of 1, 2, 4, ... lanes; more than log2(kLanes)
  const int64_t whole = n / (2 * kLanes) * (2 * kLanes);
  Tile<R> t;
  int top = 0;
  for (int i = 0; i < kLanes; ++i) {
    const int l = reversed_lane(i);
    const int64_t second = pairs ? 2 * l : l;
    const int64_t first = pairs ? second + 1 : second + kLanes;
    clear(t);
    for (int64_t k = 0; k < whole; k += 2 * kLanes) {
      add_step(t, x, x_pitch, panel, k + first);
      add_step(t, x, x_pitch, panel, k + second);
    }
    for (int64_t k = whole + l; k < n; k += kLanes) {
      add_step(t, x, x_pitch, panel, k);
    }
    for (int lanes = i; (lanes & 1) != 0; lanes >>= 1) {
      add_tile(t, sums[--top]);
    }
    store_tile(t, sums[top++]);
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kTileVectors; ++v) {
      float* to = out + r * pitch + v * kLanes;
      const int64_t left = columns - v * kLanes;
      store_part(to, fresh ? t.v[r][v] : load_part(to, left) + t.v[r][v], left);
    }
  }
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
