// A = (I + A0)^-1 by forward substitution: row i of A is e_i - sum over j < i of A0_ij times row j. A panel of columns
// at a time; its rows above the first column are 0.
#include "ops/solve_tril/kernel.h"

#include "simd/triangle.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using solve_stage::Args;

struct Buffers {
  float *minus, *panel;  // -A0 [C][C], one panel of A [C][kPanel]
  Buffers(const Args& a, Room& room) : minus(room.take(a.C * a.C)), panel(room.take(a.C * kPanel)) {}
};

int64_t scratch(const Args& a) noexcept {
  Room room{nullptr};
  const Buffers counted(a, room);
  return room.used;
}

// The rows that the diagonal crosses, one by one: what lies after it must be 0 for the rows that follow, also where A0
// is not finite.
inline void diagonal_rows(const float* minus, int64_t C, int64_t first, int64_t last, float* panel) {
  for (int64_t i = first; i < last; ++i) {
    Tile<1> t;
    clear(t);
    add_product(t, Left{minus + i * C + first, C, 1}, panel + first * kPanel, i - first);
    float* row = panel + i * kPanel;
    store_tile(t, row);
    row[i - first] = 1.0f;
    for (int64_t c = i - first + 1; c < kPanel; ++c) {
      row[c] = 0.0f;
    }
  }
}

void run(const Args& a, const ChunkSpan& c, int64_t head, float* block) noexcept {
  Room room{block};
  const Buffers b(a, room);
  const int64_t L = c.length;
  pack_rows(chunk_rows(a.A0, c, head), L, L, b.minus);
  for_lanes(L * L, [&](int64_t n, auto lanes) { lanes.put(b.minus + n, zero() - lanes.get(b.minus + n)); });
  for (int64_t first = 0; first < a.C; first += kPanel) {
    memset(b.panel, 0, static_cast<size_t>((first < L ? first : L) * kPanel) * sizeof(float));
    if (first < L) {
      const int64_t below = first + kPanel < L ? first + kPanel : L;
      diagonal_rows(b.minus, L, first, below, b.panel);
      for_tiles(below, L, [&](int64_t i, auto size) {
        Tile<decltype(size)::value> t;
        clear(t);
        add_product(t, Left{b.minus + i * L + first, L, 1}, b.panel + first * kPanel, i - first);
        substitute(t, Left{b.minus + i * L + i, L, 1});
        store_tile(t, b.panel + i * kPanel);
      });
    }
    unpack_panel(b.panel, chunk_rows(a.A, c, head), L, first, a.C);
  }
}

}  // namespace

extern const solve_stage::Kernels solve_tril_kernels = {scratch, run};

}  // namespace tidegate::TIDEGATE_ISA
