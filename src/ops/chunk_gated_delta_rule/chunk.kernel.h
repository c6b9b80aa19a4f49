// What one chunk of one key head is to its value heads, whatever the precision of its products.
#pragma once

#include "ops/chunk_gated_delta_rule/gates.kernel.h"
#include "ops/chunk_gated_delta_rule/rows.kernel.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using chunk_gated_delta_rule::Unit;

// Columns of the square matrices, a whole number of panels.
constexpr int64_t kSquare = (kChunk + kPanel - 1) / kPanel * kPanel;

// One cache line more than needed: at 512 bytes from row to row the rows of a chunk would share few sets of the cache.
inline int64_t row_pitch(int64_t K) { return (K + 15) / 16 * 16 + 16; }

template <class T>
inline T* take(float*& from, int64_t n) {
  T* p = reinterpret_cast<T*>(from);
  from += (n + 15) / 16 * 16;
  return p;
}

struct Chunk {
  int64_t begin, L;
  float *kk, *qk;                                  // [C][kSquare] lower triangles of K K^T and Q K^T
  float *minus_a0, *p;                             // [C][kSquare] of one value head
  float *value, *output;                           // [C][kPanel] V, then V'; O
  float q_inverse[kChunk], k_inverse[kChunk];      // 1 / length of the rows
  float key_factor[kChunk], query_factor[kChunk];  // of KS and QS
  Gates gates;

  static int64_t floats() { return 4 * kChunk * kSquare + 2 * kChunk * kPanel + 6 * 16; }
  void place(float*& memory) {
    kk = take<float>(memory, kChunk * kSquare);
    qk = take<float>(memory, kChunk * kSquare);
    minus_a0 = take<float>(memory, kChunk * kSquare);
    p = take<float>(memory, kChunk * kSquare);
    value = take<float>(memory, kChunk * kPanel);
    output = take<float>(memory, kChunk * kPanel);
  }
};

// minus_a0 and p of one value head: the squares times gates, lengths and scale.
inline void make_squares(const Args& a, Chunk& s) {
  const Gates& g = s.gates;
  for (int64_t i = 0; i < s.L; ++i) {
    const F32 high = set1(g.high[i]);
    const F32 low = set1(g.low[i]);
    const F32 write = set1(-g.beta[i] * s.k_inverse[i]);
    const F32 read = set1(a.scale * s.q_inverse[i]);
    for (int64_t j = 0; j <= i; j += kLanes) {
      const F32 gap = (high - load(g.high + j)) + (low - load(g.low + j));
      const F32 decay = exp(gap) * load(s.k_inverse + j);
      store(s.minus_a0 + i * kSquare + j, write * decay * load(s.kk + i * kSquare + j));
      store(s.p + i * kSquare + j, read * decay * load(s.qk + i * kSquare + j));
    }
  }
}

// X = beta (V - e^gc KS) in a tile that holds KS.
template <int R, bool kState>
[[gnu::always_inline]] inline void write_rows(const Chunk& s, int64_t i, Tile<R>& t) {
  Tile<R> v;
  load_tile(v, s.value + i * kPanel);
  for (int r = 0; r < R; ++r) {
    const F32 factor = set1(s.key_factor[i + r]);
    const F32 beta = set1(s.gates.beta[i + r]);
    for (int c = 0; c < kTileVectors; ++c) {
      t.v[r][c] = beta * (kState ? v.v[r][c] - factor * t.v[r][c] : v.v[r][c]);
    }
  }
}

// The triangle of the substitution inside a tile.
template <int R>
[[gnu::always_inline]] inline void solve_triangle(const Chunk& s, int64_t i, Tile<R>& t) {
  const float* a0 = s.minus_a0 + i * kSquare + i;
  for (int r = 0; r < R; ++r) {
    for (int below = r + 1; below < R; ++below) {
      const F32 x = set1(a0[below * kSquare + r]);
      for (int c = 0; c < kTileVectors; ++c) {
        t.v[below][c] = fma(x, t.v[r][c], t.v[below][c]);
      }
    }
  }
}

// The triangle of P V' inside a tile, the diagonal included.
template <int R>
[[gnu::always_inline]] inline void add_triangle(const Chunk& s, int64_t i, Tile<R>& o) {
  const float* p = s.p + i * kSquare + i;
  for (int r = 0; r < R; ++r) {
    for (int before = 0; before <= r; ++before) {
      const F32 x = set1(p[r * kSquare + before]);
      for (int c = 0; c < kTileVectors; ++c) {
        o.v[r][c] = fma(x, load(s.value + (i + before) * kPanel + c * kLanes), o.v[r][c]);
      }
    }
  }
}

// Where a panel of the state also goes, past the caches and row by row while the rows are computed; null: nowhere.
struct Copy {
  float* to;
  int64_t step;
};
template <int R>
[[gnu::always_inline]] inline void store_state_tile(const Tile<R>& t, int64_t row, float* to, Copy copy) {
  store_tile(t, to + row * kPanel);
  for (int r = 0; r < R && copy.to != nullptr; ++r) {
    for (int c = 0; c < kTileVectors; ++c) {
      stream(copy.to + (row + r) * copy.step + c * kLanes, t.v[r][c]);
    }
  }
}

// The state times its decay over the chunk's first tokens, or nothing if a reset lies among them.
template <int R>
[[gnu::always_inline]] inline void decayed_state(const Chunk& s, int64_t last, const float* from, Tile<R>& t) {
  clear(t);
  if (s.gates.reset[last]) {
    return;
  }
  const F32 decay = set1(s.gates.from_start[last]);
  load_tile(t, from);
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < kTileVectors; ++c) {
      t.v[r][c] = decay * t.v[r][c];
    }
  }
}

// Row by row where a reset cuts the chunk: what it cuts off is not added at all, so a NaN before it cannot pass.
template <class Products>
inline void solve(const Args& a, const Products& x, Chunk& s, const float* state) {
  if (!s.gates.any_reset) {
    for_tiles(0, s.L,
              [&](int64_t i, auto rows) { x.template solve_rows<decltype(rows)::value, true>(a, s, state, i, 0); });
    return;
  }
  for (int64_t i = 0; i < s.L; ++i) {
    if (s.gates.reset[i]) {
      x.template solve_rows<1, false>(a, s, state, i, s.gates.first[i]);
    } else {
      x.template solve_rows<1, true>(a, s, state, i, 0);
    }
  }
}

// Gates, factors and squares of one value head.
inline void open_head(const Args& a, const Unit& u, int64_t head, Chunk& s) {
  make_gates(a, u.row, s.begin, s.L, head, s.gates);
  for_lanes(s.L, [&](int64_t i, auto lanes) {
    const F32 decay = lanes.get(s.gates.from_start + i);
    lanes.put(s.key_factor + i, decay * lanes.get(s.k_inverse + i));
    lanes.put(s.query_factor + i, set1(a.scale) * decay * lanes.get(s.q_inverse + i));
  });
  make_squares(a, s);
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
