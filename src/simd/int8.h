// Sums of products of int8, exact in int32: tiles of rows times panels, as in tile.h.
//
// A lane takes kGroup neighbours along the inner index at a time. With VNNI these are four bytes: the left factor is
// shifted by 128 to be unsigned, as the instruction wants it, and 128 times the sum of the right one is taken away
// again. Elsewhere they are two words: the byte instruction of AVX2 adds its pairs with saturation, words never do.
#pragma once

#include "simd/tile.h"
#include "simd/transpose.h"

namespace tidegate::TIDEGATE_ISA {

#if TIDEGATE_ISA_ID == 4
constexpr int kGroup = 4;
typedef uint8_t Int8Left;
typedef int8_t Int8Right;
constexpr int kInt8Shift = 128;
#else
constexpr int kGroup = 2;
typedef int16_t Int8Left;
typedef int16_t Int8Right;
constexpr int kInt8Shift = 0;
#endif

// Sums, the vectors of a panel's row, a group of the left factor and a product: 12 + 3 + 1 of 16 where the product
// replaces the group, and there are fewer loads a product than in 6 x 2. 24 + 3 + 1 + 1 of 32.
#if TIDEGATE_ISA_ID == 1
constexpr int kInt8Rows = 2, kInt8Vectors = 1;
#elif TIDEGATE_ISA_ID == 2
constexpr int kInt8Rows = 4, kInt8Vectors = 3;
#else
constexpr int kInt8Rows = 8, kInt8Vectors = 3;
#endif
constexpr int kInt8Panel = kInt8Vectors * kLanes;

#if TIDEGATE_ISA_ID == 1
struct I32 {
  IntLanes v;
};
TIDEGATE_INLINE I32 integer_zero() { return {IntLanes{}}; }
TIDEGATE_INLINE I32 load(const int32_t* p) {
  I32 r;
  memcpy(&r.v, p, sizeof r.v);
  return r;
}
TIDEGATE_INLINE void store(int32_t* p, I32 a) { memcpy(p, &a.v, sizeof a.v); }
TIDEGATE_INLINE I32 load_group(const void* p) { return load(static_cast<const int32_t*>(p)); }
TIDEGATE_INLINE I32 set1_group(const void* p) {
  int32_t group;
  memcpy(&group, p, 4);
  return {group - IntLanes{}};
}
TIDEGATE_INLINE I32 operator-(I32 a, I32 b) { return {a.v - b.v}; }
TIDEGATE_INLINE F32 to_float(I32 a) { return {__builtin_convertvector(a.v, FloatLanes)}; }
// acc + a0 b0 + a1 b1, the two words of every lane.
TIDEGATE_INLINE I32 add_groups(I32 acc, I32 a, I32 b) {
  return {acc.v + (a.v << 16 >> 16) * (b.v << 16 >> 16) + (a.v >> 16) * (b.v >> 16)};
}
#elif TIDEGATE_ISA_ID == 2
struct I32 {
  __m256i v;
};
TIDEGATE_INLINE I32 integer_zero() { return {_mm256_setzero_si256()}; }
TIDEGATE_INLINE I32 load_group(const void* p) { return {_mm256_loadu_si256(static_cast<const __m256i*>(p))}; }
TIDEGATE_INLINE I32 load(const int32_t* p) { return load_group(p); }
TIDEGATE_INLINE void store(int32_t* p, I32 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.v); }
TIDEGATE_INLINE I32 set1_group(const void* p) {
  int32_t group;
  memcpy(&group, p, 4);
  return {_mm256_set1_epi32(group)};
}
TIDEGATE_INLINE I32 operator-(I32 a, I32 b) { return {_mm256_sub_epi32(a.v, b.v)}; }
TIDEGATE_INLINE F32 to_float(I32 a) { return {_mm256_cvtepi32_ps(a.v)}; }
// acc + a0 b0 + a1 b1, the two words of every lane. The addition is written out because g++ otherwise moves the sums to
// other registers, runs out of them and goes through memory.
TIDEGATE_INLINE I32 add_groups(I32 acc, I32 a, I32 b) {
  const __m256i product = _mm256_madd_epi16(a.v, b.v);
  __asm__("vpaddd %1, %0, %0" : "+x"(acc.v) : "x"(product));
  return acc;
}
#else
struct I32 {
  __m512i v;
};
TIDEGATE_INLINE I32 integer_zero() { return {_mm512_setzero_si512()}; }
TIDEGATE_INLINE I32 load_group(const void* p) { return {_mm512_loadu_si512(p)}; }
TIDEGATE_INLINE I32 load(const int32_t* p) { return load_group(p); }
TIDEGATE_INLINE void store(int32_t* p, I32 a) { _mm512_storeu_si512(p, a.v); }
TIDEGATE_INLINE I32 set1_group(const void* p) {
  int32_t group;
  memcpy(&group, p, 4);
  return {_mm512_set1_epi32(group)};
}
TIDEGATE_INLINE I32 operator-(I32 a, I32 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
TIDEGATE_INLINE F32 to_float(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
// acc plus the products of every lane: four of unsigned and signed bytes, or two of words.
TIDEGATE_INLINE I32 add_groups(I32 acc, I32 a, I32 b) {
#if TIDEGATE_ISA_ID == 4
  return {_mm512_dpbusd_epi32(acc.v, a.v, b.v)};
#else
  return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(a.v, b.v))};
#endif
}
#endif

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

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
