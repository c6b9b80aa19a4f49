// The gradients inside one chunk. S is the state at its start, D the gradient of the state at its end; V' and P and A0
// are those of the forward (ops/chunk_gated_delta_rule/kernel.cpp). For one value head
//
//   dV' = P^T dO + e^(gl - gc) K D
//   dX  = (I + A0)^-T dV'                    backward substitution
//   U   = dO V'^T, W = dX V'^T               lower triangles: gradients of P and -A0
//   dQ += scale e^gc (dO S^T) + (scale e^(gc_i - gc_j) U) K
//   dK += e^(gl - gc) (V' D^T) - beta e^gc (dX S^T) + (scale e^(gc_i - gc_j) U)^T Q + (E + E^T) K
//                                            E_ij = -beta_i e^(gc_i - gc_j) W_ij
//   dV  = beta dX
//   D  <- e^gl D + (scale e^gc Q)^T dO - (beta e^gc K)^T dX
//
// dQ and dK are formed transposed, K rows by tokens: their products with S and D then take the states as left factors,
// in the order in which they lie, and only the narrow matrices of a chunk have to be turned around.
#pragma once

#include "ops/chunk_gated_delta_rule/fp32.kernel.h"
#include "ops/chunk_gated_delta_rule_bwd/kernel.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

constexpr int64_t kTokenPanels = kSquare / kPanel;

// Rows from the last tile to the first, so that a tile finds the rows after it finished.
template <class Body>
[[gnu::always_inline]] inline void for_tiles_down(int64_t last, Body body) {
  for (; last >= 2 * kTileRows || last == kTileRows; last -= kTileRows) {
    body(last - kTileRows, TileRows<kTileRows>{});
  }
  if (last > kTileRows) {
    const int64_t half = (last + 3) / 4 * 2;
    one_tile<kTileRows>(last - half, half, body);
    last -= half;
  }
  one_tile<kTileRows>(0, last, body);
}

// t[r] += sum of a[i + s][i + r] b[i + s] over s >= r: the triangle of a product with a transposed lower triangle.
template <int R>
[[gnu::always_inline]] inline void add_upper_triangle(Tile<R>& t, const float* a, const float* b, int64_t i) {
  for (int s = 0; s < R; ++s) {
    for (int r = 0; r <= s; ++r) {
      const F32 x = set1(a[(i + s) * kSquare + i + r]);
      for (int c = 0; c < kTileVectors; ++c) {
        t.v[r][c] = fma(x, load(b + (i + s) * kPanel + c * kLanes), t.v[r][c]);
      }
    }
  }
}

// Row r of the tile, from the last to the first, adds a[i + s][i + r] times the finished rows s > r.
template <int R>
[[gnu::always_inline]] inline void substitute_up(Tile<R>& t, const float* a, int64_t i) {
  for (int s = R - 1; s > 0; --s) {
    for (int r = 0; r < s; ++r) {
      const F32 x = set1(a[(i + s) * kSquare + i + r]);
      for (int c = 0; c < kTileVectors; ++c) {
        t.v[r][c] = fma(x, t.v[s][c], t.v[r][c]);
      }
    }
  }
}

// Panels of [tokens][V] to panels of the transpose: [token panels][V][kPanel], 0 beyond the last token.
inline void turn_panels(const float* from, int64_t panels, int64_t tokens, float* to) {
  for (int64_t first = 0; first < tokens; first += kPanel) {
    const int64_t n = tokens - first < kPanel ? tokens - first : kPanel;
    for (int64_t p = 0; p < panels; ++p) {
      transpose_panels(from + (p * kChunk + first) * kPanel, kPanel, n, kPanel,
                       to + (first * panels + p * kPanel) * kPanel);
    }
  }
}

// Everything that a chunk needs beside the states.
struct Gradients {
  float *q_turned, *k_turned;             // [token panels][K][kPanel]
  float *dq, *dk;                         // the same: gradients of the normalised rows
  float *d_o, *d_x;                       // [V panels][C][kPanel]
  float *o_turned, *x_turned, *v_turned;  // [token panels][V][kPanel]
  float *decay, *U, *W;                   // [C][kSquare] of one value head
  float *p_gradient, *e;                  // [C][kSquare] summed over the value heads
  float* right;                           // [token panels][C][kPanel]
  float* rows;                            // [C][pitch]
  // Factors of the tokens: of dO S^T in dQ, of dX S^T and V' D^T in dK, of K D in dV'.
  float o_factor[kSquare], x_factor[kSquare], v_factor[kSquare], key_weight[kSquare];
  float x_weight[kSquare];  // of dX in D
  int64_t panels;           // of V

  static int64_t floats(const Args& a) {
    const int64_t width = whole_panels(a.V);
    return kSquare * (4 * a.K + 5 * width) + 6 * kChunk * kSquare + kSquare * row_pitch(a.K) + 20 * 16;
  }
  void place(const Args& a, float*& memory) {
    panels = panel_count(a.V);
    const int64_t width = panels * kPanel;
    float** const keys[] = {&q_turned, &k_turned, &dq, &dk};
    float** const values[] = {&d_o, &d_x, &o_turned, &x_turned, &v_turned};
    float** const squares[] = {&decay, &U, &W, &p_gradient, &e, &right};
    for (float** rows : keys) {
      *rows = take<float>(memory, kSquare * a.K);
    }
    for (float** rows : values) {
      *rows = take<float>(memory, kSquare * width);
    }
    for (float** square : squares) {
      *square = take<float>(memory, kChunk * kSquare);
    }
    rows = take<float>(memory, kSquare * row_pitch(a.K));
  }
};

// dX of one panel of V.
inline void solve_gradient(const Args& a, const Fp32Products& x, const Chunk& s, const float* weight, const float* D,
                           const float* d_o, float* d_x) {
  for_tiles_down(s.L, [&](int64_t i, auto rows) {
    constexpr int R = decltype(rows)::value;
    const int64_t after = i + R;
    Tile<R> t;
    clear(t);
    add_product(t, {x.k + i * x.pitch, x.pitch, 1}, D, a.K);
    scale_rows(t, weight + i);
    add_product(t, {s.p + after * kSquare + i, 1, kSquare}, d_o + after * kPanel, s.L - after);
    add_upper_triangle(t, s.p, d_o, i);
    add_product(t, {s.minus_a0 + after * kSquare + i, 1, kSquare}, d_x + after * kPanel, s.L - after);
    substitute_up(t, s.minus_a0, i);
    store_tile(t, d_x + i * kPanel);
  });
}

// t += rows of panels [V panels][rows][kPanel] times [V][kPanel]; `step` floats from panel to panel.
template <int R>
[[gnu::always_inline]] inline void add_across(Tile<R>& t, const float* left, int64_t step, const float* right,
                                              int64_t panels) {
  for (int64_t p = 0; p < panels; ++p) {
    add_product(t, {left + p * step, kPanel, 1}, right + p * kPanel * kPanel, kPanel);
  }
}

// Lower triangle of rows V'^T, whole panels up to the diagonal.
inline void lower_across(const Gradients& d, const float* rows, int64_t L, float* out) {
  for (int64_t c = 0; c < L; c += kPanel) {
    for_tiles(c, L, [&](int64_t i, auto size) {
      Tile<decltype(size)::value> t;
      clear(t);
      add_across(t, rows + i * kPanel, kChunk * kPanel, d.v_turned + c * d.panels * kPanel, d.panels);
      store_tile(t, out + i * kSquare + c, kSquare);
    });
  }
}

// The tile times the rows of a turned matrix, summed over its rows: adds to <row, row> of kPanel tokens.
template <int R>
[[gnu::always_inline]] inline void add_dots(const Tile<R>& t, const float* turned, float* dots) {
  for (int c = 0; c < kTileVectors; ++c) {
    F32 sum = zero();
    for (int r = 0; r < R; ++r) {
      sum = fma(t.v[r][c], load(turned + r * kPanel + c * kLanes), sum);
    }
    store(dots + c * kLanes, load(dots + c * kLanes) + sum);
  }
}
// to += factor of the token times the tile
template <int R>
[[gnu::always_inline]] inline void add_scaled(const Tile<R>& t, const float* factor, float* to) {
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < kTileVectors; ++c) {
      float* at = to + r * kPanel + c * kLanes;
      store(at, fma(load(factor + c * kLanes), t.v[r][c], load(at)));
    }
  }
}

// <row of K, row of K> for every token: of dO S^T with q, of dX S^T and V' D^T with k.
struct Dots {
  float o[kSquare], x[kSquare], v[kSquare];
};

// The parts of dQ and dK that pass through the states. `state` and `D` are [V panels][K][kPanel].
inline void add_state_products(const Args& a, Gradients& d, int64_t L, const float* state, const float* D, bool dq,
                               bool dk, Dots& dots) {
  dots = {};
  const int64_t step = a.K * kPanel;
  for_tiles(0, a.K, [&](int64_t m, auto size) {
    constexpr int R = decltype(size)::value;
    for (int64_t c = 0; c < L; c += kPanel) {
      const int64_t at = c * a.K + m * kPanel;
      const int64_t right = c * d.panels * kPanel;
      Tile<R> t;
      if (dq) {
        clear(t);
        add_across(t, state + m * kPanel, step, d.o_turned + right, d.panels);
        add_dots(t, d.q_turned + at, dots.o + c);
        add_scaled(t, d.o_factor + c, d.dq + at);
      }
      if (dk) {
        clear(t);
        add_across(t, state + m * kPanel, step, d.x_turned + right, d.panels);
        add_dots(t, d.k_turned + at, dots.x + c);
        add_scaled(t, d.x_factor + c, d.dk + at);
        clear(t);
        add_across(t, D + m * kPanel, step, d.v_turned + right, d.panels);
        add_dots(t, d.k_turned + at, dots.v + c);
        add_scaled(t, d.v_factor + c, d.dk + at);
      }
    }
  });
}

// D of one panel, from the chunk's end to its start; d_o and d_x are weighted already. Returns <S, D>.
inline float carry_back(const Args& a, const Fp32Products& x, int64_t L, float decay, const float* state,
                        const float* d_o, const float* d_x, float* D) {
  F32 dots = zero();
  for_tiles(0, a.K, [&](int64_t m, auto size) {
    constexpr int R = decltype(size)::value;
    Tile<R> t;
    load_tile(t, D + m * kPanel);
    F32 dot = zero();
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < kTileVectors; ++c) {
        dot = fma(t.v[r][c], load(state + (m + r) * kPanel + c * kLanes), dot);
        t.v[r][c] = set1(decay) * t.v[r][c];
      }
    }
    dots = dots + dot;
    add_product(t, {x.q + m, 1, x.pitch}, d_o, L);
    add_product(t, {x.k + m, 1, x.pitch}, d_x, L);
    store_tile(t, D + m * kPanel);
  });
  return sum(dots);
}

// rows[r] *= factor[r]
inline void weigh_rows(float* panel, const float* factor, int64_t L) {
  for (int64_t r = 0; r < L; ++r) {
    for (int c = 0; c < kPanel; c += kLanes) {
      store(panel + r * kPanel + c, set1(factor[r]) * load(panel + r * kPanel + c));
    }
  }
}

// right[panel][i][j] = factor_i m_ij, in the panels of a right factor.
template <class Element>
inline void make_right(int64_t L, float* right, Element element) {
  for (int64_t c = 0; c < L; c += kPanel) {
    for (int64_t i = 0; i < L; ++i) {
      for (int64_t j = 0; j < kPanel; ++j) {
        right[c * kChunk + i * kPanel + j] = c + j < L ? element(i, c + j) : 0.0f;
      }
    }
  }
}

// to += rows^T right, where tokens [first(c), last(c)) reach the kPanel tokens from c on.
template <class First, class Last>
inline void add_inside(const Args& a, const float* rows, int64_t pitch, int64_t L, const float* right, float* to,
                       First first, Last last) {
  for (int64_t c = 0; c < L; c += kPanel) {
    for_tiles(0, a.K, [&](int64_t m, auto size) {
      Tile<decltype(size)::value> t;
      float* at = to + c * a.K + m * kPanel;
      load_tile(t, at);
      const int64_t i = first(c);
      add_product(t, {rows + i * pitch + m, 1, pitch}, right + c * kChunk + i * kPanel, last(c) - i);
      store_tile(t, at);
    });
  }
}

// The parts of dQ and dK that stay inside the chunk, for all value heads at once.
inline void add_inner_products(const Args& a, const Fp32Products& x, const Chunk& s, Gradients& d, bool dq, bool dk) {
  const auto zero_token = [](int64_t) { return int64_t{0}; };
  const auto own = [](int64_t c) { return c; };
  const auto all = [&](int64_t) { return s.L; };
  if (dq) {  // token i takes from the keys before it
    make_right(s.L, d.right, [&](int64_t j, int64_t i) { return s.k_inverse[j] * d.p_gradient[i * kSquare + j]; });
    add_inside(a, x.k, x.pitch, s.L, d.right, d.dq, zero_token,
               [&](int64_t c) { return c + kPanel < s.L ? c + kPanel : s.L; });
  }
  if (dk) {
    make_right(s.L, d.right, [&](int64_t i, int64_t j) { return s.q_inverse[i] * d.p_gradient[i * kSquare + j]; });
    add_inside(a, x.q, x.pitch, s.L, d.right, d.dk, own, all);
    make_right(s.L, d.right,
               [&](int64_t i, int64_t j) { return s.k_inverse[i] * (d.e[i * kSquare + j] + d.e[j * kSquare + i]); });
    add_inside(a, x.k, x.pitch, s.L, d.right, d.dk, zero_token, all);
  }
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
