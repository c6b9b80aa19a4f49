// dv = scale P^T do, P_ij = e^(gc_i - gc_j) <q_i, k_j> for j <= i. The products of q and k are made once for all value
// heads of a key head.
#include "ops/chunk_bwd_dv_local/kernel.h"

#include "simd/triangle.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using dv_local_stage::Args;

struct Buffers {
  float *q, *k, *columns, *products, *P, *gc, *d_o, *result;
  Buffers(const Args& a, Room& room)
      : q(room.take(a.C * a.K)),
        k(room.take(a.C * a.K)),
        columns(room.take(whole_panels(a.C) * a.K)),
        products(room.take(a.C * whole_panels(a.C))),
        P(room.take(a.C * a.C)),
        gc(room.take(a.C)),
        d_o(room.take(a.C * kPanel)),
        result(room.take(a.C * kPanel)) {}
};

int64_t scratch(const Args& a) noexcept {
  Room room{nullptr};
  const Buffers counted(a, room);
  return room.used;
}

void run(const Args& a, const ChunkSpan& c, int64_t key_head, float* block) noexcept {
  Room room{block};
  const Buffers b(a, room);
  const int64_t L = c.length;
  const int64_t pitch = whole_panels(a.C);
  pack_rows(chunk_rows(a.q, c, key_head), L, a.K, b.q);
  pack_rows(chunk_rows(a.k, c, key_head), L, a.K, b.k);
  transpose_panels(b.k, a.K, L, a.K, b.columns);
  lower_products(b.q, b.columns, L, a.K, b.products, pitch);
  for (int64_t head = key_head * a.group; head < (key_head + 1) * a.group; ++head) {
    gather_gates(a.gc, c, head, b.gc);
    for (int64_t i = 0; i < L; ++i) {
      decay_row(a.scale, b.gc, i, i + 1, b.products + i * pitch, b.P + i * a.C);
    }
    for (int64_t first = 0; first < a.V; first += kPanel) {
      pack_panel(chunk_rows(a.d_o, c, head), L, first, a.V, nullptr, b.d_o);
      for_tiles(0, L, [&](int64_t j, auto size) {
        Tile<decltype(size)::value> t;
        clear(t);
        add_upper_product(t, Left{b.P + j, 1, a.C}, b.d_o, j, L);
        store_tile(t, b.result + j * kPanel);
      });
      unpack_panel(b.result, chunk_rows(a.dv, c, head), L, first, a.V);
    }
  }
}

}  // namespace

extern const dv_local_stage::Kernels chunk_bwd_dv_local_kernels = {scratch, run};

}  // namespace tidegate::TIDEGATE_ISA
