// The gated delta rule, chunk by chunk, with the state in cache. For a chunk of L tokens and one value head
//
//   KS = K S, QS = Q S                       products with the state S [K,V] at the chunk's start
//   X  = beta (V - e^gc KS)
//   V' + A0 V' = X                           A0_ij = beta_i e^(gc_i - gc_j) <k_i, k_j>, j < i: forward substitution
//   O  = scale (e^gc QS + P V')              P_ij = e^(gc_i - gc_j) <q_i, k_j>, j <= i
//   S <- e^gl S + K^T (e^(gl - gc) V')
//
// K K^T and Q K^T are formed once for all value heads of a key head. Rows of q and k stay as they came; the lengths
// that the l2norm divides by are factors of rows and columns, like the gates. All of it runs panel by panel: kPanel
// columns of V at a time never meet another panel, so a panel of S and one of V' live in the first cache.
//
// Token i adds up tokens j <= i and nothing else, so a NaN cannot reach an earlier token.
#include "ops/chunk_gated_delta_rule/kernel.h"

#include "ops/chunk_gated_delta_rule/gates.kernel.h"
#include "ops/chunk_gated_delta_rule/rows.kernel.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using chunk_gated_delta_rule::Snapshot;
using chunk_gated_delta_rule::Unit;

// Columns of the square matrices, a whole number of panels.
constexpr int64_t kSquare = (kChunk + kPanel - 1) / kPanel * kPanel;

// One cache line more than needed: at 512 bytes from row to row the rows of a chunk would share few sets of the cache.
inline int64_t row_pitch(int64_t K) { return (K + 15) / 16 * 16 + 16; }

struct Chunk {
  int64_t begin, L;
  float *q, *k;                  // [C][pitch] rows as they came
  float* kt;                     // [panels][K][kPanel] k transposed
  float *kk, *qk;                // [C][kSquare] lower triangles of K K^T and Q K^T
  float *minus_a0, *p;           // [C][kSquare] of one value head
  float *value, *output, *step;  // [C][kPanel] V, then V'; O; V' weighted
  float* state;                  // [columns][K][kPanel]
  float q_inverse[kChunk], k_inverse[kChunk];
  float key_factor[kChunk], query_factor[kChunk];  // of KS and QS
  Gates gates;
};

inline float* take(float*& from, int64_t n) {
  float* p = from;
  from += (n + 15) / 16 * 16;
  return p;
}

int64_t workspace(const Args& a, int64_t columns) noexcept {
  return (columns + kSquare / kPanel) * a.K * kPanel + 2 * kChunk * row_pitch(a.K) + 4 * kChunk * kSquare +
         3 * kChunk * kPanel + 16 * 16;
}

// Lower triangle of x k^T for the rows of a chunk, whole panels up to the diagonal.
inline void lower_products(const float* x, int64_t pitch, const float* kt, int64_t K, int64_t L, float* out) {
  for (int64_t c = 0; c < L; c += kPanel) {
    // Rows above the panel lie above the diagonal.
    for_tiles(c, L, [&](int64_t i, auto rows) {
      Tile<decltype(rows)::value> t;
      clear(t);
      add_product(t, {x + i * pitch, pitch, 1}, kt + c * K, K);
      store_tile(t, out + i * kSquare + c, kSquare);
    });
  }
}

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

// V' and O of R rows. `from` is the first token that reaches them, kState says whether the incoming state does.
template <int R, bool kState>
inline void solve_rows(const Args& a, Chunk& s, const float* state, int64_t i, int64_t from, bool outputs) {
  const int64_t pitch = row_pitch(a.K);
  float* value = s.value + i * kPanel;
  Tile<R> t;
  Tile<R> v;
  clear(t);
  if (kState) {
    add_product(t, {s.k + i * pitch, pitch, 1}, state, a.K);
  }
  load_tile(v, value);
  for (int r = 0; r < R; ++r) {
    const F32 factor = set1(s.key_factor[i + r]);
    const F32 beta = set1(s.gates.beta[i + r]);
    for (int c = 0; c < kTileVectors; ++c) {
      t.v[r][c] = beta * (kState ? v.v[r][c] - factor * t.v[r][c] : v.v[r][c]);
    }
  }
  const float* a0 = s.minus_a0 + i * kSquare;
  add_product(t, {a0 + from, kSquare, 1}, s.value + from * kPanel, i - from);
  for (int r = 0; r < R; ++r) {  // the triangle inside the tile
    for (int below = r + 1; below < R; ++below) {
      const F32 x = set1(a0[below * kSquare + i + r]);
      for (int c = 0; c < kTileVectors; ++c) {
        t.v[below][c] = fma(x, t.v[r][c], t.v[below][c]);
      }
    }
  }
  store_tile(t, value);
  if (!outputs) {
    return;
  }
  const float* p = s.p + i * kSquare;
  Tile<R> o;
  clear(o);
  if (kState) {
    add_product(o, {s.q + i * pitch, pitch, 1}, state, a.K);
    scale_rows(o, s.query_factor + i);
  }
  add_product(o, {p + from, kSquare, 1}, s.value + from * kPanel, i - from);
  for (int r = 0; r < R; ++r) {
    for (int before = 0; before <= r; ++before) {
      const F32 x = set1(p[r * kSquare + i + before]);
      for (int c = 0; c < kTileVectors; ++c) {
        o.v[r][c] = fma(x, load(value + before * kPanel + c * kLanes), o.v[r][c]);
      }
    }
  }
  store_tile(o, s.output + i * kPanel);
}

// Row by row where a reset cuts the chunk: what it cuts off is not added at all, so a NaN before it cannot pass.
inline void solve(const Args& a, Chunk& s, const float* state, bool outputs) {
  if (!s.gates.any_reset) {
    for_tiles(0, s.L,
              [&](int64_t i, auto rows) { solve_rows<decltype(rows)::value, true>(a, s, state, i, 0, outputs); });
    return;
  }
  for (int64_t i = 0; i < s.L; ++i) {
    if (s.gates.reset[i]) {
      solve_rows<1, false>(a, s, state, i, s.gates.first[i], outputs);
    } else {
      solve_rows<1, true>(a, s, state, i, 0, outputs);
    }
  }
}

// to = the state after the chunk's first `tokens` tokens; `from` is the state before the chunk.
inline void advance(const Args& a, Chunk& s, int64_t tokens, const float* from, float* to) {
  const int64_t pitch = row_pitch(a.K);
  const int64_t last = tokens - 1;
  const int64_t first = s.gates.first[last];
  const bool keep = !s.gates.reset[last];
  float weight[kChunk];
  to_end(s.gates, last, s.k_inverse, weight);
  for (int64_t j = first; j < tokens; ++j) {
    for (int c = 0; c < kPanel; c += kLanes) {
      store(s.step + j * kPanel + c, set1(weight[j]) * load(s.value + j * kPanel + c));
    }
  }
  const F32 decay = set1(s.gates.from_start[last]);
  for_tiles(0, a.K, [&](int64_t m, auto rows) {
    constexpr int R = decltype(rows)::value;
    Tile<R> t;
    clear(t);
    if (keep) {
      load_tile(t, from + m * kPanel);
      for (int r = 0; r < R; ++r) {
        for (int c = 0; c < kTileVectors; ++c) {
          t.v[r][c] = decay * t.v[r][c];
        }
      }
    }
    add_product(t, {s.k + first * pitch + m, 1, pitch}, s.step + first * kPanel, tokens - first);
    store_tile(t, to + m * kPanel);
  });
}

// Reads q and k of a chunk and forms what the value heads share.
template <class T>
inline void open_chunk(const Args& a, const Unit& u, Chunk& s) {
  const int64_t pitch = row_pitch(a.K);
  load_rows(at<const T>(a.k, u.row, s.begin, u.key_head), a.k.token, s.L, a.K, s.k, pitch, s.k_inverse,
            a.use_qk_l2norm);
  for (int64_t c = 0; c < s.L; c += kPanel) {
    transpose(s.k + c * pitch, pitch, s.L - c < kPanel ? s.L - c : kPanel, a.K, s.kt + c * a.K, kPanel);
  }
  lower_products(s.k, pitch, s.kt, a.K, s.L, s.kk);
  if (a.o.data != nullptr) {
    load_rows(at<const T>(a.q, u.row, s.begin, u.key_head), a.q.token, s.L, a.K, s.q, pitch, s.q_inverse,
              a.use_qk_l2norm);
    lower_products(s.q, pitch, s.kt, a.K, s.L, s.qk);
  }
}

// Rows of a tensor that lie far apart in memory are out of reach of the hardware's prefetching, so a share of the next
// chunk is asked for while a column of this one is computed.
template <class T>
inline void prefetch_rows(const T* rows, int64_t step, int64_t first, int64_t last, int64_t width) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t r = first; r < last; ++r) {
    for (int64_t c = 0; c < width; c += kLine) {
      prefetch(rows + r * step + c);
    }
  }
}
template <class T>
inline void prefetch_next(const Args& a, const Unit& u, const Chunk& s, int64_t column, int64_t panels) {
  const int64_t begin = s.begin + kChunk;
  const int64_t rows = u.end - begin < kChunk ? u.end - begin : kChunk;
  if (rows <= 0) {
    return;
  }
  const int64_t columns = u.last - u.first;
  const int64_t first = rows * (column - u.first) / columns;
  const int64_t last = rows * (column - u.first + 1) / columns;
  prefetch_rows(at<const T>(a.k, u.row, begin, u.key_head), a.k.token, first, last, a.K);
  if (a.o.data != nullptr) {
    prefetch_rows(at<const T>(a.q, u.row, begin, u.key_head), a.q.token, first, last, a.K);
  }
  for (int64_t h = u.first / panels; a.v.data != nullptr && h <= (u.last - 1) / panels; ++h) {
    prefetch_rows(at<const T>(a.v, u.row, begin, u.key_head * a.group + h), a.v.token, first, last, a.V);
  }
}

inline void open_head(const Args& a, const Unit& u, int64_t head, Chunk& s) {
  make_gates(a, u.row, s.begin, s.L, head, s.gates);
  for_lanes(s.L, [&](int64_t i, auto lanes) {
    const F32 decay = lanes.get(s.gates.from_start + i);
    lanes.put(s.key_factor + i, decay * lanes.get(s.k_inverse + i));
    lanes.put(s.query_factor + i, set1(a.scale) * decay * lanes.get(s.q_inverse + i));
  });
  make_squares(a, s);
}

template <class T>
void run(const Args& a, const Unit& u, float* memory) noexcept {
  const int64_t panels = (a.V + kPanel - 1) / kPanel;
  Chunk s = {};
  s.q = take(memory, kChunk * row_pitch(a.K));
  s.k = take(memory, kChunk * row_pitch(a.K));
  s.kt = take(memory, kSquare * a.K);
  s.kk = take(memory, kChunk * kSquare);
  s.qk = take(memory, kChunk * kSquare);
  s.minus_a0 = take(memory, kChunk * kSquare);
  s.p = take(memory, kChunk * kSquare);
  s.value = take(memory, kChunk * kPanel);
  s.output = take(memory, kChunk * kPanel);
  s.step = take(memory, kChunk * kPanel);
  s.state = take(memory, (u.last - u.first) * a.K * kPanel);

  const auto for_columns = [&](auto body) {
    for (int64_t c = u.first; c < u.last; ++c) {
      body(u.key_head * a.group + c / panels, c % panels * kPanel, s.state + (c - u.first) * a.K * kPanel);
    }
  };
  for_columns([&](int64_t head, int64_t c0, float* state) {
    if (u.read_slot < 0) {
      memset(state, 0, static_cast<size_t>(a.K * kPanel) * sizeof(float));
    } else {
      with_state(a.initial, u.read_slot, head, [&](auto* from) { load_state(from, a.initial, a.K, c0, a.V, state); });
    }
  });

  const Snapshot* snapshot = u.snapshots;
  const Snapshot* const snapshots_end = u.snapshots + u.snapshot_count;
  const auto write_snapshot = [&](const Snapshot& at, int64_t head, int64_t c0, const float* state) {
    with_state(a.snapshots, at.index, head, [&](auto* to) { store_state(state, a.snapshots, a.K, c0, a.V, to); });
  };
  for (; snapshot != snapshots_end && snapshot->token == 0; ++snapshot) {
    for_columns([&](int64_t head, int64_t c0, float* state) { write_snapshot(*snapshot, head, c0, state); });
  }
  for (s.begin = u.begin; s.begin < u.end; s.begin += kChunk) {
    s.L = u.end - s.begin < kChunk ? u.end - s.begin : kChunk;
    open_chunk<T>(a, u, s);
    int64_t open = -1;
    for_columns([&](int64_t head, int64_t c0, float* state) {
      prefetch_next<T>(a, u, s, (state - s.state) / (a.K * kPanel) + u.first, panels);
      if (head != open) {
        open_head(a, u, head, s);
        open = head;
      }
      if (a.v.data != nullptr) {
        load_panel(at<const T>(a.v, u.row, s.begin, head), a.v.token, s.L, c0, a.V, s.value);
      } else {
        memset(s.value, 0, static_cast<size_t>(s.L * kPanel) * sizeof(float));
      }
      solve(a, s, state, a.o.data != nullptr);
      if (a.o.data != nullptr) {
        store_panel(s.output, s.L, c0, a.V, at<T>(a.o, u.row, s.begin, head), a.o.token);
      }
      const int64_t start = s.begin - u.begin;
      for (const Snapshot* at = snapshot; at != snapshots_end && at->token < start + s.L; ++at) {
        advance(a, s, at->token - start, state, s.kt);  // k^T has done its work in this chunk
        write_snapshot(*at, head, c0, s.kt);
      }
      advance(a, s, s.L, state, state);
      for (const Snapshot* at = snapshot; at != snapshots_end && at->token <= start + s.L; ++at) {
        if (at->token == start + s.L) {
          write_snapshot(*at, head, c0, state);
        }
      }
    });
    while (snapshot != snapshots_end && snapshot->token <= s.begin - u.begin + s.L) {
      ++snapshot;
    }
  }
  if (u.write_slot >= 0) {
    for_columns([&](int64_t head, int64_t c0, float* state) {
      with_state(a.final_state, u.write_slot, head,
                 [&](auto* to) { store_state(state, a.final_state, a.K, c0, a.V, to); });
    });
  }
}

}  // namespace

extern const chunk_gated_delta_rule::Kernels chunk_gated_delta_rule_kernels = {
    kChunk, kPanel, workspace, {run<float>, run<bf16>, run<f16>}};

}  // namespace tidegate::TIDEGATE_ISA
