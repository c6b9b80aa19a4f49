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

#include "ops/chunk_gated_delta_rule/fp32.kernel.h"
#if TIDEGATE_ISA_ID == 4
#include "ops/chunk_gated_delta_rule/bf16.kernel.h"
#endif

namespace tidegate::TIDEGATE_ISA {
namespace {

using chunk_gated_delta_rule::Snapshot;

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

// One unit. T is the type of the data.
template <class T, class Products>
struct Run {
  const Args& a;
  const Unit& u;
  int64_t panels;
  float* states;  // [columns][K][kPanel]
  float* spare;   // [K][kPanel]
  Products x;
  Chunk s;

  static int64_t floats(const Args& a, int64_t columns) {
    return (columns + 1) * (a.K * kPanel + 16) + Products::floats(a) + Chunk::floats();
  }

  Run(const Args& args, const Unit& unit, float* memory) : a(args), u(unit), panels((a.V + kPanel - 1) / kPanel), s{} {
    states = take<float>(memory, (u.last - u.first) * a.K * kPanel);
    spare = take<float>(memory, a.K * kPanel);
    x.place(a, memory);
    s.place(memory);
  }

  // body(value head, its first channel, the state panel)
  template <class Body>
  void for_columns(Body body) {
    for (int64_t c = u.first; c < u.last; ++c) {
      body(u.key_head * a.group + c / panels, c % panels * kPanel, states + (c - u.first) * a.K * kPanel);
    }
  }
  void write(const States& to, int64_t slot, int64_t head, int64_t c0, const float* state) {
    with_state(to, slot, head, [&](auto* p) { store_state(state, to, a.K, c0, a.V, p); });
  }
  float* snapshot_at(int64_t index, int64_t head) {
    return static_cast<float*>(a.snapshots.data) + index * a.snapshots.slot + head * a.snapshots.head;
  }
  void write_snapshot(int64_t index, int64_t head, int64_t c0, const float* state) {
    store_state(state, a.snapshots, a.K, c0, a.V, snapshot_at(index, head));
  }
  // Nobody reads a snapshot soon, and there may be more of them than any cache holds: where memory allows, they are
  // written past the caches.
  Copy streamed_snapshot(int64_t index, int64_t head, int64_t c0) {
    float* p = snapshot_at(index, head);
    const bool can = a.snapshots.value == 1 && can_stream_panel(p, a.snapshots.key, c0, a.V);
    return can ? Copy{p + c0, a.snapshots.key} : Copy{};
  }

  void read_states() {
    for_columns([&](int64_t head, int64_t c0, float* state) {
      if (u.read_slot < 0) {
        memset(state, 0, static_cast<size_t>(a.K * kPanel) * sizeof(float));
      } else {
        with_state(a.initial, u.read_slot, head, [&](auto* p) { load_state(p, a.initial, a.K, c0, a.V, state); });
      }
    });
  }

  // One panel of one value head through the chunk. The snapshots are those that may lie in it.
  void column(int64_t head, int64_t c0, float* state, const Snapshot* snapshot, const Snapshot* snapshots_end) {
    if (a.v.data != nullptr) {
      load_panel(at<const T>(a.v, u.row, s.begin, head), a.v.token, s.L, c0, a.V, s.value);
    } else {
      memset(s.value, 0, static_cast<size_t>(s.L * kPanel) * sizeof(float));
    }
    x.open_column(a, state);
    solve(a, x, s, state);
    if (a.o.data != nullptr) {
      store_panel(s.output, s.L, c0, a.V, at<T>(a.o, u.row, s.begin, head), a.o.token);
    }
    const int64_t start = s.begin - u.begin;
    for (; snapshot != snapshots_end && snapshot->token < start + s.L; ++snapshot) {
      x.advance(a, s, snapshot->token - start, state, spare);
      write_snapshot(snapshot->index, head, c0, spare);
    }
    Copy copy = {};
    if (snapshot != snapshots_end && snapshot->token == start + s.L) {
      copy = streamed_snapshot(snapshot->index, head, c0);
    }
    x.advance(a, s, s.L, state, state, copy);
    for (snapshot += copy.to != nullptr ? 1 : 0; snapshot != snapshots_end && snapshot->token == start + s.L;
         ++snapshot) {
      write_snapshot(snapshot->index, head, c0, state);
    }
  }

  void run() {
    read_states();
    const Snapshot* snapshot = u.snapshots;
    const Snapshot* const snapshots_end = u.snapshots + u.snapshot_count;
    for (; snapshot != snapshots_end && snapshot->token == 0; ++snapshot) {
      for_columns([&](int64_t head, int64_t c0, float* state) { write_snapshot(snapshot->index, head, c0, state); });
    }
    for (s.begin = u.begin; s.begin < u.end; s.begin += kChunk) {
      s.L = u.end - s.begin < kChunk ? u.end - s.begin : kChunk;
      x.template open<T>(a, u, s);
      int64_t open = -1;
      for_columns([&](int64_t head, int64_t c0, float* state) {
        prefetch_next<T>(a, u, s, (state - states) / (a.K * kPanel) + u.first, panels);
        if (head != open) {
          open_head(a, u, head, s);
          x.open_head(s);
          open = head;
        }
        column(head, c0, state, snapshot, snapshots_end);
      });
      while (snapshot != snapshots_end && snapshot->token <= s.begin - u.begin + s.L) {
        ++snapshot;
      }
    }
    if (u.snapshot_count > 0) {
      stream_fence();
    }
    if (u.write_slot >= 0) {
      for_columns([&](int64_t head, int64_t c0, float* state) { write(a.final_state, u.write_slot, head, c0, state); });
    }
  }
};

template <class T, class Products>
void run(const Args& a, const Unit& u, float* memory) noexcept {
  Run<T, Products>(a, u, memory).run();
}
template <class Products>
int64_t workspace(const Args& a, int64_t columns) noexcept {
  return Run<float, Products>::floats(a, columns);
}

}  // namespace

extern const chunk_gated_delta_rule::Kernels chunk_gated_delta_rule_kernels = {
    kChunk,
    kPanel,
    {workspace<Fp32Products>, {run<float, Fp32Products>, run<bf16, Fp32Products>, run<f16, Fp32Products>}},
#if TIDEGATE_ISA_ID == 4
    {workspace<Bf16Products>, {nullptr, run<bf16, Bf16Products>, nullptr}},
#else
    {},  // without the bf16 dot product fp32 is faster, and more accurate
#endif
};

}  // namespace tidegate::TIDEGATE_ISA
