// Through w = A (beta e^gc k) and u = A (beta v) back to k, v, beta and gc, A = (I + A0)^-1.
//   X = tril(dw (beta e^gc k)^T + du (beta v)^T, -1)       Dm = -tril((A^T X A^T) * Gamma, -1)        [da]
//   tw = A^T dw, tu = A^T du: dk = beta (Dm k) + Dm^T (beta k) + beta e^gc tw, dv = beta tu           [full]
// The sums of beta_i Dm_ij <k_i, k_j> over rows and columns are those of (Dm k) k and (Dm^T (beta k)) k.
#include "ops/prepare_wy_repr_bwd/kernel.h"

#include "simd/triangle.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using wy_stage::Args;

struct Buffers {
  float *k_columns, *v_columns;  // k^T and v^T in panels
  float *rows, *more_rows;       // [C][K] or [C][V]
  float *A, *A_columns;          // [C][C] with zeros after the diagonal, and A^T in panels
  float *X, *X_more, *D;         // [C][whole_panels(C)]
  float *beta, *gc, *from_start, *gate;
  double *Dk, *Dtk, *tw, *tu;  // <Dm k, k>, <Dm^T (beta k), k>, <tw, k>, <tu, v> of every token
  float *left, *right, *result;
  float* dk;  // panels, the sum over value heads
  Buffers(const Args& a, Room& room)
      : k_columns(room.take(whole_panels(a.C) * a.K)),
        v_columns(room.take(whole_panels(a.C) * a.V)),
        rows(room.take(a.C * (a.K > a.V ? a.K : a.V))),
        more_rows(room.take(a.C * a.V)),
        A(room.take(a.C * a.C)),
        A_columns(room.take(whole_panels(a.C) * a.C)),
        X(room.take(a.C * whole_panels(a.C))),
        X_more(room.take(a.C * whole_panels(a.C))),
        D(room.take(a.C * whole_panels(a.C))),
        beta(room.take(a.C)),
        gc(room.take(a.C)),
        from_start(room.take(a.C)),
        gate(room.take(a.C)),
        Dk(room.take_doubles(a.C)),
        Dtk(room.take_doubles(a.C)),
        tw(room.take_doubles(a.C)),
        tu(room.take_doubles(a.C)),
        left(room.take(a.C * kPanel)),
        right(room.take(a.C * kPanel)),
        result(room.take(a.C * kPanel)),
        dk(room.take(a.C * whole_panels(a.K))) {}
};

int64_t scratch(const Args& a) noexcept {
  Room room{nullptr};
  const Buffers counted(a, room);
  return room.used;
}

inline void clear_after(float* row, int64_t first, int64_t last) {
  memset(row + first, 0, static_cast<size_t>(last - first) * sizeof(float));
}

inline void open_head(const Args& a, const Buffers& b, const ChunkSpan& c, int64_t head) {
  const int64_t L = c.length;
  gather_gates(a.beta, c, head, b.beta);
  gather_gates(a.gc, c, head, b.gc);
  exp_row(b.gc, L, b.from_start);
  for_lanes(L,
            [&](int64_t i, auto lanes) { lanes.put(b.gate + i, lanes.get(b.beta + i) * lanes.get(b.from_start + i)); });
  pack_rows(chunk_rows(a.A, c, head), L, L, b.A);
  for (int64_t i = 0; i < L; ++i) {
    clear_after(b.A + i * L, i + 1, L);
  }
}

// X with zeros on and after the diagonal.
inline void make_x(const Args& a, const Buffers& b, const ChunkSpan& c, int64_t head) {
  const int64_t L = c.length;
  const int64_t pitch = whole_panels(a.C);
  pack_rows(chunk_rows(a.dw, c, head), L, a.K, b.rows);
  lower_products(b.rows, b.k_columns, L, a.K, b.X, pitch);
  pack_rows(chunk_rows(a.v, c, head), L, a.V, b.rows);
  transpose_panels(b.rows, a.V, L, a.V, b.v_columns);
  pack_rows(chunk_rows(a.du, c, head), L, a.V, b.more_rows);
  lower_products(b.more_rows, b.v_columns, L, a.V, b.X_more, pitch);
  for (int64_t i = 0; i < L; ++i) {
    float* x = b.X + i * pitch;
    const float* more = b.X_more + i * pitch;
    for_lanes(i, [&](int64_t j, auto lanes) {
      lanes.put(x + j, fma(lanes.get(b.gate + j), lanes.get(x + j), lanes.get(b.beta + j) * lanes.get(more + j)));
    });
    clear_after(x, i, pitch);
  }
}

// Dm with zeros on and after the diagonal. Below the diagonal, X A^T needs of a column j the inner steps up to j only,
// and A^T (X A^T) of a row i what X A^T has from row i on.
inline void make_d(const Args& a, const Buffers& b, const ChunkSpan& c, int64_t head) {
  const int64_t L = c.length;
  const int64_t pitch = whole_panels(a.C);
  make_x(a, b, c, head);
  transpose_panels(b.A, L, L, L, b.A_columns);
  for (int64_t first = 0; first < L; first += kPanel) {
    const int64_t steps = first + kPanel < L ? first + kPanel : L;
    for_tiles(first, L, [&](int64_t i, auto size) {
      Tile<decltype(size)::value> t;
      clear(t);
      add_product(t, Left{b.X + i * pitch, pitch, 1}, b.A_columns + first * L, steps);
      store_tile(t, b.right + i * kPanel);
    });
    for_tiles(first, L, [&](int64_t i, auto size) {
      Tile<decltype(size)::value> t;
      clear(t);
      add_upper_product(t, Left{b.A + i, 1, L}, b.right, i, L);
      store_tile(t, b.D + i * pitch + first, pitch);
    });
  }
  for (int64_t i = 0; i < L; ++i) {
    decay_row(-1.0f, b.gc, i, i, b.D + i * pitch, b.D + i * pitch);
    clear_after(b.D + i * pitch, i, pitch);
  }
}

inline void store_d(const Args& a, const Buffers& b, const ChunkSpan& c, int64_t head) {
  const Matrix dA = chunk_rows(a.dA, c, head);
  clear_after(b.rows, 0, a.C);
  for (int64_t t = 0; t < c.length; ++t) {
    for (int64_t j = 0; j < c.length; ++j) {
      b.rows[j] = b.D[j * whole_panels(a.C) + t];
    }
    unpack_row(b.rows, dA, t, a.C);
  }
}

inline void load_d(const Args& a, const Buffers& b, const ChunkSpan& c, int64_t head) {
  const int64_t L = c.length;
  const int64_t pitch = whole_panels(a.C);
  pack_rows(chunk_rows(a.dA, c, head), L, L, b.X);
  for (int64_t i = 0; i < L; ++i) {
    for (int64_t j = 0; j < i; ++j) {
      b.D[i * pitch + j] = b.X[j * L + i];
    }
    clear_after(b.D + i * pitch, i, pitch);
  }
}

// What this head adds to dk, for the panel of K columns from `first` on.
inline void key_gradient(const Args& a, const Buffers& b, const ChunkSpan& c, int64_t head, int64_t first) {
  const int64_t L = c.length;
  const int64_t pitch = whole_panels(a.C);
  const Matrix k = chunk_rows(a.k, c, head / a.group);
  float* dk = b.dk + first * a.C;
  pack_panel(k, L, first, a.K, nullptr, b.left);
  for_tiles(0, L, [&](int64_t i, auto size) {
    Tile<decltype(size)::value> t;
    clear(t);
    add_lower_product(t, Left{b.D + i * pitch, pitch, 1}, b.left, i);
    add_row_products(t, b.left + i * kPanel, b.Dk + i);
    scale_rows(t, b.beta + i);
    store_tile(t, b.result + i * kPanel);
  });
  pack_panel(k, L, first, a.K, b.beta, b.right);
  for_tiles(0, L, [&](int64_t i, auto size) {
    Tile<decltype(size)::value> t;
    clear(t);
    add_upper_product(t, Left{b.D + i, 1, pitch}, b.right, i, L);
    add_row_products(t, b.left + i * kPanel, b.Dtk + i);
    add_tile(t, b.result + i * kPanel);
    store_tile(t, b.result + i * kPanel);
  });
  pack_panel(chunk_rows(a.dw, c, head), L, first, a.K, nullptr, b.right);
  for_tiles(0, L, [&](int64_t i, auto size) {
    Tile<decltype(size)::value> t;
    clear(t);
    add_upper_product(t, Left{b.A + i, 1, L}, b.right, i, L);
    add_row_products(t, b.left + i * kPanel, b.tw + i);
    scale_rows(t, b.gate + i);
    add_tile(t, b.result + i * kPanel);
    if (head % a.group != 0) {
      add_tile(t, dk + i * kPanel);
    }
    store_tile(t, dk + i * kPanel);
  });
}

inline void value_gradient(const Args& a, const Buffers& b, const ChunkSpan& c, int64_t head, int64_t first) {
  pack_panel(chunk_rows(a.v, c, head), c.length, first, a.V, nullptr, b.left);
  pack_panel(chunk_rows(a.du, c, head), c.length, first, a.V, nullptr, b.right);
  for_tiles(0, c.length, [&](int64_t i, auto size) {
    Tile<decltype(size)::value> t;
    clear(t);
    add_upper_product(t, Left{b.A + i, 1, c.length}, b.right, i, c.length);
    add_row_products(t, b.left + i * kPanel, b.tu + i);
    scale_rows(t, b.beta + i);
    store_tile(t, b.result + i * kPanel);
  });
  unpack_panel(b.result, chunk_rows(a.dv, c, head), c.length, first, a.V);
}

// All gradients of one value head from Dm; dk is left in its buffer.
inline void gradients(const Args& a, const Buffers& b, const ChunkSpan& c, int64_t head) {
  double* const sums[] = {b.Dk, b.Dtk, b.tw, b.tu};
  for (double* x : sums) {
    memset(x, 0, static_cast<size_t>(c.length) * sizeof(double));
  }
  for (int64_t first = 0; first < a.K; first += kPanel) {
    key_gradient(a, b, c, head, first);
  }
  for (int64_t first = 0; first < a.V; first += kPanel) {
    value_gradient(a, b, c, head, first);
  }
  for (int64_t i = 0; i < c.length; ++i) {
    const double both = static_cast<double>(b.from_start[i]) * b.tw[i] + b.Dk[i];
    b.tu[i] += both;
    b.Dtk[i] = static_cast<double>(b.beta[i]) * both - b.Dtk[i];
  }
  scatter_gates(b.tu, a.dbeta, c, head);
  scatter_gates(b.Dtk, a.dg, c, head);
}

inline void store_key_gradient(const Args& a, const Buffers& b, const ChunkSpan& c, int64_t key_head) {
  for (int64_t first = 0; first < a.K; first += kPanel) {
    unpack_panel(b.dk + first * a.C, chunk_rows(a.dk, c, key_head), c.length, first, a.K);
  }
}

// kMakeD: Dm is computed, otherwise dA is read. kUseD: gradients are wanted, otherwise dA is written.
template <bool kMakeD, bool kUseD>
void run(const Args& a, const ChunkSpan& c, int64_t key_head, float* block) noexcept {
  Room room{block};
  const Buffers b(a, room);
  if constexpr (kMakeD) {
    pack_rows(chunk_rows(a.k, c, key_head), c.length, a.K, b.rows);
    transpose_panels(b.rows, a.K, c.length, a.K, b.k_columns);
  }
  for (int64_t head = key_head * a.group; head < (key_head + 1) * a.group; ++head) {
    open_head(a, b, c, head);
    if constexpr (kMakeD) {
      make_d(a, b, c, head);
    } else {
      load_d(a, b, c, head);
    }
    if constexpr (kUseD) {
      gradients(a, b, c, head);
    } else {
      store_d(a, b, c, head);
    }
  }
  if constexpr (kUseD) {
    store_key_gradient(a, b, c, key_head);
  }
}

}  // namespace

extern const wy_stage::Kernels prepare_wy_repr_bwd_kernels = {scratch, run<true, false>, run<false, true>,
                                                              run<true, true>};

}  // namespace tidegate::TIDEGATE_ISA
