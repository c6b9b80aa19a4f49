// h = S;  v_new = u - w S;  S <- e^gl S + k^T (e^(gl - gc) v_new). Columns of S do not see each other: S lies in panels
// of columns that stay in the cache from chunk to chunk.
#include "ops/chunk_gated_delta_rule_fwd_h/kernel.h"

#include "simd/states.h"
#include "simd/triangle.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using h_stage::Args;

struct Buffers {
  float *state, *w, *k, *v, *gc, *to_end;
  Buffers(const Args& a, Room& room)
      : state(room.take(kStateColumns * a.K)),
        w(room.take(a.C * a.K)),
        k(room.take(a.C * a.K)),
        v(room.take(a.C * kPanel)),
        gc(room.take(a.C)),
        to_end(room.take(a.C)) {}
};

int64_t scratch(const Args& a) noexcept {
  Room room{nullptr};
  const Buffers counted(a, room);
  return room.used;
}

// The panel of columns from `first` on through one chunk; w, k and the gates of the chunk are in the buffers.
inline void panel_step(const Args& a, const Buffers& b, const ChunkSpan& c, int64_t head, int64_t first, float* state) {
  const int64_t L = c.length;
  unpack_panel(state, matrix_at(a.h, c.row, c.number, head, a.h_pitch), a.K, first, a.V);
  pack_panel(chunk_rows(a.u, c, head), L, first, a.V, nullptr, b.v);
  for_tiles(0, L, [&](int64_t i, auto size) {
    constexpr int R = decltype(size)::value;
    Tile<R> t;
    clear(t);
    add_product(t, Left{b.w + i * a.K, a.K, 1}, state, a.K);
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < kTileVectors; ++n) {
        float* v = b.v + (i + r) * kPanel + n * kLanes;
        store(v, load(v) - t.v[r][n]);
      }
    }
  });
  unpack_panel(b.v, chunk_rows(a.v_new, c, head), L, first, a.V);
  for (int64_t i = 0; i < L; ++i) {
    for (int n = 0; n < kPanel; n += kLanes) {
      store(b.v + i * kPanel + n, set1(b.to_end[i]) * load(b.v + i * kPanel + n));
    }
  }
  float decay[kTileRows];
  exp_row(b.gc + L - 1, 1, decay);
  for (int r = 1; r < kTileRows; ++r) {
    decay[r] = decay[0];
  }
  for_tiles(0, a.K, [&](int64_t r, auto size) {
    Tile<decltype(size)::value> t;
    load_tile(t, state + r * kPanel);
    scale_rows(t, decay);
    add_product(t, Left{b.k + r, 1, a.K}, b.v, L);
    store_tile(t, state + r * kPanel);
  });
}

void run(const Args& a, int64_t sequence, const ChunkSpan* chunks, int64_t count, int64_t head, int64_t first,
         float* block) noexcept {
  Room room{block};
  const Buffers b(a, room);
  const int64_t last = first + kStateColumns < a.V ? first + kStateColumns : a.V;
  const auto for_panels = [&](auto f) {
    for (int64_t column = first; column < last; column += kPanel) {
      f(column, b.state + (column - first) * a.K);
    }
  };
  for_panels([&](int64_t column, float* state) { load_state(a.initial, sequence, head, a.K, column, a.V, state); });
  for (const ChunkSpan* c = chunks; c < chunks + count; ++c) {
    pack_rows(chunk_rows(a.w, *c, head), c->length, a.K, b.w);
    pack_rows(chunk_rows(a.k, *c, head / a.group), c->length, a.K, b.k);
    gather_gates(a.gc, *c, head, b.gc);
    const F32 gl = set1(b.gc[c->length - 1]);
    for_lanes(c->length, [&](int64_t i, auto lanes) { lanes.put(b.to_end + i, exp(gl - lanes.get(b.gc + i))); });
    for_panels([&](int64_t column, float* state) { panel_step(a, b, *c, head, column, state); });
  }
  if (a.final.data != nullptr) {
    for_panels(
        [&](int64_t column, const float* state) { store_state(state, a.final, sequence, head, a.K, column, a.V); });
  }
}

}  // namespace

extern const h_stage::Kernels chunk_gated_delta_rule_fwd_h_kernels = {scratch, run};

}  // namespace tidegate::TIDEGATE_ISA
