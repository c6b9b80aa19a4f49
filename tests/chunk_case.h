// A problem of the chunk operators for tests: the numbers that describe it, tensors of every stage, and calls on them.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>

#include "base/chunk_problem.h"
#include "guarded.h"
#include "tidegate/chunk.h"
#include "tidegate/chunk_backward.h"

namespace tidegate::test {

enum class Kind { kGate, kTokens, kChunks, kStates };

struct ChunkCase {
  std::int64_t B = 1, T = 1, HK = 1, G = 1, K = 16, V = 16, C = 64;
  DType dtype = DType::kF32;  // of q, k, v, o
  DType inter = DType::kF32;  // of A0, A, w, u, h, v_new
  DType beta_type = DType::kF32;
  Layout layout = Layout::kTND;
  Sizes lengths = {};  // of packed sequences; empty: every row is one
  bool v_first = false;
  bool initial = true;    // initial and final states, or their gradients, are given
  bool backward = false;  // make the inputs of the backward stages too
  double slow = 0.05;     // gates are uniform in (-slow, 0), of every third head in (-2, 0)
  Form form = {};

  std::int64_t HV() const { return HK * G; }
  DType sum_type() const { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }
  SeqLens seq() const { return lengths.empty() ? SeqLens::dense(B, T) : SeqLens::from_lengths(lengths); }
  int token_dimension() const { return (has_batch(layout) ? 1 : 0) + (is_head_major(layout) ? 1 : 0); }
  Sizes sizes(Kind kind, std::int64_t heads, std::int64_t width) const;
  std::string text() const;
};

inline Sizes ChunkCase::sizes(Kind kind, std::int64_t heads, std::int64_t width) const {
  if (kind == Kind::kStates) {
    return {seq().count(), HV(), v_first ? V : K, v_first ? K : V};
  }
  const std::int64_t steps = kind == Kind::kChunks ? chunks_per_row(seq(), C) : T;
  Sizes s = is_head_major(layout) ? Sizes{heads, steps} : Sizes{steps, heads};
  s.insert(s.begin(), has_batch(layout) ? 1 : 0, B);
  if (kind == Kind::kChunks) {
    s.insert(s.end(), {K, V});
  } else if (kind == Kind::kTokens) {
    s.push_back(width);
  }
  return s;
}

inline std::string ChunkCase::text() const {
  return "B=" + std::to_string(B) + " T=" + std::to_string(T) + " HK=" + std::to_string(HK) +
         " G=" + std::to_string(G) + " K=" + std::to_string(K) + " V=" + std::to_string(V) + " C=" + std::to_string(C) +
         " " + std::string(dtype_name(dtype)) + "/" + std::string(dtype_name(inter)) + " layout " +
         std::to_string(static_cast<int>(layout)) + " sequences " + std::to_string(lengths.size());
}

// The inputs that the stages read, each by its name in the operators.
struct ChunkCall {
  ChunkCase c;
  SeqLens seq;
  TensorView q, k, v, g, beta, gc, A0, A, w, u, h, v_new, initial;
  TensorView d_o, dfinal, dv, dh, dv2, dw, dA;  // of the backward stages; du is dv2
};
using Input = TensorView ChunkCall::*;

inline constexpr Input kGateInputs[] = {&ChunkCall::g, &ChunkCall::beta, &ChunkCall::gc};
inline constexpr Input kTokenInputs[] = {
    &ChunkCall::q,     &ChunkCall::k,   &ChunkCall::v,  &ChunkCall::A0,  &ChunkCall::A,  &ChunkCall::w, &ChunkCall::u,
    &ChunkCall::v_new, &ChunkCall::d_o, &ChunkCall::dv, &ChunkCall::dv2, &ChunkCall::dw, &ChunkCall::dA};
inline constexpr Input kChunkInputs[] = {&ChunkCall::h, &ChunkCall::dh};
inline constexpr Input kStateInputs[] = {&ChunkCall::initial, &ChunkCall::dfinal};
inline bool is_one_of(std::span<const Input> inputs, Input input) {
  return std::find(inputs.begin(), inputs.end(), input) != inputs.end();
}

// Memory of a call.
struct ChunkTensors {
  ChunkCase c;
  Tensor q, k, v, g, beta, gc, A0, A, w, u, h, v_new, initial;
  Tensor d_o, dfinal, dv, dh, dv2, dw, dA;
  ChunkCall call() const {
    return {c, c.seq(), q, k, v, g, beta, gc, A0, A, w, u, h, v_new, initial, d_o, dfinal, dv, dh, dv2, dw, dA};
  }
};

// The same values in every layout: value(row, token, head, d) is asked in one fixed order.
template <class F>
Tensor token_tensor(const ChunkCase& c, Kind kind, DType dtype, std::int64_t heads, std::int64_t width, F value) {
  Tensor t(dtype, c.sizes(kind, heads, width), c.form);
  for (std::int64_t row = 0; row < c.B; ++row) {
    for (std::int64_t token = 0; token < c.T; ++token) {
      for (std::int64_t head = 0; head < heads; ++head) {
        const std::vector<double> x = value(head, width);
        const std::int64_t place =
            is_head_major(c.layout) ? (row * heads + head) * c.T + token : (row * c.T + token) * heads + head;
        for (std::int64_t d = 0; d < width; ++d) {
          t.set(place * width + d, x[static_cast<std::size_t>(d)]);
        }
      }
    }
  }
  return t;
}

inline ChunkTensors in_wide(const ChunkTensors& t) {
  ChunkTensors wider{t.c,         wide(t.q),      wide(t.k),  wide(t.v),  wide(t.g),   wide(t.beta),  wide(t.gc),
                     wide(t.A0),  wide(t.A),      wide(t.w),  wide(t.u),  wide(t.h),   wide(t.v_new), wide(t.initial),
                     wide(t.d_o), wide(t.dfinal), wide(t.dv), wide(t.dh), wide(t.dv2), wide(t.dw),    wide(t.dA)};
  wider.c.dtype = wider.c.inter = wider.c.beta_type = DType::kF64;
  wider.c.form = {};
  return wider;
}

// States in the order [N,HV,K,V] of values, also when they lie V first.
inline Tensor state_tensor(Random& random, const ChunkCase& c) {
  Tensor t(c.sum_type(), c.sizes(Kind::kStates, 0, 0), c.form);
  for (std::int64_t i = 0; i < c.seq().count() * c.HV(); ++i) {
    for (std::int64_t r = 0; r < c.K; ++r) {
      for (std::int64_t col = 0; col < c.V; ++col) {
        t.set(i * c.K * c.V + (c.v_first ? col * c.K + r : r * c.V + col), random.normal() * 0.3);
      }
    }
  }
  return t;
}

inline Tensor blank(const ChunkCase& c, Kind kind, std::int64_t heads, std::int64_t width = 0) {
  return Tensor(DType::kF64, c.sizes(kind, heads, width)).fill(0.0);
}
inline Tensor typed_as(const ChunkCase& c, const Tensor& from, DType dtype) {
  Tensor to = like(from, dtype, c.form);
  return to.fill([&](std::int64_t i) { return from.get(i); });
}

inline constexpr double kScale = 0.3;  // of q in the backward stages

// Gradients that come in from outside, and what the fp64 path of the backward stages makes of them. x is t in fp64.
template <class F>
void make_gradients(Random& random, F plain, ChunkTensors& t, ChunkTensors& x) {
  const ChunkCase& c = t.c;
  t.d_o = token_tensor(c, Kind::kTokens, c.dtype, c.HV(), c.V, plain);
  t.dfinal = state_tensor(random, c);
  x.d_o = wide(t.d_o);
  x.dfinal = wide(t.dfinal);
  const SeqLens seq = c.seq();
  x.dv = blank(c, Kind::kTokens, c.HV(), c.V);
  chunk_bwd_dv_local(x.q, x.k, x.d_o, x.gc, x.dv, seq, {kScale, c.C, c.layout});
  x.dh = blank(c, Kind::kChunks, c.HV());
  x.dv2 = blank(c, Kind::kTokens, c.HV(), c.V);
  const Tensor dh0(DType::kF64, t.dfinal.sizes());
  chunk_gated_delta_rule_bwd_dhu(x.q, x.k, x.w, x.d_o, x.dv, x.gc, c.initial ? x.dfinal.view() : TensorView{}, x.dh,
                                 dh0, x.dv2, seq, {kScale, c.C, c.v_first, c.layout});
  x.dw = blank(c, Kind::kTokens, c.HV(), c.K);
  const Tensor dq = blank(c, Kind::kTokens, c.HK, c.K);
  const Tensor dk = blank(c, Kind::kTokens, c.HK, c.K);
  const Tensor dg = blank(c, Kind::kGate, c.HV());
  chunk_bwd_dqkwg(x.q, x.k, x.v_new, x.gc, x.h, x.d_o, x.dh, x.dv2, dq, dk, x.dw, dg, seq, {kScale, c.C, c.layout});
  x.dA = blank(c, Kind::kTokens, c.HV(), c.C);
  prepare_wy_repr_bwd_da(x.k, x.v, x.beta, x.A, x.dw, x.dv2, x.gc, x.dA, seq, c.layout);
  t.dv = typed_as(c, x.dv, c.inter);
  t.dh = typed_as(c, x.dh, c.inter);
  t.dv2 = typed_as(c, x.dv2, c.inter);
  t.dw = typed_as(c, x.dw, c.inter);
  t.dA = typed_as(c, x.dA, c.inter);
}

// Keys of unit length that share a component, as trained ones do; later stages get what the fp64 path makes of the
// earlier ones, rounded to their types.
inline ChunkTensors make_chunk(Random& random, const ChunkCase& c) {
  ChunkTensors t;
  t.c = c;
  const auto unit = [&](std::int64_t, std::int64_t n) {
    std::vector<double> x(static_cast<std::size_t>(n));
    double squares = 1e-6;
    for (double& v : x) {
      v = random.normal() + 0.5;
      squares += v * v;
    }
    for (double& v : x) {
      v /= std::sqrt(squares);
    }
    return x;
  };
  const auto plain = [&](std::int64_t, std::int64_t n) {
    std::vector<double> x(static_cast<std::size_t>(n));
    for (double& v : x) {
      v = random.normal();
    }
    return x;
  };
  t.q = token_tensor(c, Kind::kTokens, c.dtype, c.HK, c.K, unit);
  t.k = token_tensor(c, Kind::kTokens, c.dtype, c.HK, c.K, unit);
  t.v = token_tensor(c, Kind::kTokens, c.dtype, c.HV(), c.V, plain);
  t.g = token_tensor(c, Kind::kGate, c.sum_type(), c.HV(), 1, [&](std::int64_t head, std::int64_t) {
    return std::vector<double>{-random.uniform() * (head % 3 == 2 ? 2.0 : c.slow)};
  });
  t.beta = token_tensor(c, Kind::kGate, c.beta_type, c.HV(), 1,
                        [&](std::int64_t, std::int64_t) { return std::vector<double>{random.uniform()}; });
  t.initial = state_tensor(random, c);
  ChunkTensors x = in_wide(t);
  const SeqLens seq = c.seq();
  x.gc = blank(c, Kind::kGate, c.HV());
  chunk_local_cumsum(x.g, x.gc, c.C, seq, {.layout = c.layout});
  x.A0 = blank(c, Kind::kTokens, c.HV(), c.C);
  chunk_scaled_dot_kkt(x.k, x.gc, x.beta, x.A0, seq, {c.C, c.layout});
  x.A = blank(c, Kind::kTokens, c.HV(), c.C);
  solve_tril(x.A0, x.A, seq, c.layout);
  x.w = blank(c, Kind::kTokens, c.HV(), c.K);
  x.u = blank(c, Kind::kTokens, c.HV(), c.V);
  recompute_w_u(x.k, x.v, x.beta, x.A, x.gc, x.w, x.u, seq, c.layout);
  x.h = blank(c, Kind::kChunks, c.HV());
  x.v_new = blank(c, Kind::kTokens, c.HV(), c.V);
  chunk_gated_delta_rule_fwd_h(x.k, x.w, x.u, x.gc, c.initial ? x.initial.view() : TensorView{}, x.h, x.v_new, {}, seq,
                               {c.C, c.v_first, c.layout});
  t.gc = typed_as(c, x.gc, c.sum_type());
  t.A0 = typed_as(c, x.A0, c.inter);
  t.A = typed_as(c, x.A, c.inter);
  t.w = typed_as(c, x.w, c.inter);
  t.u = typed_as(c, x.u, c.inter);
  t.h = typed_as(c, x.h, c.inter);
  t.v_new = typed_as(c, x.v_new, c.inter);
  if (c.backward) {
    make_gradients(random, plain, t, x);
  }
  if (!c.initial) {
    t.initial = t.dfinal = {};
  }
  return t;
}

// One sequence of a packed call as a call of its own, in the same memory. Its chunks are [first, last) of the row.
inline TensorView tokens_of(const ChunkCase& c, const TensorView& t, std::int64_t begin, std::int64_t end) {
  return t.defined() ? part(t, c.token_dimension(), begin, end) : t;
}
inline std::pair<std::int64_t, std::int64_t> chunks_of(const ChunkCall& call, std::int64_t n) {
  std::int64_t first = 0;
  std::int64_t last = 0;
  for (const Chunk& chunk : call.seq.chunks(call.c.C)) {
    first += chunk.sequence < n ? 1 : 0;
    last += chunk.sequence <= n ? 1 : 0;
  }
  return {first, last};
}
inline ChunkCall sequence_of(const ChunkCall& call, std::int64_t n) {
  const Sequence s = call.seq[n];
  const auto [first, last] = chunks_of(call, n);
  ChunkCall one = call;
  one.c.T = s.length();
  one.c.lengths = {};
  one.seq = SeqLens::dense(1, s.length());
  for (const Input in : kGateInputs) {
    one.*in = tokens_of(call.c, call.*in, s.begin, s.end);
  }
  for (const Input in : kTokenInputs) {
    one.*in = tokens_of(call.c, call.*in, s.begin, s.end);
  }
  for (const Input in : kChunkInputs) {
    one.*in = tokens_of(call.c, call.*in, first, last);
  }
  for (const Input in : kStateInputs) {
    one.*in = (call.*in).defined() ? part(call.*in, 0, n, n + 1) : call.*in;
  }
  return one;
}

}  // namespace tidegate::test
