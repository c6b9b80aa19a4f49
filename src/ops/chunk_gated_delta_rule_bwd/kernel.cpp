// The gradients of the gated delta rule, chunk by chunk from the last to the first. chunk.kernel.h has the formulas.
//
// The states at the chunks' starts come from the forward pass: it leaves one for every group of chunks, the others and
// V' are computed again, a group at a time. So a sequence of any length needs the workspace of one group.
#include "ops/chunk_gated_delta_rule_bwd/kernel.h"

#include "ops/chunk_gated_delta_rule_bwd/gates.kernel.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using delta_rule_gradient::kGroupTokens;
constexpr int64_t kGroupChunks = kGroupTokens / kChunk;
static_assert(kGroupTokens % kChunk == 0);

template <class T>
struct Run {
  const delta_rule_gradient::Args& all;
  const Args& a;
  const delta_rule_gradient::Unit& u;
  const bool gates, dq, dk, values;  // what has to be formed
  int64_t panels;                    // of V
  int64_t state_size;                // floats of the states of one chunk, all value heads
  int64_t value_size;                // floats of V' of one chunk, all value heads
  float *states, *primes;            // [chunks of a group] of these
  float* D;
  Fp32Products x;
  Chunk s;
  Gradients d;

  static int64_t floats(const Args& a) {
    const int64_t width = a.group * whole_panels(a.V);
    return (kGroupChunks + 1) * (a.K * width + 16) + kGroupChunks * (kChunk * width + 16) + Fp32Products::floats(a) +
           Chunk::floats() + Gradients::floats(a);
  }

  Run(const delta_rule_gradient::Args& args, const delta_rule_gradient::Unit& unit, float* memory)
      : all(args),
        a(args.rule),
        u(unit),
        gates(all.dg.at.data != nullptr || all.sums != nullptr),
        dq(all.dq.data != nullptr || gates),
        dk(all.dk.data != nullptr || all.dbeta.at.data != nullptr || gates),
        values(dq || dk),
        panels(panel_count(a.V)),
        state_size(a.group * panels * a.K * kPanel),
        value_size(a.group * panels * kChunk * kPanel),
        s{} {
    states = take<float>(memory, kGroupChunks * state_size);
    primes = take<float>(memory, kGroupChunks * value_size);
    D = take<float>(memory, state_size);
    x.place(a, memory);
    s.place(memory);
    d.place(a, memory);
  }

  // body(value head, first channel, panel of a state, panel of V') of the matrices of one chunk
  template <class Body>
  void for_columns(float* state, float* prime, Body body) {
    for (int64_t c = 0; c < a.group * panels; ++c) {
      body(u.key_head * a.group + c / panels, c % panels * kPanel, state + c * a.K * kPanel,
           prime + c * kChunk * kPanel);
    }
  }
  void load_all(const States& from, int64_t slot, float* to) {
    if (slot < 0 || from.data == nullptr) {
      memset(to, 0, static_cast<size_t>(state_size) * sizeof(float));
      return;
    }
    for_columns(to, primes, [&](int64_t head, int64_t c0, float* panel, float*) {
      with_state(from, slot, head, [&](auto* p) { load_state(p, from, a.K, c0, a.V, panel); });
    });
  }

  void open_chunk(int64_t begin, int64_t end) {
    s.begin = begin;
    s.L = end - begin < kChunk ? end - begin : kChunk;
  }

  // States at the starts of the group's chunks, and V'.
  void recompute(int64_t begin, int64_t end, int64_t slot, const States& from) {
    load_all(from, slot, states);
    chunk_gated_delta_rule::Args keys = a;
    keys.q = {};
    const chunk_gated_delta_rule::Unit unit{u.row, u.begin, u.end, 0, 0, u.key_head, 0, 0, nullptr, 0};
    for (int64_t c = 0; begin + c * kChunk < end; ++c) {
      open_chunk(begin + c * kChunk, end);
      x.template open<T>(keys, unit, s);
      int64_t open = -1;
      float* own = s.value;
      for_columns(states + c * state_size, primes + c * value_size,
                  [&](int64_t head, int64_t c0, float* state, float* prime) {
                    if (head != open) {
                      open_head(keys, unit, head, s);
                      open = head;
                    }
                    s.value = prime;
                    load_panel(at<const T>(a.v, u.row, s.begin, head), a.v.token, s.L, c0, a.V, prime);
                    solve(keys, x, s, state);
                    if (s.begin + s.L < end) {
                      x.advance(a, s, s.L, state, state + state_size);
                    }
                  });
      s.value = own;
    }
  }

  // dX of one value head, and what follows from it at once: dV and its part of dbeta.
  void solve_head(int64_t head, const float* gradient, GateSums& sums) {
    float* v = s.value;
    float strengths[kChunk][kLanes] = {};
    for (int64_t p = 0; p < panels; ++p) {
      float* d_o = d.d_o + p * kChunk * kPanel;
      float* d_x = d.d_x + p * kChunk * kPanel;
      if (all.o_gradient.data != nullptr) {
        load_panel(at<const T>(all.o_gradient, u.row, s.begin, head), all.o_gradient.token, s.L, p * kPanel, a.V, d_o);
      } else {
        memset(d_o, 0, static_cast<size_t>(s.L * kPanel) * sizeof(float));
      }
      solve_gradient(a, x, s, d.key_weight, gradient + p * a.K * kPanel, d_o, d_x);
      if (all.dbeta.at.data != nullptr) {
        load_panel(at<const T>(a.v, u.row, s.begin, head), a.v.token, s.L, p * kPanel, a.V, v);
        for (int64_t i = 0; i < s.L; ++i) {
          for (int c = 0; c < kPanel; c += kLanes) {
            store(strengths[i], fma(load(d_x + i * kPanel + c), load(v + i * kPanel + c), load(strengths[i])));
          }
        }
      }
      if (all.dv.data != nullptr) {
        for (int64_t i = 0; i < s.L; ++i) {
          for (int c = 0; c < kPanel; c += kLanes) {
            store(v + i * kPanel + c, set1(s.gates.beta[i]) * load(d_x + i * kPanel + c));
          }
        }
        store_panel(v, s.L, p * kPanel, a.V, at<T>(all.dv, u.row, s.begin, head), all.dv.token);
      }
    }
    for (int64_t i = 0; i < s.L; ++i) {
      sums.beta[i] += static_cast<double>(sum(load(strengths[i])));
    }
  }

  // One value head through the chunk. D goes from the chunk's end to its start.
  void head_back(int64_t head, const float* state, const float* prime, float* gradient) {
    make_gates(a, u.row, s.begin, s.L, head, s.gates);
    make_decays(a, s, d);
    make_factors(a, s, d);
    GateSums sums = {};
    Dots dots = {};
    solve_head(head, gradient, sums);
    if (values) {
      turn_panels(prime, panels, s.L, d.v_turned);
      turn_panels(d.d_x, panels, s.L, d.x_turned);
      turn_panels(d.d_o, panels, s.L, d.o_turned);
      lower_across(d, d.d_o, s.L, d.U);
      lower_across(d, d.d_x, s.L, d.W);
      add_triangles(a, s, d, sums);
      add_state_products(a, d, s.L, state, gradient, dq, dk, dots);
    }
    const int64_t last = s.L - 1;
    const float decay = s.gates.reset[last] ? 0.0f : s.gates.from_start[last];
    float state_dot = 0.0f;
    for (int64_t p = 0; p < panels; ++p) {
      float* d_o = d.d_o + p * kChunk * kPanel;
      float* d_x = d.d_x + p * kChunk * kPanel;
      weigh_rows(d_o, s.query_factor, s.L);
      weigh_rows(d_x, d.x_weight, s.L);
      float* D_panel = gradient + p * a.K * kPanel;
      state_dot += carry_back(a, x, s.L, decay, values ? state + p * a.K * kPanel : D_panel, d_o, d_x, D_panel);
    }
    add_state_dots(s, d, dots, state_dot, sums);
    write_gates(head, sums);
  }

  void write_gates(int64_t head, const GateSums& sums) {
    float out[kChunk];
    if (gates) {
      sum_gates(s, sums.gc, out);
      if (a.rate != nullptr) {
        double* totals = all.sums == nullptr ? nullptr : all.sums + (u.sequence * all.head_count + head) * 2;
        raw_gate_gradient(a, u.row, s.begin, s.L, head, out, totals);
      }
      if (all.dg.at.data != nullptr) {
        store_gates(out, s.L, all.dg, u.row, s.begin, head);
      }
    }
    if (all.dbeta.at.data != nullptr) {
      for (int64_t i = 0; i < s.L; ++i) {
        out[i] = static_cast<float>(sums.beta[i]);
      }
      if (a.beta_sigmoid) {
        raw_beta_gradient(a, s.L, s.gates.beta, out);
      }
      store_gates(out, s.L, all.dbeta, u.row, s.begin, head);
    }
  }

  void chunk_back(const float* state, const float* prime) {
    const chunk_gated_delta_rule::Unit unit{u.row, u.begin, u.end, 0, 0, u.key_head, 0, 0, nullptr, 0};
    x.template open<T>(a, unit, s);
    transpose_panels(x.k, x.pitch, s.L, a.K, d.k_turned);
    transpose_panels(x.q, x.pitch, s.L, a.K, d.q_turned);
    const auto clear_floats = [](float* p, int64_t n) { memset(p, 0, static_cast<size_t>(n) * sizeof(float)); };
    clear_floats(d.dq, kSquare * a.K);
    clear_floats(d.dk, kSquare * a.K);
    clear_floats(d.p_gradient, kChunk * kSquare);
    clear_floats(d.e, kChunk * kSquare);
    for (int64_t h = 0; h < a.group; ++h) {
      head_back(u.key_head * a.group + h, state + h * panels * a.K * kPanel, prime + h * panels * kChunk * kPanel,
                D + h * panels * a.K * kPanel);
    }
    add_inner_products(a, x, s, d, all.dq.data != nullptr, all.dk.data != nullptr);
    if (all.dq.data != nullptr) {
      write_rows_back(x.q, s.q_inverse, d.dq, all.dq);
    }
    if (all.dk.data != nullptr) {
      write_rows_back(x.k, s.k_inverse, d.dk, all.dk);
    }
  }

  // Through the norm: d raw = inverse (d - n <n, d>), n = inverse raw.
  void write_rows_back(const float* raw, const float* inverse, const float* turned, const Heads& to) {
    for (int64_t c = 0; c < s.L; c += kPanel) {
      transpose(turned + c * a.K, kPanel, a.K, kPanel, d.rows + c * x.pitch, x.pitch);
    }
    for (int64_t i = 0; i < s.L; ++i) {
      const float* row = d.rows + i * x.pitch;
      const float* n = raw + i * x.pitch;
      T* out = at<T>(to, u.row, s.begin + i, u.key_head);
      F32 along = zero();
      F32 factor = set1(inverse[i]);
      if (a.use_qk_l2norm) {
        const float dot = sum_lanes(a.K, [&](int64_t c, auto lanes) { return lanes.get(n + c) * lanes.get(row + c); });
        along = set1(inverse[i] * inverse[i] * dot);
        if (all.zero_row_safe && all_zero(n, a.K)) {
          factor = zero();
        }
      }
      for_lanes(a.K, [&](int64_t c, auto lanes) {
        lanes.put(out + c, factor * (lanes.get(row + c) - along * lanes.get(n + c)));
      });
    }
  }

  void run() {
    load_all(all.final_gradient, u.sequence, D);
    const int64_t groups = (u.end - u.begin + kGroupTokens - 1) / kGroupTokens;
    for (int64_t group = groups - 1; group >= 0; --group) {
      const int64_t begin = u.begin + group * kGroupTokens;
      const int64_t end = u.end - begin < kGroupTokens ? u.end : begin + kGroupTokens;
      if (!values) {
        // dV needs D alone
      } else if (group == 0) {
        recompute(begin, end, u.sequence, a.initial);
      } else {
        recompute(begin, end, u.first_saved + group - 1, all.saved);
      }
      for (int64_t c = (end - begin - 1) / kChunk; c >= 0; --c) {
        open_chunk(begin + c * kChunk, end);
        chunk_back(states + c * state_size, primes + c * value_size);
      }
    }
    if (all.initial_gradient.data != nullptr) {
      for_columns(D, primes, [&](int64_t head, int64_t c0, float* panel, float*) {
        with_state(all.initial_gradient, u.sequence, head,
                   [&](auto* p) { store_state(panel, all.initial_gradient, a.K, c0, a.V, p); });
      });
    }
  }
};

template <class T>
void run(const delta_rule_gradient::Args& a, const delta_rule_gradient::Unit& u, float* memory) noexcept {
  Run<T>(a, u, memory).run();
}
int64_t workspace(const delta_rule_gradient::Args& a) noexcept { return Run<float>::floats(a.rule); }

}  // namespace

extern const delta_rule_gradient::Kernels chunk_gated_delta_rule_bwd_kernels = {workspace,
                                                                                {run<float>, run<bf16>, run<f16>}};

}  // namespace tidegate::TIDEGATE_ISA
