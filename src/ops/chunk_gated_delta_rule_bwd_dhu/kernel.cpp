// dh = D;  dv2 = e^(gl - gc) (k D) + dv;  D <- e^gl D + scale (e^gc q)^T do - w^T dv2, chunks from last to first.
// Columns of D do not see each other: D lies in panels of columns that stay in the cache from chunk to chunk.
#include "ops/chunk_gated_delta_rule_bwd_dhu/kernel.h"

#include "simd/states.h"
#include "simd/triangle.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using dhu_stage::Args;

struct Buffers {
  float *D, *q, *k, *w, *d_o, *dv, *gc, *from_start, *to_end;
  Buffers(const Args& a, Room& room)
      : D(room.take(kStateColumns * a.K)),
        q(room.take(a.C * a.K)),
        k(room.take(a.C * a.K)),
        w(room.take(a.C * a.K)),
        d_o(room.take(a.C * kPanel)),
        dv(room.take(a.C * kPanel)),
        gc(room.take(a.C)),
        from_start(room.take(a.C)),
        to_end(room.take(a.C)) {}
};

int64_t scratch(const Args& a) noexcept {
  Room room{nullptr};
  const Buffers counted(a, room);
  return room.used;
}

// What is the same for all columns of a chunk: rows of q, k, w and the decays. w changes its sign, so that all products
// of the update are added.
inline void open_chunk(const Args& a, const Buffers& b, const ChunkSpan& c, int64_t head) {
  const int64_t L = c.length;
  pack_rows(chunk_rows(a.q, c, head / a.group), L, a.K, b.q);
  pack_rows(chunk_rows(a.k, c, head / a.group), L, a.K, b.k);
  pack_rows(chunk_rows(a.w, c, head), L, a.K, b.w);
  for_lanes(L * a.K, [&](int64_t n, auto lanes) { lanes.put(b.w + n, zero() - lanes.get(b.w + n)); });
  gather_gates(a.gc, c, head, b.gc);
  const F32 gl = set1(b.gc[L - 1]);
  for_lanes(L, [&](int64_t i, auto lanes) {
    const F32 gc = lanes.get(b.gc + i);
    lanes.put(b.from_start + i, set1(a.scale) * exp(gc));
    lanes.put(b.to_end + i, exp(gl - gc));
  });
}

// The panel of columns from `first` on through one chunk.
inline void panel_step(const Args& a, const Buffers& b, const ChunkSpan& c, int64_t head, int64_t first, float* D) {
  const int64_t L = c.length;
  unpack_panel(D, matrix_at(a.dh, c.row, c.number, head, a.dh_pitch), a.K, first, a.V);
  pack_panel(chunk_rows(a.dv, c, head), L, first, a.V, nullptr, b.dv);
  pack_panel(chunk_rows(a.d_o, c, head), L, first, a.V, b.from_start, b.d_o);
  for_tiles(0, L, [&](int64_t i, auto size) {
    Tile<decltype(size)::value> t;
    clear(t);
    add_product(t, Left{b.k + i * a.K, a.K, 1}, D, a.K);
    scale_rows(t, b.to_end + i);
    add_tile(t, b.dv + i * kPanel);
    store_tile(t, b.dv + i * kPanel);
  });
  unpack_panel(b.dv, chunk_rows(a.dv2, c, head), L, first, a.V);
  float decay[1];
  exp_row(b.gc + L - 1, 1, decay);
  for_tiles(0, a.K, [&](int64_t m, auto size) {
    constexpr int R = decltype(size)::value;
    Tile<R> t;
    clear(t);
    add_product(t, Left{b.q + m, 1, a.K}, b.d_o, L);
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < kTileVectors; ++n) {
        float* d = D + (m + r) * kPanel + n * kLanes;
        store(d, fma(set1(decay[0]), load(d), t.v[r][n]));
      }
    }
    clear(t);  // a sum of its own: shorter chains have smaller errors
    add_product(t, Left{b.w + m, 1, a.K}, b.dv, L);
    add_tile(t, D + m * kPanel);
    store_tile(t, D + m * kPanel);
  });
}

void run(const Args& a, int64_t sequence, const ChunkSpan* chunks, int64_t count, int64_t head, int64_t first,
         float* block) noexcept {
  Room room{block};
  const Buffers b(a, room);
  const int64_t last = first + kStateColumns < a.V ? first + kStateColumns : a.V;
  const auto for_panels = [&](auto f) {
    for (int64_t column = first; column < last; column += kPanel) {
      f(column, b.D + (column - first) * a.K);
    }
  };
  for_panels([&](int64_t column, float* D) { load_state(a.dfinal, sequence, head, a.K, column, a.V, D); });
  for (int64_t c = count; c-- > 0;) {
    open_chunk(a, b, chunks[c], head);
    for_panels([&](int64_t column, float* D) { panel_step(a, b, chunks[c], head, column, D); });
  }
  for_panels([&](int64_t column, const float* D) { store_state(D, a.dinitial, sequence, head, a.K, column, a.V); });
}

}  // namespace

extern const dhu_stage::Kernels chunk_gated_delta_rule_bwd_dhu_kernels = {scratch, run};

}  // namespace tidegate::TIDEGATE_ISA
