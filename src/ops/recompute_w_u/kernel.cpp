// u = A (beta v), w = A (beta e^gc k), A lower triangular.
#include "ops/recompute_w_u/kernel.h"

#include "simd/triangle.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using wu_stage::Args;

struct Buffers {
  float *A, *beta, *gate, *right, *result;
  Buffers(const Args& a, Room& room)
      : A(room.take(a.C * a.C)),
        beta(room.take(a.C)),
        gate(room.take(a.C)),
        right(room.take(a.C * kPanel)),
        result(room.take(a.C * kPanel)) {}
};

int64_t scratch(const Args& a) noexcept {
  Room room{nullptr};
  const Buffers counted(a, room);
  return room.used;
}

// out = A (factor x), a panel of columns after the other.
inline void multiply(const Buffers& b, int64_t L, const Matrix& x, const float* factor, int64_t columns,
                     const Matrix& out) {
  for (int64_t first = 0; first < columns; first += kPanel) {
    pack_panel(x, L, first, columns, factor, b.right);
    for_tiles(0, L, [&](int64_t i, auto size) {
      Tile<decltype(size)::value> t;
      clear(t);
      add_lower_product(t, Left{b.A + i * L, L, 1}, b.right, i);
      store_tile(t, b.result + i * kPanel);
    });
    unpack_panel(b.result, out, L, first, columns);
  }
}

void run(const Args& a, const ChunkSpan& c, int64_t head, float* block) noexcept {
  Room room{block};
  const Buffers b(a, room);
  const int64_t L = c.length;
  pack_rows(chunk_rows(a.A, c, head), L, L, b.A);
  gather_gates(a.beta, c, head, b.beta);
  gather_gates(a.gc, c, head, b.gate);
  exp_row(b.gate, L, b.gate);
  for_lanes(L, [&](int64_t i, auto lanes) { lanes.put(b.gate + i, lanes.get(b.beta + i) * lanes.get(b.gate + i)); });
  multiply(b, L, chunk_rows(a.v, c, head), b.beta, a.V, chunk_rows(a.u, c, head));
  multiply(b, L, chunk_rows(a.k, c, head / a.group), b.gate, a.K, chunk_rows(a.w, c, head));
}

}  // namespace

extern const wu_stage::Kernels recompute_w_u_kernels = {scratch, run};

}  // namespace tidegate::TIDEGATE_ISA
