// Decays and factors of one value head over one chunk, and the gradients of its gates.
//
// Every exponential is e^(gc_i), e^(gc_i - gc_j) or e^(gl - gc_i); a reset makes those that reach across it 0. With
// m_ij = U_ij P_ij - W_ij A0_ij, j < i,
//   dgc_i   = sum_j m_ij - sum_j m_ji + <dQ_i through S, q_i> - beta e^gc <dX_i S^T, k_i> - b_i
//   dgc_L  += sum_i b_i + e^gl <S, D>                        b_i = e^(gl - gc_i) <V'_i D^T, k_i>, L the last token
//   dbeta_i = <dX_i, V_i> - e^gc <dX_i S^T, k_i> - sum_j W_ij e^(gc_i - gc_j) <k_i, k_j>
// and the gradient of g_j is the sum of dgc_i over i >= j up to the next reset.
#pragma once

#include "ops/chunk_gated_delta_rule_bwd/chunk.kernel.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

// decay, minus_a0 and p, up to the diagonal.
inline void make_decays(const Args& a, Chunk& s, Gradients& d) {
  const Gates& g = s.gates;
  for (int64_t i = 0; i < s.L; ++i) {
    float* decay = d.decay + i * kSquare;
    for_lanes(i + 1, [&](int64_t j, auto lanes) {
      const F32 gap = (set1(g.high[i]) - lanes.get(g.high + j)) + (set1(g.low[i]) - lanes.get(g.low + j));
      lanes.put(decay + j, exp(gap));
    });
    memset(decay, 0, static_cast<size_t>(g.first[i]) * sizeof(float));
    const F32 write = set1(-g.beta[i] * s.k_inverse[i]);
    const F32 read = set1(a.scale * s.q_inverse[i]);
    for_lanes(i + 1, [&](int64_t j, auto lanes) {
      const F32 x = lanes.get(decay + j) * lanes.get(s.k_inverse + j);
      lanes.put(s.minus_a0 + i * kSquare + j, write * x * lanes.get(s.kk + i * kSquare + j));
      lanes.put(s.p + i * kSquare + j, read * x * lanes.get(s.qk + i * kSquare + j));
    });
  }
}

// The factors of the tokens. Beyond the chunk's last token they are 0.
inline void make_factors(const Args& a, Chunk& s, Gradients& d) {
  const Gates& g = s.gates;
  const int64_t last = s.L - 1;
  float* const all[] = {d.o_factor, d.x_factor, d.v_factor, d.key_weight, d.x_weight};
  for (float* factors : all) {
    memset(factors, 0, sizeof d.o_factor);
  }
  float ones[kChunk];
  for (float& x : ones) {
    x = 1.0f;
  }
  to_end(g, last, ones, d.v_factor);
  memset(d.v_factor, 0, static_cast<size_t>(g.first[last]) * sizeof(float));
  for (int64_t i = 0; i < s.L; ++i) {
    const float decay = g.reset[i] ? 0.0f : g.from_start[i];
    d.o_factor[i] = a.scale * decay;
    d.x_factor[i] = -g.beta[i] * decay;
    d.key_weight[i] = d.v_factor[i] * s.k_inverse[i];
    d.x_weight[i] = d.x_factor[i] * s.k_inverse[i];
    s.key_factor[i] = decay * s.k_inverse[i];
    s.query_factor[i] = d.o_factor[i] * s.q_inverse[i];
  }
}

// Gradients of the gates of one value head, before they are brought to the raw gates.
struct GateSums {
  double gc[kSquare], beta[kSquare];
};

// sums.gc[i] += m_ij and sums.gc[j] -= m_ij for j < i. A pair with j >= t is no part of dg_t: its two halves cancel
// there. In double they do; the rounding of fp32 sums stayed behind and was most of dg's error. Beyond j = i, m holds
// zeros.
inline void add_pairs(const float* m, int64_t i, GateSums& sums) {
  constexpr int64_t kParts = 8;  // sums that do not wait for each other
  double parts[kParts] = {};
  for (int64_t j = 0; j < i; j += kParts) {
    for (int64_t l = 0; l < kParts; ++l) {
      const auto x = static_cast<double>(m[j + l]);
      parts[l] += x;
      sums.gc[j + l] -= x;
    }
  }
  for (const double part : parts) {
    sums.gc[i] += part;
  }
}

// Adds this head's part to the gradients of P and A0, and its triangles to the gates' sums.
inline void add_triangles(const Args& a, const Chunk& s, Gradients& d, GateSums& sums) {
  float pairs[kSquare] = {};
  for (int64_t i = 0; i < s.L; ++i) {
    const int64_t row = i * kSquare;
    const F32 scale = set1(a.scale);
    for_lanes(i + 1, [&](int64_t j, auto lanes) {
      float* to = d.p_gradient + row + j;
      lanes.put(to, fma(scale * lanes.get(d.decay + row + j), lanes.get(d.U + row + j), lanes.get(to)));
    });
    const F32 beta = set1(s.gates.beta[i]);
    const F32 length = set1(s.k_inverse[i]);
    F32 strength = zero();
    for_lanes(i, [&](int64_t j, auto lanes) {  // the diagonal does not decay
      const F32 w = zero() - lanes.get(d.W + row + j) * lanes.get(d.decay + row + j);
      const F32 key = w * (length * lanes.get(s.k_inverse + j) * lanes.get(s.kk + row + j));
      const F32 m = fma(lanes.get(d.U + row + j), lanes.get(s.p + row + j), beta * key);
      lanes.put(d.e + row + j, fma(beta, w, lanes.get(d.e + row + j)));
      lanes.put(pairs + j, m);
      strength = strength + key;
    });
    add_pairs(pairs, i, sums);
    sums.beta[i] += static_cast<double>(sum(strength));
  }
}

// The parts through the states. state_dot = <S, D>.
inline void add_state_dots(const Chunk& s, const Gradients& d, const Dots& dots, float state_dot, GateSums& sums) {
  const int64_t last = s.L - 1;
  for (int64_t i = 0; i < s.L; ++i) {
    const double written = static_cast<double>(s.key_factor[i] * dots.x[i]);
    const double kept = static_cast<double>(d.key_weight[i] * dots.v[i]);
    sums.gc[i] += static_cast<double>(s.query_factor[i] * dots.o[i]) - static_cast<double>(s.gates.beta[i]) * written;
    if (i < last) {  // what the last token writes does not decay
      sums.gc[i] -= kept;
      sums.gc[last] += kept;
    }
    sums.beta[i] -= written;
  }
  if (!s.gates.reset[last]) {
    sums.gc[last] += static_cast<double>(s.gates.from_start[last]) * static_cast<double>(state_dot);
  }
}

// From gc to g: the sum over the tokens from here to the next reset. A reset itself does not move.
inline void sum_gates(const Chunk& s, const double* gc, float* dg) {
  double sum = 0.0;
  for (int64_t i = s.L - 1; i >= 0; --i) {
    sum += gc[i];
    dg[i] = static_cast<float>(sum);
    if (s.gates.reset[i] && s.gates.first[i] == i) {
      dg[i] = 0.0f;
      sum = 0.0;
    }
  }
}

// dg becomes the gradient of the raw gate a; adds the terms of dA_log and ddt_bias to sums[0] and sums[1].
inline void raw_gate_gradient(const Args& a, int64_t row, int64_t begin, int64_t L, int64_t head, float* dg,
                              double* sums) {
  float raw[kChunk];
  read_gates(a.g.data, a.g_type, row * a.g.row + begin * a.g.token + head * a.g.head, a.g.token, L, raw);
  const F32 rate = set1(a.rate[head]);
  const F32 infinity = set1(__builtin_inff());
  float terms[kChunk];
  for_lanes(L, [&](int64_t i, auto lanes) {
    const F32 x = lanes.get(raw + i) + set1(a.dt_bias[head]);
    const F32 value = rate * softplus(x);
    // Where exp(A_log) overflows, g is 0 or a reset: neither moves with a or A_log.
    lanes.put(terms + i, zero() - lanes.get(dg + i) * select(less(value, infinity), value, zero()));
    lanes.put(dg + i, zero() - lanes.get(dg + i) * select(less(rate, infinity), rate * sigmoid(x), zero()));
  });
  for (int64_t i = 0; i < L && sums != nullptr; ++i) {
    sums[0] += static_cast<double>(terms[i]);
    sums[1] += static_cast<double>(dg[i]);
  }
}

inline void raw_beta_gradient(const Args& a, int64_t L, const float* beta, float* dbeta) {
  for (int64_t i = 0; i < L; ++i) {  // beta = beta_scale sigmoid(b)
    const float open = beta[i] / a.beta_scale;
    dbeta[i] *= a.beta_scale == 0.0f ? 0.0f : beta[i] * (1.0f - open);
  }
}

inline void store_gates(const float* from, int64_t L, const delta_rule_gradient::GateGradient& to, int64_t row,
                        int64_t begin, int64_t head) {
  for (int64_t i = 0; i < L; ++i) {
    if (to.type == 0) {
      *at<float>(to.at, row, begin + i, head) = from[i];
    } else if (to.type == 1) {
      narrow(from[i], at<bf16>(to.at, row, begin + i, head));
    } else {
      narrow(from[i], at<f16>(to.at, row, begin + i, head));
    }
  }
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
