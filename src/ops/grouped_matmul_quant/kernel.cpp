// A block of products of int8: exact sums, then the scales, then SwiGLU.
#include "ops/grouped_matmul_quant/kernel.h"

#include "simd/int8_product.h"
#include "simd/lanes.h"
#if TIDEGATE_ISA_ID == 4
#include "ops/grouped_matmul_quant/quads.kernel.h"
#endif

namespace tidegate::TIDEGATE_ISA {
namespace {

using quant_products::Block;
using quant_products::SwigluBlock;

// Rows of the left factor lie so far apart that no two of them share the places of the first cache.
int64_t left_pitch(int64_t width) { return (width + 63) / 64 * 64 + 64 / static_cast<int64_t>(sizeof(Int8Left)); }
int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Weights whose inner index runs along memory are used as they stand, if there are quads.
#if TIDEGATE_ISA_ID == 4
bool as_they_stand(const Block& b) { return b.inner == 1; }
int64_t packed_bytes(int64_t rows, int64_t width) noexcept { return quad_count(rows) * quad_size(width); }
void pack(const int8_t* const* rows, int64_t row_count, int64_t width, uint8_t* to) noexcept {
  pack_int8_quads(rows, row_count, width, to);
}
int64_t sum_rows(int64_t rows) { return 4 * quad_count(rows); }
#else
bool as_they_stand(const Block&) { return false; }
int64_t packed_bytes(int64_t, int64_t) noexcept { return 0; }
void pack(const int8_t* const*, int64_t, int64_t, uint8_t*) noexcept {}
int64_t sum_rows(int64_t rows) { return rows; }
#endif

// Parts of the room.
struct Parts {
  Int8Left* left;
  Int8Right *rows, *panel;
  int32_t* sums[2];
  int64_t bytes;
  Parts(char* room, int64_t row_count, int64_t width) : bytes(0) {
    const auto take = [&](int64_t n) {
      char* part = room == nullptr ? nullptr : room + bytes;
      bytes += whole_lines(n);
      return part;
    };
    const int64_t rows_bytes = row_count * left_pitch(width) * static_cast<int64_t>(sizeof(Int8Left));
    const int64_t quads_bytes = packed_bytes(row_count, width);
    left = reinterpret_cast<Int8Left*>(take(rows_bytes > quads_bytes ? rows_bytes : quads_bytes));
    rows = reinterpret_cast<Int8Right*>(take(kInt8PanelSize * static_cast<int64_t>(sizeof(Int8Right))));
    panel = reinterpret_cast<Int8Right*>(take(kInt8PanelSize * static_cast<int64_t>(sizeof(Int8Right))));
    for (int32_t*& s : sums) {
      s = reinterpret_cast<int32_t*>(take(sum_rows(row_count) * kInt8Panel * 4));
    }
  }
};

int64_t room_bytes(int64_t rows, int64_t width) noexcept { return Parts(nullptr, rows, width).bytes; }

void load_rows(const Block& b, const Parts& p) {
#if TIDEGATE_ISA_ID == 4
  if (as_they_stand(b)) {
    if (b.packed == nullptr) {
      pack(b.rows, b.row_count, b.width, p.left);
    }
    return;
  }
#endif
  for (int64_t r = 0; r < b.row_count; ++r) {
    load_int8_left(b.rows[r], b.width, p.left + r * left_pitch(b.width));
  }
}

// sums[r][c] for one panel of columns; the panel of columns from `next` on will follow.
void panel_sums(const Block& b, const Parts& p, int64_t first, int64_t columns, int64_t next, int32_t* sums) {
  const int8_t* weight = b.weight + first * b.column;
#if TIDEGATE_ISA_ID == 4
  if (as_they_stand(b)) {
    int8_quad_sums(b.packed != nullptr ? b.packed : p.left, b.row_count, weight, b.column, columns, b.width,
                   b.weight + next * b.column, sums);
    return;
  }
#endif
  if (b.inner == 1 && b.row_count <= kInt8Few) {
    const auto dots = [&](int64_t, auto size) {
      dot_int8_rows<decltype(size)::value>(p.left, left_pitch(b.width), weight, b.column, columns, b.width, sums);
    };
    one_tile<kInt8Few>(0, b.row_count, dots);
    return;
  }
  for (int64_t k = 0; k < b.width || k == 0; k += kInt8Step) {
    const int64_t n = b.width - k < kInt8Step ? b.width - k : kInt8Step;
    load_int8_panel(weight + k * b.inner, b.column, b.inner, columns, n, p.rows, p.panel);
    const bool last = k + kInt8Step >= b.width;
    const int64_t rest = last ? b.width : b.width - k - kInt8Step;
    const Ahead ahead = {last ? b.weight + next * b.column : weight + k + kInt8Step, b.column,
                         b.inner == 1 ? columns : 0, rest < kInt8Step ? rest : kInt8Step};
    with_vectors<kInt8Vectors>(columns, p.left + k, left_pitch(b.width), b.row_count, p.panel, group_count(n), k == 0,
                               sums, ahead);
  }
}

template <class F>
void for_panels(const Block& b, F f) {
  for (int64_t c = 0; c < b.columns; c += kInt8Panel) {
    f(c, b.columns - c < kInt8Panel ? b.columns - c : static_cast<int64_t>(kInt8Panel));
  }
}

// shift: the sums of the row of zeros at the same columns, absent where the others are without them already.
TIDEGATE_INLINE F32 scaled(const int32_t* sums, const int32_t* shift, F32 weight_scale, F32 row_scale) {
  const I32 total = shift != nullptr ? load(sums) - load(shift) : load(sums);
  return to_float(total) * weight_scale * row_scale;
}
// At column c; the row of zeros comes after the others.
TIDEGATE_INLINE const int32_t* shift_at(const Block& b, const int32_t* sums, int64_t c) {
  return as_they_stand(b) ? sums + b.row_count * kInt8Panel + c : nullptr;
}

void product(const Block& b) noexcept {
  const Parts p(b.room, b.row_count, b.width);
  load_rows(b, p);
  for_panels(b, [&](int64_t first, int64_t columns) {
    panel_sums(b, p, first, columns, first + columns, p.sums[0]);
    for (int64_t r = 0; r < b.row_count; ++r) {
      const F32 row_scale = set1(b.row_scales[r]);
      for_lanes(columns, [&](int64_t c, auto lanes) {
        lanes.put(b.out + r * b.pitch + first + c, scaled(p.sums[0] + r * kInt8Panel + c, shift_at(b, p.sums[0], c),
                                                          lanes.get(b.weight_scales + first + c), row_scale));
      });
    }
  });
}

void swiglu(const SwigluBlock& s) noexcept {
  const Block& b = s.gate;
  const Parts p(b.room, b.row_count, b.width);
  load_rows(b, p);
  for_panels(b, [&](int64_t first, int64_t columns) {
    panel_sums(b, p, first, columns, s.up_first + first, p.sums[0]);
    panel_sums(b, p, s.up_first + first, columns, first + columns, p.sums[1]);
    for (int64_t r = 0; r < b.row_count; ++r) {
      const F32 row_scale = set1(b.row_scales[r]);
      for_lanes(columns, [&](int64_t c, auto lanes) {
        const int64_t at = r * kInt8Panel + c;
        const float* scales = b.weight_scales + first + c;
        const F32 gate = scaled(p.sums[0] + at, shift_at(b, p.sums[0], c), lanes.get(scales), row_scale);
        const F32 up = scaled(p.sums[1] + at, shift_at(b, p.sums[1], c), lanes.get(scales + s.up_first), row_scale);
        const F32 y = silu(gate) * up;
        lanes.put(b.out + r * b.pitch + first + c, s.smooth != nullptr ? y * lanes.get(s.smooth + first + c) : y);
      });
    }
  });
}

}  // namespace

extern const quant_products::Kernels grouped_matmul_quant_kernels = {room_bytes, packed_bytes, pack, product, swiglu};

}  // namespace tidegate::TIDEGATE_ISA
