// The gated delta rule stage by stage. A sequence is cut into chunks of C tokens; the grid restarts at every sequence,
// only a sequence's last chunk is short. In the order of a forward pass:
//
//   gc       = chunk_local_cumsum(g)                          log decay since the chunk's start
//   A0       = chunk_scaled_dot_kkt(k, gc, beta)              how strongly a token overwrites earlier ones
//   A        = solve_tril(A0)                                 (I + A0)^-1
//   w, u     = recompute_w_u(k, v, beta, A, gc)               the chunk as one update of the state
//   h, v_new = chunk_gated_delta_rule_fwd_h(k, w, u, gc)      the state from chunk to chunk
//   o        = chunk_fwd_o(q, k, v_new, h, gc)                the outputs
//
// Below L <= C is the length of a chunk, formulas hold for every chunk and value head hv, which reads key head
// hv / (HV/HK). Gamma_ij = e^(gc_i - gc_j) for j <= i. Token t of a sequence never sees a later one, not even its NaN.
//
//   q, k          [B,T,HK,K] | [T,HK,K] | [B,HK,T,K] | [HK,T,K] by layout; fp32, bf16, fp16 (fp64: reference path)
//   v, o          the same with HV and V, same type
//   g, gc, beta   [B,T,HV] | [T,HV] | [B,HV,T] | [HV,T]; gc fp32 (fp64 with fp64), beta fp32 or the type of k
//   A0, A         [B,T,HV,C] | .. : row t belongs to token t, columns count from the start of its chunk. Columns after
//                 the row's own token are written as 0 and never read
//   w; u, v_new   [B,T,HV,K] | .. ; [B,T,HV,V] | ..
//   h             [B,NT,HV,K,V] | [NT,HV,K,V] | [B,HV,NT,K,V] | [HV,NT,K,V], NT = largest number of chunks of a row
// A0, A, w, u, h and v_new are fp32 or have the data type; arithmetic and the carried state are fp32 in both cases.
// Tokens outside every sequence are neither read nor written.
#pragma once

#include <cstdint>
#include <optional>

#include "tidegate/seqlens.h"
#include "tidegate/tensor.h"

namespace tidegate {

struct ChunkLocalCumsumOptions {
  bool reverse = false;  // sums from the chunk's end instead of its start
  double scale = 1.0;    // of the sum
  std::optional<double> floor =
      {};  // of every single g before summing. (A floor of the sum would lose what follows it.)
  Layout layout = Layout::kBSND;
};

// out_i = scale * sum of max(g_j, floor) over j <= i (reverse: j >= i) of the chunk, summed in fp64. g any float type,
// out fp32 or fp64. chunk_size is any power of two.
void chunk_local_cumsum(const TensorView& g, const TensorView& out, std::int64_t chunk_size, const SeqLens& seq,
                        const ChunkLocalCumsumOptions& options = {});

struct ChunkOptions {
  std::int64_t chunk_size = 64;  // 16, 32, 64 or 128
  Layout layout = Layout::kBSND;
};

// A0_ij = beta_i Gamma_ij <k_i, k_j> for j < i, else 0. gc may be absent: no decay.
void chunk_scaled_dot_kkt(const TensorView& k, const TensorView& gc, const TensorView& beta, const TensorView& A0,
                          const SeqLens& seq, const ChunkOptions& options = {});

// A = (I + A0)^-1; only A0_ij with j < i are read. The chunk size is the last size of A0.
void solve_tril(const TensorView& A0, const TensorView& A, const SeqLens& seq, Layout layout = Layout::kBSND);

// u = A (beta v), w = A (beta e^gc k). The chunk size is the last size of A.
void recompute_w_u(const TensorView& k, const TensorView& v, const TensorView& beta, const TensorView& A,
                   const TensorView& gc, const TensorView& w, const TensorView& u, const SeqLens& seq,
                   Layout layout = Layout::kBSND);

struct ChunkFwdHOptions {
  std::int64_t chunk_size = 64;  // 16, 32, 64 or 128
  bool state_v_first = false;    // initial_state and final_state are [N,HV,V,K] instead of [N,HV,K,V]
  Layout layout = Layout::kBSND;
};

// h = S at the chunk's start; v_new = u - w S; then S <- e^gl S + k^T (e^(gl - gc) v_new) with gl = gc of the last
// token.
//   initial_state [N,HV,K,V] any float type, or absent = 0;  final_state [N,HV,K,V] fp32, or absent
void chunk_gated_delta_rule_fwd_h(const TensorView& k, const TensorView& w, const TensorView& u, const TensorView& gc,
                                  const TensorView& initial_state, const TensorView& h, const TensorView& v_new,
                                  const TensorView& final_state, const SeqLens& seq,
                                  const ChunkFwdHOptions& options = {});

struct ChunkFwdOOptions {
  std::optional<double> scale = {};  // K^-0.5 if absent
  std::int64_t chunk_size = 64;      // 16, 32, 64 or 128
  Layout layout = Layout::kBSND;
};

// o = scale (e^gc (q h) + P v_new), P_ij = Gamma_ij <q_i, k_j> for j <= i, else 0. o has the type of q.
void chunk_fwd_o(const TensorView& q, const TensorView& k, const TensorView& v_new, const TensorView& h,
                 const TensorView& gc, const TensorView& o, const SeqLens& seq, const ChunkFwdOOptions& options = {});

// NT: the largest number of chunks in a row of tokens.
std::int64_t chunks_per_row(const SeqLens& seq, std::int64_t chunk_size);

}  // namespace tidegate
