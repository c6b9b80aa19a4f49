// Gradients of the gated delta rule stage by stage: chunk.h backwards. In the order of a backward pass, with
// v_new, h from the forward pass and do the gradient of o:
//
//   dv             = chunk_bwd_dv_local(q, k, do, gc)                         what outputs of the chunk want of v_new
//   dh, dh0, dv2   = chunk_gated_delta_rule_bwd_dhu(q, k, w, do, dv, gc, dfinal_state)   the state's gradient, chunk by
//                                                                             chunk from the end
//   dq, dk, dw, dg = chunk_bwd_dqkwg(q, k, v_new, gc, h, do, dh, dv2)
//   dk, dv, dbeta, dg = prepare_wy_repr_bwd(k, v, beta, A, dw, dv2, gc)       through w, u and A
//   dg             = chunk_local_cumsum(dg + dg, reverse)                     both parts of dk and of dg are added
//
// Notation, shapes and layouts are those of chunk.h. D is the gradient of the state at the chunk's end, gl = gc of the
// chunk's last token.
//
//   do, dv, dv2, du   as v;  dw as w;  dh as h;  dA as A
//   dq, dk            as q: the sum over the value heads of a key head, added in their order
//   dg, dbeta         as gc; fp32
// do has the type of q; dv, dv2, dw, dh, dA, dq, dk are fp32 or have the data type. Arithmetic, sums over heads and the
// carried gradient of the state are fp32 in both cases. A sequence sees no other; tokens outside every sequence are
// neither read nor written.
#pragma once

#include <cstdint>
#include <optional>

#include "tidegate/seqlens.h"
#include "tidegate/tensor.h"

namespace tidegate {

struct ChunkBwdOptions {
  std::optional<double> scale = {};  // K^-0.5 if absent
  std::int64_t chunk_size = 64;      // 16, 32, 64 or 128
  Layout layout = Layout::kBSND;
};

// dv_j = scale * sum of P_ij do_i over i >= j of the chunk, P_ij = Gamma_ij <q_i, k_j>.
void chunk_bwd_dv_local(const TensorView& q, const TensorView& k, const TensorView& d_o, const TensorView& gc,
                        const TensorView& dv, const SeqLens& seq, const ChunkBwdOptions& options = {});

struct ChunkBwdDhuOptions {
  std::optional<double> scale = {};  // K^-0.5 if absent
  std::int64_t chunk_size = 64;      // 16, 32, 64 or 128
  bool state_v_first = false;        // dfinal_state and dh0 are [N,HV,V,K] instead of [N,HV,K,V]
  Layout layout = Layout::kBSND;
};

// dh = D; dv2 = e^(gl - gc) (k D) + dv; then D <- e^gl D + scale (e^gc q)^T do - w^T dv2. dh0 = D before the first
// chunk.
//   dfinal_state [N,HV,K,V] any float type, or absent = 0;  dh0 [N,HV,K,V] fp32
void chunk_gated_delta_rule_bwd_dhu(const TensorView& q, const TensorView& k, const TensorView& w,
                                    const TensorView& d_o, const TensorView& dv, const TensorView& gc,
                                    const TensorView& dfinal_state, const TensorView& dh, const TensorView& dh0,
                                    const TensorView& dv2, const SeqLens& seq, const ChunkBwdDhuOptions& options = {});

// With a = scale e^gc (do h^T), b = e^(gl - gc) (v_new dh^T), ds_ij = scale Gamma_ij <do_i, v_new_j> for j <= i and
// m_ij = ds_ij <q_i, k_j>:
//   dq = a + ds k;  dk = b + ds^T q;  dw = -dv2 h^T
//   dg_i = <a_i, q_i> - <b_i, k_i> + sum over j of (m_ij - m_ji), dg of the last token also e^gl <h, dh> + sum <b_j,
//   k_j>
// dg is the gradient of gc without what passes through w and u.
void chunk_bwd_dqkwg(const TensorView& q, const TensorView& k, const TensorView& v_new, const TensorView& gc,
                     const TensorView& h, const TensorView& d_o, const TensorView& dh, const TensorView& dv2,
                     const TensorView& dq, const TensorView& dk, const TensorView& dw, const TensorView& dg,
                     const SeqLens& seq, const ChunkBwdOptions& options = {});

// The gradient of A0 times Gamma: with X = tril(dw (beta e^gc k)^T + du (beta v)^T, -1),
//   Dm = -tril((A^T X A^T) * Gamma, -1)
// dA holds it transposed: row t, column j of a chunk is Dm_jt, so columns up to the row's own token and beyond a short
// chunk are 0. The chunk size is the last size of A, here and below; of A only the lower triangle is read.
void prepare_wy_repr_bwd_da(const TensorView& k, const TensorView& v, const TensorView& beta, const TensorView& A,
                            const TensorView& dw, const TensorView& du, const TensorView& gc, const TensorView& dA,
                            const SeqLens& seq, Layout layout = Layout::kBSND);

// The rest of the way through w and u. With tw = A^T dw, tu = A^T du and m_ij = beta_i Dm_ij <k_i, k_j>:
//   dk = beta (Dm k) + Dm^T (beta k) + beta e^gc tw;  dv = beta tu
//   dbeta = <Dm k, k> + e^gc <tw, k> + <tu, v>;  dg_i = beta_i e^gc_i <tw_i, k_i> + sum over j of (m_ij - m_ji)
// Of dA only what lies above the diagonal is read.
void prepare_wy_repr_bwd_full(const TensorView& k, const TensorView& v, const TensorView& beta, const TensorView& A,
                              const TensorView& dA, const TensorView& dw, const TensorView& du, const TensorView& gc,
                              const TensorView& dk, const TensorView& dv, const TensorView& dbeta, const TensorView& dg,
                              const SeqLens& seq, Layout layout = Layout::kBSND);

// Both in one: dA never leaves the chunk.
void prepare_wy_repr_bwd(const TensorView& k, const TensorView& v, const TensorView& beta, const TensorView& A,
                         const TensorView& dw, const TensorView& du, const TensorView& gc, const TensorView& dk,
                         const TensorView& dv, const TensorView& dbeta, const TensorView& dg, const SeqLens& seq,
                         Layout layout = Layout::kBSND);

}  // namespace tidegate
