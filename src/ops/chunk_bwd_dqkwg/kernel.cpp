// a = scale e^gc (do h^T), b = e^(gl - gc) (v_new dh^T), ds = scale tril(do v_new^T * Gamma), m = ds * (q k^T):
// dq = a + ds k, dk = b + ds^T q, dw = -dv2 h^T, and dg from the row sums of a q, b k and m. A task has all value heads
// of a key head, so that dq and dk are summed in one place and in one order.
#include "ops/chunk_bwd_dqkwg/kernel.h"

#include "simd/row_sums.h"
#include "simd/triangle.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using dqkwg_stage::Args;

struct Buffers {
  float *q, *k, *columns, *products;     // rows, k^T or v_new^T in panels, <q_i, k_j>
  float *d_o, *v, *dv;                   // rows of one value head
  float *rows, *h, *dh;                  // a state, and panels of the transposed ones
  float *ds, *gc, *from_start, *to_end;  // the first [C][whole_panels(C)], then gates
  float *row_sums, *column_sums;         // of m
  double *aq, *bk;                       // row sums of a q and b k; dg takes the place of the first
  float *q_panel, *k_panel, *result;
  float *dq, *dk;  // panels, the sums over value heads
  Buffers(const Args& a, Room& room)
      : q(room.take(a.C * a.K)),
        k(room.take(a.C * a.K)),
        columns(room.take(whole_panels(a.C) * (a.K > a.V ? a.K : a.V))),
        products(room.take(a.C * whole_panels(a.C))),
        d_o(room.take(a.C * a.V)),
        v(room.take(a.C * a.V)),
        dv(room.take(a.C * a.V)),
        rows(room.take(a.K * a.V)),
        h(room.take(whole_panels(a.K) * a.V)),
        dh(room.take(whole_panels(a.K) * a.V)),
        ds(room.take(a.C * whole_panels(a.C))),
        gc(room.take(a.C)),
        from_start(room.take(a.C)),
        to_end(room.take(a.C)),
        row_sums(room.take(a.C)),
        column_sums(room.take(a.C)),
        aq(room.take_doubles(a.C)),
        bk(room.take_doubles(a.C)),
        q_panel(room.take(a.C * kPanel)),
        k_panel(room.take(a.C * kPanel)),
        result(room.take(a.C * kPanel)),
        dq(room.take(a.C * whole_panels(a.K))),
        dk(room.take(a.C * whole_panels(a.K))) {}
};

int64_t scratch(const Args& a) noexcept {
  Room room{nullptr};
  const Buffers counted(a, room);
  return room.used;
}

// A state of a chunk as panels of its transpose.
inline void load_transposed(const Args& a, const Buffers& b, const Matrix& state, float* panels) {
  pack_rows(state, a.K, a.V, b.rows);
  transpose_panels(b.rows, a.V, a.K, a.V, panels);
}

// What one value head needs before the products with K columns: rows, states, gates, ds and the sums of m.
inline void open_head(const Args& a, const Buffers& b, const ChunkSpan& c, int64_t head) {
  const int64_t L = c.length;
  const int64_t pitch = whole_panels(a.C);
  pack_rows(chunk_rows(a.d_o, c, head), L, a.V, b.d_o);
  pack_rows(chunk_rows(a.v_new, c, head), L, a.V, b.v);
  pack_rows(chunk_rows(a.dv2, c, head), L, a.V, b.dv);
  load_transposed(a, b, matrix_at(a.h, c.row, c.number, head, a.h_pitch), b.h);
  load_transposed(a, b, matrix_at(a.dh, c.row, c.number, head, a.dh_pitch), b.dh);
  gather_gates(a.gc, c, head, b.gc);
  const F32 gl = set1(b.gc[L - 1]);
  for_lanes(L, [&](int64_t i, auto lanes) {
    const F32 gc = lanes.get(b.gc + i);
    lanes.put(b.from_start + i, set1(a.scale) * exp(gc));
    lanes.put(b.to_end + i, exp(gl - gc));
    lanes.put(b.column_sums + i, zero());
  });
  memset(b.aq, 0, static_cast<size_t>(L) * sizeof(double));
  memset(b.bk, 0, static_cast<size_t>(L) * sizeof(double));
  transpose_panels(b.v, a.V, L, a.V, b.columns);
  lower_products(b.d_o, b.columns, L, a.V, b.ds, pitch);
  for (int64_t i = 0; i < L; ++i) {
    float* ds = b.ds + i * pitch;
    decay_row(a.scale, b.gc, i, i + 1, ds, ds);
    // What is on the diagonal would be added to dg_i and taken away again.
    b.row_sums[i] = sum_lanes(i, [&](int64_t j, auto lanes) {
      const F32 m = lanes.get(ds + j) * lanes.get(b.products + i * pitch + j);
      lanes.put(b.column_sums + j, lanes.get(b.column_sums + j) + m);
      return m;
    });
  }
}

// dw and what this head adds to dq and dk, for the panel of K columns from `first` on.
inline void panel_gradients(const Args& a, const Buffers& b, const ChunkSpan& c, int64_t head, int64_t first) {
  const int64_t L = c.length;
  const int64_t pitch = whole_panels(a.C);
  const bool adds = head % a.group != 0;
  const float* h = b.h + first * a.V;
  const float* dh = b.dh + first * a.V;
  float* dq = b.dq + first * a.C;
  float* dk = b.dk + first * a.C;
  pack_panel(chunk_rows(a.q, c, head / a.group), L, first, a.K, nullptr, b.q_panel);
  pack_panel(chunk_rows(a.k, c, head / a.group), L, first, a.K, nullptr, b.k_panel);
  for_tiles(0, L, [&](int64_t i, auto size) {
    constexpr int R = decltype(size)::value;
    Tile<R> t;
    long_product(t, Left{b.dv + i * a.V, a.V, 1}, h, a.V, b.result + i * kPanel);
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < kTileVectors; ++n) {
        store(b.result + (i + r) * kPanel + n * kLanes, zero() - t.v[r][n]);
      }
    }
  });
  unpack_panel(b.result, chunk_rows(a.dw, c, head), L, first, a.K);
  for_tiles(0, L, [&](int64_t i, auto size) {
    Tile<decltype(size)::value> t;
    long_product(t, Left{b.d_o + i * a.V, a.V, 1}, h, a.V, b.result + i * kPanel);
    scale_rows(t, b.from_start + i);
    add_row_products(t, b.q_panel + i * kPanel, b.aq + i);
    add_lower_product(t, Left{b.ds + i * pitch, pitch, 1}, b.k_panel, i);
    if (adds) {
      add_tile(t, dq + i * kPanel);
    }
    store_tile(t, dq + i * kPanel);
  });
  for_tiles(0, L, [&](int64_t i, auto size) {
    Tile<decltype(size)::value> t;
    long_product(t, Left{b.v + i * a.V, a.V, 1}, dh, a.V, b.result + i * kPanel);
    scale_rows(t, b.to_end + i);
    add_row_products(t, b.k_panel + i * kPanel, b.bk + i);
    add_upper_product(t, Left{b.ds + i, 1, pitch}, b.q_panel, i, L);
    if (adds) {
      add_tile(t, dk + i * kPanel);
    }
    store_tile(t, dk + i * kPanel);
  });
}

// <h, dh>: fp32 in blocks, blocks in fp64. Blocks are short because the terms are large compared with their sum, and dg
// of the last token takes all of it.
inline double state_product(const Args& a, const Buffers& b) {
  double total = 0.0;
  const int64_t block = 8 * kLanes;
  const int64_t n = whole_panels(a.K) * a.V;  // what lies beyond column K is 0 in both
  for (int64_t i = 0; i < n; i += block) {
    total += static_cast<double>(sum_lanes(n - i < block ? n - i : block, [&](int64_t j, auto lanes) {
      return lanes.get(b.h + i + j) * lanes.get(b.dh + i + j);
    }));
  }
  return total;
}

inline void store_gate_gradients(const Args& a, const Buffers& b, const ChunkSpan& c, int64_t head) {
  const int64_t last = c.length - 1;
  float decay[1];
  exp_row(b.gc + last, 1, decay);
  double end = static_cast<double>(decay[0]) * state_product(a, b);
  for (int64_t i = 0; i <= last; ++i) {
    end += b.bk[i];
    b.aq[i] += static_cast<double>(b.row_sums[i]) - static_cast<double>(b.column_sums[i]) - b.bk[i];
  }
  b.aq[last] += end;
  scatter_gates(b.aq, a.dg, c, head);
}

void run(const Args& a, const ChunkSpan& c, int64_t key_head, float* block) noexcept {
  Room room{block};
  const Buffers b(a, room);
  pack_rows(chunk_rows(a.q, c, key_head), c.length, a.K, b.q);
  pack_rows(chunk_rows(a.k, c, key_head), c.length, a.K, b.k);
  transpose_panels(b.k, a.K, c.length, a.K, b.columns);
  lower_products(b.q, b.columns, c.length, a.K, b.products, whole_panels(a.C));
  for (int64_t head = key_head * a.group; head < (key_head + 1) * a.group; ++head) {
    open_head(a, b, c, head);
    for (int64_t first = 0; first < a.K; first += kPanel) {
      panel_gradients(a, b, c, head, first);
    }
    store_gate_gradients(a, b, c, head);
  }
  for (int64_t first = 0; first < a.K; first += kPanel) {
    unpack_panel(b.dq + first * a.C, chunk_rows(a.dq, c, key_head), c.length, first, a.K);
    unpack_panel(b.dk + first * a.C, chunk_rows(a.dk, c, key_head), c.length, first, a.K);
  }
}

}  // namespace

extern const dqkwg_stage::Kernels chunk_bwd_dqkwg_kernels = {scratch, run};

}  // namespace tidegate::TIDEGATE_ISA
