// A0_ij = beta_i e^(gc_i - gc_j) <k_i, k_j> for j < i. The products are made once for all value heads of a key head.
#include "ops/chunk_scaled_dot_kkt/kernel.h"

#include "simd/triangle.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using kkt_stage::Args;

struct Buffers {
  float *rows, *columns, *products, *gc, *beta, *row;
  Buffers(const Args& a, Room& room)
      : rows(room.take(a.C * a.K)),
        columns(room.take(whole_panels(a.C) * a.K)),
        products(room.take(a.C * whole_panels(a.C))),
        gc(room.take(a.C)),
        beta(room.take(a.C)),
        row(room.take(a.C)) {}
};

int64_t scratch(const Args& a) noexcept {
  Room room{nullptr};
  const Buffers counted(a, room);
  return room.used;
}

void run(const Args& a, const ChunkSpan& c, int64_t key_head, float* block) noexcept {
  Room room{block};
  const Buffers b(a, room);
  const int64_t pitch = whole_panels(a.C);
  pack_rows(chunk_rows(a.k, c, key_head), c.length, a.K, b.rows);
  transpose_panels(b.rows, a.K, c.length, a.K, b.columns);
  lower_products(b.rows, b.columns, c.length, a.K, b.products, pitch);
  for (int64_t head = key_head * a.group; head < (key_head + 1) * a.group; ++head) {
    gather_gates(a.beta, c, head, b.beta);
    if (a.gc.at.data != nullptr) {
      gather_gates(a.gc, c, head, b.gc);
    } else {
      memset(b.gc, 0, static_cast<size_t>(c.length) * sizeof(float));  // e^0 is exactly 1
    }
    const Matrix A0 = chunk_rows(a.A0, c, head);
    memset(b.row, 0, static_cast<size_t>(a.C) * sizeof(float));
    for (int64_t i = 0; i < c.length; ++i) {  // rows grow, so what lies after the diagonal is still 0
      decay_row(b.beta[i], b.gc, i, i, b.products + i * pitch, b.row);
      unpack_row(b.row, A0, i, a.C);
    }
  }
}

}  // namespace

extern const kkt_stage::Kernels chunk_scaled_dot_kkt_kernels = {scratch, run};

}  // namespace tidegate::TIDEGATE_ISA
