// The gates of one value head over one chunk: decays since the chunk's start, between its tokens, and to its end.
//
// A token whose gate is at or below kReset starts anew: nothing before it reaches it. gc_i is the sum of g since the
// last such token, without that token's own g. It is summed in fp64 and kept as two floats, so that a difference
// gc_i - gc_j has the error of one fp32 rounding however long the sum is.
#pragma once

#include "ops/chunk_gated_delta_rule/kernel.h"
#include "simd/gates.h"
#include "simd/lanes.h"
#include "simd/tile.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using chunk_gated_delta_rule::Args;
using chunk_gated_delta_rule::kReset;

// Tokens of a chunk. The products with the state cost 6KV operations a token whatever the chunk; those inside a chunk
// grow with it and win nothing, since the state is in cache anyway. A power of two, because prefix caches ask for
// states at multiples of powers of two. docs/design.md has the measurements.
constexpr int64_t kChunk = 32;

struct Gates {
  float high[kChunk], low[kChunk];  // gc
  float beta[kChunk];
  float from_start[kChunk];  // e^gc, decay of the incoming state up to this token
  int64_t first[kChunk];     // the earliest token of the chunk that reaches this one: 0, or that of the last reset
  bool reset[kChunk];        // a reset at or before this token: the incoming state does not reach it
  bool any_reset;
};

inline void make_gates(const Args& a, int64_t row, int64_t begin, int64_t L, int64_t head, Gates& s) {
  float g[kChunk];
  read_gates(a.g.data, a.g_type, row * a.g.row + begin * a.g.token + head * a.g.head, a.g.token, L, g);
  read_gates(a.beta.data, a.beta_type, row * a.beta.row + begin * a.beta.token + head * a.beta.head, a.beta.token, L,
             s.beta);
  if (a.rate != nullptr) {
    open_decays(g, L, a.rate[head], a.dt_bias[head]);
  }
  if (a.beta_sigmoid) {
    open_betas(s.beta, L, a.beta_scale);
  }
  double sum = 0.0;
  int64_t first = 0;
  s.any_reset = false;
  for (int64_t i = 0; i < L; ++i) {
    if (g[i] <= kReset) {
      sum = 0.0;
      first = i;
      s.any_reset = true;
    } else {
      sum += static_cast<double>(g[i]);
    }
    s.high[i] = static_cast<float>(sum);
    s.low[i] = static_cast<float>(sum - static_cast<double>(s.high[i]));
    s.first[i] = first;
    s.reset[i] = s.any_reset;
  }
  for_lanes(L, [&](int64_t i, auto lanes) { lanes.put(s.from_start + i, exp(lanes.get(s.high + i))); });
}

// weight[j] = factor[j] e^(gc_last - gc_j), the decay from token j to the end of token `last`.
inline void to_end(const Gates& s, int64_t last, const float* factor, float* weight) {
  for_lanes(last + 1, [&](int64_t j, auto lanes) {
    const F32 gap = (set1(s.high[last]) - lanes.get(s.high + j)) + (set1(s.low[last]) - lanes.get(s.low + j));
    lanes.put(weight + j, lanes.get(factor + j) * exp(gap));
  });
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
