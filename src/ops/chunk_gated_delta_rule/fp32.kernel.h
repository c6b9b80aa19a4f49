// The products of a chunk in fp32.
#pragma once

#include "ops/chunk_gated_delta_rule/chunk.kernel.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

struct Fp32Products {
  float *q, *k;  // [C][pitch] rows as they came
  float* kt;     // [panels of tokens][K][kPanel] k transposed
  float* step;   // [C][kPanel] V' weighted by its decay to the end
  int64_t pitch;

  static int64_t floats(const Args& a) {
    return 2 * kChunk * row_pitch(a.K) + kSquare * a.K + kChunk * kPanel + 4 * 16;
  }
  void place(const Args& a, float*& memory) {
    pitch = row_pitch(a.K);
    q = take<float>(memory, kChunk * pitch);
    k = take<float>(memory, kChunk * pitch);
    kt = take<float>(memory, kSquare * a.K);
    step = take<float>(memory, kChunk * kPanel);
  }

  // Lower triangle of x k^T, whole panels up to the diagonal.
  void lower_products(const Args& a, const float* x, int64_t L, float* out) const {
    for (int64_t c = 0; c < L; c += kPanel) {
      for_tiles(c, L, [&](int64_t i, auto rows) {  // rows above the panel lie above the diagonal
        Tile<decltype(rows)::value> t;
        clear(t);
        add_product(t, {x + i * pitch, pitch, 1}, kt + c * a.K, a.K);
        store_tile(t, out + i * kSquare + c, kSquare);
      });
    }
  }

  // Reads q and k of a chunk and forms what the value heads share.
  template <class T>
  void open(const Args& a, const Unit& u, Chunk& s) const {
    load_rows(at<const T>(a.k, u.row, s.begin, u.key_head), a.k.token, s.L, a.K, k, pitch, s.k_inverse,
              a.use_qk_l2norm);
    transpose_panels(k, pitch, s.L, a.K, kt);
    lower_products(a, k, s.L, s.kk);
    if (a.q.data != nullptr) {
      load_rows(at<const T>(a.q, u.row, s.begin, u.key_head), a.q.token, s.L, a.K, q, pitch, s.q_inverse,
                a.use_qk_l2norm);
      lower_products(a, q, s.L, s.qk);
    }
  }
  void open_head(const Chunk&) const {}
  void open_column(const Args&, const float*) const {}

  // V' and O of R rows. `from` is the first token that reaches them, kState says whether the incoming state does.
  template <int R, bool kState>
  void solve_rows(const Args& a, Chunk& s, const float* state, int64_t i, int64_t from) const {
    Tile<R> t;
    clear(t);
    if (kState) {
      add_product(t, {k + i * pitch, pitch, 1}, state, a.K);
    }
    write_rows<R, kState>(s, i, t);
    add_product(t, {s.minus_a0 + i * kSquare + from, kSquare, 1}, s.value + from * kPanel, i - from);
    solve_triangle(s, i, t);
    store_tile(t, s.value + i * kPanel);
    if (a.o.data == nullptr) {
      return;
    }
    clear(t);
    if (kState) {
      add_product(t, {q + i * pitch, pitch, 1}, state, a.K);
      scale_rows(t, s.query_factor + i);
    }
    add_product(t, {s.p + i * kSquare + from, kSquare, 1}, s.value + from * kPanel, i - from);
    add_triangle(s, i, t);
    store_tile(t, s.output + i * kPanel);
  }

  // to = the state after the chunk's first `tokens` tokens; `from` is the state before the chunk. A copy
  // of it may go elsewhere.
  void advance(const Args& a, Chunk& s, int64_t tokens, const float* from, float* to, Copy copy = {}) const {
    const int64_t last = tokens - 1;
    const int64_t first = s.gates.first[last];
    float weight[kChunk];
    to_end(s.gates, last, s.k_inverse, weight);
    for (int64_t j = first; j < tokens; ++j) {
      for (int c = 0; c < kPanel; c += kLanes) {
        store(step + j * kPanel + c, set1(weight[j]) * load(s.value + j * kPanel + c));
      }
    }
    for_tiles(0, a.K, [&](int64_t m, auto rows) {
      Tile<decltype(rows)::value> t;
      decayed_state(s, last, from + m * kPanel, t);
      add_product(t, {k + first * pitch + m, 1, pitch}, step + first * kPanel, tokens - first);
      store_state_tile(t, m, to, copy);
    });
  }
};

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
