// The products of a chunk with bf16 dot products, for data of type bf16. Two neighbouring inner steps form a pair: two
// channels in the products with the state and in K K^T, two tokens in the others. Sums, state and the triangles on the
// diagonal stay fp32; q, k and v are exact, the state, A0, P and V' are rounded to bf16 as factors.
//
// A pair must not bring in a token that does not belong: tiles begin at even tokens, and where a sum begins or ends in
// the middle of a pair the other half is 0 in both factors.
#pragma once

#include "ops/chunk_gated_delta_rule/chunk.kernel.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

static_assert(kTileRows % 2 == 0 && kChunk % 2 == 0);

struct Bf16Products {
  bf16 *q, *k;         // [C][pitch] pairs of channels, rows as they came
  bf16* kt;            // [panels of tokens][channel pairs][kPanel] pairs
  bf16* k_pairs;       // [C/2][token_pitch] pairs of tokens
  bf16* edge;          // [2][token_pitch] the first and the last pair of a sum, one half of it 0
  bf16* state_pairs;   // [channel pairs][kPanel] pairs
  bf16 *minus_a0, *p;  // [C][kSquare]
  bf16 *value, *step;  // [C/2][kPanel] pairs of V' and of V' weighted by its decay to the end
  int64_t pairs;       // of channels
  int64_t pitch, token_pitch;

  static int64_t floats(const Args& a) {
    const int64_t pairs = (a.K + 1) / 2;
    return 2 * kChunk * row_pitch(pairs) + kSquare * pairs + (kChunk / 2 + 2) * row_pitch(a.K) + pairs * kPanel +
           kChunk * kSquare + kChunk * kPanel + 10 * 16;
  }
  void place(const Args& a, float*& memory) {  // a pair has the size of a float
    pairs = (a.K + 1) / 2;
    pitch = row_pitch(pairs);
    token_pitch = row_pitch(a.K);
    q = take<bf16>(memory, kChunk * pitch);
    k = take<bf16>(memory, kChunk * pitch);
    kt = take<bf16>(memory, kSquare * pairs);
    k_pairs = take<bf16>(memory, kChunk / 2 * token_pitch);
    edge = take<bf16>(memory, 2 * token_pitch);
    state_pairs = take<bf16>(memory, pairs * kPanel);
    minus_a0 = take<bf16>(memory, kChunk * kSquare / 2);
    p = take<bf16>(memory, kChunk * kSquare / 2);
    value = take<bf16>(memory, kChunk / 2 * kPanel);
    step = take<bf16>(memory, kChunk / 2 * kPanel);
  }

  void load(const Heads& t, const Args& a, const Unit& u, const Chunk& s, bf16* to, float* inverse) const {
    for (int64_t r = 0; r < s.L; ++r) {
      const bf16* x = at<const bf16>(t, u.row, s.begin + r, u.key_head);
      bf16* y = to + 2 * r * pitch;
      y[2 * pairs - 1] = {0};
      memcpy(y, x, static_cast<size_t>(a.K) * sizeof(bf16));
      inverse[r] = a.use_qk_l2norm ? 1.0f / __builtin_sqrtf(sum_squares(x, a.K) + kEps) : 1.0f;
    }
  }

  // Lower triangle of x k^T, whole panels up to the diagonal.
  void lower_products(const bf16* x, int64_t L, float* out) const {
    for (int64_t c = 0; c < L; c += kPanel) {
      for_tiles(c, L, [&](int64_t i, auto rows) {
        Tile<decltype(rows)::value> t;
        clear(t);
        add_product(t, LeftPairs{x + 2 * i * pitch, pitch, 1}, kt + 2 * c * pairs, pairs);
        store_tile(t, out + i * kSquare + c, kSquare);
      });
    }
  }

  template <class T>
  void open(const Args& a, const Unit& u, Chunk& s) const {
    load(a.k, a, u, s, k, s.k_inverse);
    for (int64_t c = 0; c < s.L; ++c) {  // pairs of channels keep together
      for (int64_t m = 0; m < pairs; ++m) {
        memcpy(kt + 2 * ((c / kPanel * pairs + m) * kPanel + c % kPanel), k + 2 * (c * pitch + m), 2 * sizeof(bf16));
      }
    }
    for (int64_t j = 0; j < s.L; j += 2) {
      const bf16* even = k + 2 * j * pitch;
      const bf16* odd = even + 2 * pitch;
      bf16* to = k_pairs + j * token_pitch;
      for (int64_t m = 0; m < a.K; ++m) {
        to[2 * m] = even[m];
        to[2 * m + 1] = j + 1 < s.L ? odd[m] : bf16{0};
      }
    }
    lower_products(k, s.L, s.kk);
    if (a.o.data != nullptr) {
      load(a.q, a, u, s, q, s.q_inverse);
      lower_products(q, s.L, s.qk);
    }
  }

  void open_head(const Chunk& s) const {
    for (int64_t i = 0; i < s.L; ++i) {
      for (int64_t j = 0; j < i; j += kLanes) {
        store(minus_a0 + i * kSquare + j, TIDEGATE_ISA::load(s.minus_a0 + i * kSquare + j));
        store(p + i * kSquare + j, TIDEGATE_ISA::load(s.p + i * kSquare + j));
      }
    }
  }
  void open_column(const Args& a, const float* state) const {
    for (int64_t m = 0; m < a.K; m += 2) {
      for (int c = 0; c < kPanel; c += kLanes) {
        const F32 even = TIDEGATE_ISA::load(state + m * kPanel + c);
        const F32 odd = m + 1 < a.K ? TIDEGATE_ISA::load(state + (m + 1) * kPanel + c) : zero();
        store2(state_pairs + m * kPanel + 2 * c, {even, odd});
      }
    }
  }

  // A single row (kState or not, from any token) adds its chunk in fp32; tiles, which begin at even tokens and see the
  // whole chunk, in pairs.
  template <int R>
  [[gnu::always_inline]] void add_chunk(const float* wide, const bf16* narrow, const Chunk& s, int64_t i, int64_t from,
                                        Tile<R>& t) const {
    if (s.gates.any_reset) {
      add_product(t, Left{wide + i * kSquare + from, kSquare, 1}, s.value + from * kPanel, i - from);
    } else {
      add_product(t, LeftPairs{narrow + i * kSquare, kSquare / 2, 1}, value, i / 2);
    }
  }

  template <int R, bool kState>
  void solve_rows(const Args& a, Chunk& s, const float*, int64_t i, int64_t from) const {
    Tile<R> t;
    clear(t);
    if (kState) {
      add_product(t, LeftPairs{k + 2 * i * pitch, pitch, 1}, state_pairs, pairs);
    }
    write_rows<R, kState>(s, i, t);
    add_chunk(s.minus_a0, minus_a0, s, i, from, t);
    solve_triangle(s, i, t);
    store_tile(t, s.value + i * kPanel);
    for (int r = 0; r < R && !s.gates.any_reset; r += 2) {
      for (int c = 0; c < kTileVectors; ++c) {
        store2(value + (i + r) * kPanel + 2 * c * kLanes, {t.v[r][c], r + 1 < R ? t.v[r + 1][c] : zero()});
      }
    }
    if (a.o.data == nullptr) {
      return;
    }
    clear(t);
    if (kState) {
      add_product(t, LeftPairs{q + 2 * i * pitch, pitch, 1}, state_pairs, pairs);
      scale_rows(t, s.query_factor + i);
    }
    add_chunk(s.p, p, s, i, from, t);
    add_triangle(s, i, t);
    store_tile(t, s.output + i * kPanel);
  }

  // One half of every pair of a row of k_pairs.
  void cut(const bf16* row, int half, int64_t K, bf16* to) const {
    for (int64_t m = 0; m < K; ++m) {
      to[2 * m + half] = row[2 * m + half];
      to[2 * m + 1 - half] = {0};
    }
  }

  void advance(const Args& a, Chunk& s, int64_t tokens, const float* from, float* to, Copy copy = {}) const {
    const int64_t last = tokens - 1;
    const int64_t first = s.gates.first[last];
    float weight[kChunk];
    to_end(s.gates, last, s.k_inverse, weight);
    for (int64_t j = first & ~int64_t{1}; j < tokens; j += 2) {
      for (int c = 0; c < kPanel; c += kLanes) {
        const auto weighted = [&](int64_t row) {
          return row >= first && row < tokens ? set1(weight[row]) * TIDEGATE_ISA::load(s.value + row * kPanel + c)
                                              : zero();
        };
        store2(step + j * kPanel + 2 * c, {weighted(j), weighted(j + 1)});
      }
    }
    const int64_t whole = (first + 1) / 2;  // pairs [whole, end) belong to the sum with both halves
    const int64_t end = tokens / 2;
    if (first % 2 == 1) {
      cut(k_pairs + 2 * (first / 2) * token_pitch, 1, a.K, edge);
    }
    if (tokens % 2 == 1) {
      cut(k_pairs + 2 * end * token_pitch, 0, a.K, edge + 2 * token_pitch);
    }
    for_tiles(0, a.K, [&](int64_t m, auto rows) {
      Tile<decltype(rows)::value> t;
      decayed_state(s, last, from + m * kPanel, t);
      if (first % 2 == 1) {
        add_product(t, LeftPairs{edge + 2 * m, 1, token_pitch}, step + (first - 1) * kPanel, 1);
      }
      add_product(t, LeftPairs{k_pairs + 2 * (whole * token_pitch + m), 1, token_pitch}, step + 2 * whole * kPanel,
                  end - whole);
      if (tokens % 2 == 1) {
        add_product(t, LeftPairs{edge + 2 * (token_pitch + m), 1, token_pitch}, step + 2 * end * kPanel, 1);
      }
      store_state_tile(t, m, to, copy);
    });
  }
};

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
