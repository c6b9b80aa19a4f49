// o = scale (e^gc (q S) + P v_new), P_ij = e^(gc_i - gc_j) <q_i, k_j> for j <= i. The products of q and k are made once
// for all value heads of a key head.
#include "ops/chunk_fwd_o/kernel.h"

#include "simd/triangle.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using o_stage::Args;

struct Buffers {
  float *q, *k, *columns, *products, *P, *gc, *from_start, *scale, *state, *v, *result;
  Buffers(const Args& a, Room& room)
      : q(room.take(a.C * a.K)),
        k(room.take(a.C * a.K)),
        columns(room.take(whole_panels(a.C) * a.K)),
        products(room.take(a.C * whole_panels(a.C))),
        P(room.take(a.C * a.C)),
        gc(room.take(a.C)),
        from_start(room.take(a.C)),
        scale(room.take(kTileRows)),
        state(room.take(a.K * kPanel)),
        v(room.take(a.C * kPanel)),
        result(room.take(a.C * kPanel)) {}
};

int64_t scratch(const Args& a) noexcept {
  Room room{nullptr};
  const Buffers counted(a, room);
  return room.used;
}

// One panel of columns of o for one value head.
inline void panel_output(const Args& a, const Buffers& b, const ChunkSpan& c, int64_t head, int64_t first) {
  const int64_t L = c.length;
  pack_panel(matrix_at(a.h, c.row, c.number, head, a.h_pitch), a.K, first, a.V, nullptr, b.state);
  pack_panel(chunk_rows(a.v_new, c, head), L, first, a.V, nullptr, b.v);
  for_tiles(0, L, [&](int64_t i, auto size) {
    Tile<decltype(size)::value> t;
    clear(t);
    add_product(t, Left{b.q + i * a.K, a.K, 1}, b.state, a.K);
    scale_rows(t, b.from_start + i);
    add_lower_product(t, Left{b.P + i * a.C, a.C, 1}, b.v, i);
    scale_rows(t, b.scale);
    store_tile(t, b.result + i * kPanel);
  });
  unpack_panel(b.result, chunk_rows(a.o, c, head), L, first, a.V);
}

void run(const Args& a, const ChunkSpan& c, int64_t key_head, float* block) noexcept {
  Room room{block};
  const Buffers b(a, room);
  const int64_t pitch = whole_panels(a.C);
  pack_rows(chunk_rows(a.q, c, key_head), c.length, a.K, b.q);
  pack_rows(chunk_rows(a.k, c, key_head), c.length, a.K, b.k);
  transpose_panels(b.k, a.K, c.length, a.K, b.columns);
  lower_products(b.q, b.columns, c.length, a.K, b.products, pitch);
  for (int r = 0; r < kTileRows; ++r) {
    b.scale[r] = a.scale;
  }
  for (int64_t head = key_head * a.group; head < (key_head + 1) * a.group; ++head) {
    gather_gates(a.gc, c, head, b.gc);
    exp_row(b.gc, c.length, b.from_start);
    for (int64_t i = 0; i < c.length; ++i) {
      decay_row(1.0f, b.gc, i, i + 1, b.products + i * pitch, b.P + i * a.C);
    }
    for (int64_t first = 0; first < a.V; first += kPanel) {
      panel_output(a, b, c, head, first);
    }
  }
}

}  // namespace

extern const o_stage::Kernels chunk_fwd_o_kernels = {scratch, run};

}  // namespace tidegate::TIDEGATE_ISA
