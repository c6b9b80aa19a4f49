// Blocks of products over any data types, and sums of outer products.
#include "ops/grouped_matmul/kernel.h"

#include "ops/grouped_matmul/chains.kernel.h"
#if TIDEGATE_ISA_ID == 4
#include "ops/grouped_matmul/halves.kernel.h"
#include "ops/grouped_matmul/zips.kernel.h"
#endif
#include "simd/turned.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using namespace grouped_matmul;

// Up to so many rows weights are used as they stand: turning them costs as much as multiplying a dozen rows by them.
constexpr int64_t kFewRows = 12;

// Weights whose columns are neighbours are packed so many columns at a time: their rows often lie a multiple of 4096
// bytes apart, and then the caches cannot keep what is left of a line for the next panel.
constexpr int64_t kPackColumns = 64;
constexpr int64_t kPackAhead = 16;  // rows; the hardware does not foresee the next page

constexpr int64_t kWidened = kBlockRows * kStretch;
#if TIDEGATE_ISA_ID != 4
constexpr int64_t kHalvesRoom = 0, kZipRoom = 0, kZipOuterRoom = 0;
#endif
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t kRoom = larger(kWidened + kPackColumns * kStretch, larger(kHalvesRoom, kZipRoom));
constexpr int64_t kOuterRoom = larger(kOuterLeft * (kTerms + kOuterRight) + kOuterRight * kTerms, kZipOuterRoom);

// Elements [first, first + n) of rows as floats, `pitch` apart, each times its factor if there are factors.
void widen_rows(const void* const* rows, int type, int64_t count, int64_t first, int64_t n, const float* factors,
                float* to, int64_t pitch) {
  with_type(type, [&]<class T>(T*) {
    for (int64_t r = 0; r < count; ++r) {
      const T* from = static_cast<const T*>(rows[r]) + first;
      const F32 factor = set1(factors != nullptr ? factors[r] : 1.0f);
      for_lanes(n, [&](int64_t c, auto lanes) { lanes.put(to + r * pitch + c, factor * lanes.get(from + c)); });
    }
  });
}

// n inner indices of `columns` columns from c on: panels of kPanel columns, kPanel * n apart.
template <class W>
void pack_rows_of_weight(const Block& b, int64_t c, int64_t columns, int64_t first, int64_t n, float* panels) {
  const W* from = static_cast<const W*>(b.weight) + c + first * b.weight_inner;
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(W));
  for (int64_t k = 0; k < n; ++k, from += b.weight_inner) {
    for (int64_t i = 0; i < columns; i += kLine) {
      prefetch(from + kPackAhead * b.weight_inner + i);
    }
    for (int64_t i = 0; i < columns; i += kPanel) {
      load_panel(from, 0, 1, i, columns, panels + i * n + k * kPanel);
    }
  }
}
template <class W>
void pack_columns_of_weight(const Block& b, int64_t c, int64_t columns, int64_t first, int64_t n, float* panel) {
  const W* from = static_cast<const W*>(b.weight) + c * b.weight_column + first;
  for (int64_t k = 0; k < n; k += kTurnedStep) {
    load_turned_panel(from + k, b.weight_column, columns, n - k < kTurnedStep ? n - k : kTurnedStep,
                      panel + k * kPanel);
  }
}

void product(const Block& b) noexcept {
  const bool pairs = b.row_type == 1 && b.weight_type == 1;
#if TIDEGATE_ISA_ID == 4
  if (pairs) {
    b.weight_inner == 1 ? pair_block(b) : zip_block(b);
    return;
  }
#endif
  if (b.weight_inner == 1 && b.row_count <= kFewRows) {
    with_type(b.row_type, [&]<class X>(X*) {
      with_type(b.weight_type, [&]<class W>(W*) {
        dot_block(reinterpret_cast<const X* const*>(b.rows), b.row_count, static_cast<const W*>(b.weight),
                  b.weight_column, b.columns, b.inner, b.out, b.pitch, b.accumulate);
      });
    });
    return;
  }
  float* x = b.room;
  float* panels = x + kWidened;
  const int64_t step = b.weight_inner == 1 ? kPanel : kPackColumns;
  for (int64_t first = 0; first < b.inner || first == 0; first += kStretch) {
    const int64_t n = b.inner - first < kStretch ? b.inner - first : kStretch;
    widen_rows(b.rows, b.row_type, b.row_count, first, n, nullptr, x, kStretch);
    for (int64_t c = 0; c < b.columns; c += step) {
      const int64_t columns = b.columns - c < step ? b.columns - c : step;
      with_type(b.weight_type, [&]<class W>(W*) {
        if (b.weight_inner == 1) {
          pack_columns_of_weight<W>(b, c, columns, first, n, panels);
        } else {
          pack_rows_of_weight<W>(b, c, columns, first, n, panels);
        }
      });
      for (int64_t i = 0; i < columns; i += kPanel) {
        for_tiles(0, b.row_count, [&](int64_t r, auto size) {
          chain_tile<decltype(size)::value>(x + r * kStretch, kStretch, panels + i * n, n, pairs,
                                            first == 0 && !b.accumulate, b.out + r * b.pitch + c + i, b.pitch,
                                            columns - i);
        });
      }
    }
  }
}

#if TIDEGATE_ISA_ID == 4
bool packs_halves(const Block& b) {
  return b.row_type == 1 && b.weight_type == 1 && b.weight_inner == 1 && b.row_count > kLineRows;
}
int64_t packed_bytes(const Block& b) noexcept { return packs_halves(b) ? half_bytes(b) : 0; }
void pack(const Block& b, int64_t first, int64_t n, void* to) noexcept {
  half_pack(b, first, n, static_cast<bf16*>(to));
}
#else
int64_t packed_bytes(const Block&) noexcept { return 0; }
void pack(const Block&, int64_t, int64_t, void*) noexcept {}
#endif

void outer(const OuterBlock& b) noexcept {
#if TIDEGATE_ISA_ID == 4
  if (b.left_type == 1 && b.right_type == 1 && b.factors == nullptr) {
    zip_outer(b);
    return;
  }
#endif
  float* left = b.room;
  float* sums = left + kOuterLeft * kTerms;
  float* panels = sums + kOuterLeft * kOuterRight;
  const int64_t pitch = whole_panels(b.right_count);
  for (int64_t first = 0; first < b.rows; first += kTerms) {
    const int64_t n = b.rows - first < kTerms ? b.rows - first : kTerms;
    widen_rows(b.left + first, b.left_type, n, b.left_first, b.left_count,
               b.factors != nullptr ? b.factors + first : nullptr, left, kOuterLeft);
    with_type(b.right_type, [&]<class T>(T*) {
      for (int64_t c = 0; c < b.right_count; c += kPanel) {
        for (int64_t r = 0; r < n; ++r) {
          load_panel(static_cast<const T*>(b.right[first + r]) + b.right_first, 0, 1, c, b.right_count,
                     panels + c * kTerms + r * kPanel);
        }
      }
    });
    for (int64_t c = 0; c < b.right_count; c += kPanel) {
      for_tiles(0, b.left_count, [&](int64_t m, auto size) {
        Tile<decltype(size)::value> t;
        clear(t);
        add_product(t, Left{left + m, 1, kOuterLeft}, panels + c * kTerms, n);
        if (first != 0) {
          add_tile(t, sums + m * pitch + c, pitch);
        }
        store_tile(t, sums + m * pitch + c, pitch);
      });
    }
  }
  with_type(b.out_type, [&]<class T>(T*) {
    for (int64_t m = 0; m < b.left_count; ++m) {
      T* out = static_cast<T*>(b.out) + m * b.out_row;
      for_lanes(b.right_count, [&](int64_t c, auto lanes) {
        const F32 total = b.rows > 0 ? lanes.get(sums + m * pitch + c) : zero();
        lanes.put(out + c, b.accumulate ? lanes.get(out + c) + total : total);
      });
    }
  });
}

void store_rows(const float* from, int64_t pitch, int64_t rows, int64_t columns, const float* bias, void* to,
                int64_t to_row, int to_type) noexcept {
  with_type(to_type, [&]<class T>(T*) {
    for (int64_t r = 0; r < rows; ++r) {
      T* out = static_cast<T*>(to) + r * to_row;
      for_lanes(columns, [&](int64_t c, auto lanes) {
        const F32 y = lanes.get(from + r * pitch + c);
        lanes.put(out + c, bias != nullptr ? y + lanes.get(bias + c) : y);
      });
    }
  });
}

}  // namespace

extern const grouped_matmul::Kernels grouped_matmul_kernels = {kRoom, kOuterRoom, product,   packed_bytes,
                                                               pack,  outer,      store_rows};

}  // namespace tidegate::TIDEGATE_ISA
