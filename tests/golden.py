"""The truth: one plain function per operator, written to be read. In float64 it is what results are compared with; in
float32 the same code is the plain computation whose error sets the scale. Convolution, norms and rotary embedding have
files of their own and are reached from here.

    gate tensors  a, b, g, beta, gc [HV, T];  A_log, dt_bias [HV]
    delta rule    q, k [HK, T, K], v, o, u, v_new [HV, T, V], w [HV, T, K]; value head h reads key head h // (HV // HK)
    of a chunk    A0, A [HV, T, C]: row t is token t, columns count from its chunk's start;  h [HV, NT, K, V]
    states        [N, HV, K, V]
    cu            list of N + 1 offsets: sequence n owns tokens cu[n] .. cu[n+1]-1; zero-length sequences are legal
"""

import torch
from golden_conv import causal_conv1d_bwd, causal_conv1d_fwd, causal_conv1d_update, to_head_major  # noqa: F401
from golden_rows import (  # noqa: F401
    mrope_axis,
    mrope_cos_sin,
    partial_rope_bwd,
    partial_rope_fwd,
    rms_norm_bwd,
    rms_norm_fwd,
    rms_norm_gated_bwd,
    rms_norm_gated_fwd,
    rms_norm_gated_hf,
)


# --- sequence boundaries ---------------------------------------------------------------------------------------------
def cu_from_lengths(lengths):
    return [sum(lengths[:n]) for n in range(len(lengths) + 1)]


def cu_from_seq_idx(seq_idx):
    """Any change of value starts a sequence."""
    ids = [int(s) for s in seq_idx]
    return [t for t in range(len(ids)) if t == 0 or ids[t] != ids[t - 1]] + [len(ids)]


def cu_from_position_ids(pos):
    """pos [T]: a sequence starts where the id is not the previous one plus 1; [3, T] (mRoPE): where all axes are 0."""
    if pos.dim() == 2:
        return [t for t in range(pos.shape[1]) if t == 0 or not pos[:, t].any()] + [pos.shape[1]]
    p = pos.tolist()
    return [t for t in range(len(p)) if t == 0 or p[t] != p[t - 1] + 1] + [len(p)]


# --- gates and l2norm ------------------------------------------------------------------------------------------------
def softplus(x):
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def gdn_gating_fwd(a, b, A_log, dt_bias=None, beta_scale=1.0):
    """g = -exp(A_log) softplus(a + dt_bias), beta = beta_scale * sigmoid(b)."""
    x = a if dt_bias is None else a + dt_bias[:, None]
    return -A_log.exp()[:, None] * softplus(x), beta_scale * torch.sigmoid(b)


def gdn_gating_bwd(a, b, A_log, dg, dbeta, dt_bias=None, beta_scale=1.0):
    """Gradients da, db, dA_log, ddt_bias."""
    x = a if dt_bias is None else a + dt_bias[:, None]
    rate = -A_log.exp()[:, None]
    s = torch.sigmoid(b)
    da = dg * rate * torch.sigmoid(x)
    return da, dbeta * beta_scale * s * (1 - s), (dg * rate * softplus(x)).sum(1), da.sum(1)


def l2norm_fwd(x, eps=1e-6):
    rstd = (x.square().sum(-1) + eps).rsqrt()
    return x * rstd[..., None], rstd


def l2norm_bwd(x, rstd, dy, zero_row_safe=False):
    """Exact although eps is inside the root. A zero row has rstd = eps**-0.5; zero_row_safe gives it gradient 0."""
    y = x * rstd[..., None]
    dx = rstd[..., None] * (dy - y * (dy * y).sum(-1, keepdim=True))
    return dx.masked_fill((x == 0).all(-1, keepdim=True), 0) if zero_row_safe else dx


# --- gated delta rule ------------------------------------------------------------------------------------------------
def gated_delta_rule(q, k, v, g, beta, cu, h0, scale):
    """Token by token: S <- e^g S, d = beta (v - S^T k), S <- S + k d^T, o = scale S^T q. Returns o, final states."""
    G = v.shape[0] // q.shape[0]
    q, k = q.repeat_interleave(G, 0), k.repeat_interleave(G, 0)
    # Taken apart once: gradients of single columns would each be as large as all of them.
    tokens = list(zip(*(x.unbind(1) for x in (q, k, v, g, beta)), strict=True))
    o, ht = [torch.zeros_like(row) for row in v.unbind(1)], []
    for n, S in enumerate(h0.unbind(0)):
        for t in range(cu[n], cu[n + 1]):
            q_t, k_t, v_t, g_t, beta_t = tokens[t]
            S = S * g_t.exp()[:, None, None]
            d = beta_t[:, None] * (v_t - torch.einsum("hkv,hk->hv", S, k_t))
            S = S + k_t[:, :, None] * d[:, None, :]
            o[t] = scale * torch.einsum("hkv,hk->hv", S, q_t)
        ht.append(S)
    return torch.stack(o, 1) if o else torch.zeros_like(v), torch.stack(ht) if ht else h0.clone()


def segment_map(k, v, g, beta):
    """phi [HV, K, K] and s [HV, K, V] with S_out = phi S_in + s for all tokens as one run."""
    (HV, T, V), K = v.shape, k.shape[-1]
    k = k.repeat_interleave(HV // k.shape[0], 0)
    phi, s = torch.eye(K, dtype=v.dtype).repeat(HV, 1, 1), v.new_zeros(HV, K, V)
    for t in range(T):
        kt, bt = k[:, t, :, None], beta[:, t, None, None]
        step = g[:, t, None, None].exp() * (torch.eye(K, dtype=v.dtype) - bt * kt * kt.mT)
        phi, s = step @ phi, step @ s + bt * kt * v[:, t, None, :]
    return phi, s


# --- stages of the chunked rule --------------------------------------------------------------------------------------
def chunk_list(cu, C):
    """(sequence, first token, end): the grid restarts at every sequence, only a sequence's last chunk is short."""
    return [(n, s, min(s + C, cu[n + 1])) for n in range(len(cu) - 1) for s in range(cu[n], cu[n + 1], C)]


def chunk_local_cumsum(g, cu, C, reverse=False, floor=None):
    """Running sum inside each chunk; floor bounds single tokens before summing."""
    g = g if floor is None else g.clamp(min=floor)
    out = torch.zeros_like(g)
    for _, s, e in chunk_list(cu, C):
        out[:, s:e] = g[:, s:e].flip(1).cumsum(1).flip(1) if reverse else g[:, s:e].cumsum(1)
    return out


def decay_matrix(gc):
    """[..., L] -> e^(gc_i - gc_j) for j <= i, else 0. What is above the diagonal is never exponentiated."""
    difference = gc[..., :, None] - gc[..., None, :]
    above = torch.ones_like(difference).triu(1).bool()
    return difference.masked_fill(above, float("-inf")).exp()


def chunk_scaled_dot_kkt(k, gc, beta, cu, C):
    """A0_ij = beta_i e^(gc_i - gc_j) <k_i, k_j> for j < i."""
    k = k.repeat_interleave(beta.shape[0] // k.shape[0], 0)
    A0 = k.new_zeros(*beta.shape, C)
    for _, s, e in chunk_list(cu, C):
        products = k[:, s:e] @ k[:, s:e].mT
        A0[:, s:e, : e - s] = (beta[:, s:e, None] * decay_matrix(gc[:, s:e]) * products).tril(-1)
    return A0


def solve_tril(A0, cu):
    """(I + A0)^-1 of every chunk, row by row."""
    A, C = torch.zeros_like(A0), A0.shape[-1]
    for _, s, e in chunk_list(cu, C):
        X = torch.eye(C, dtype=A0.dtype).expand(A0.shape[0], C, C).clone()
        for i in range(1, e - s):
            X[:, i, :i] -= (A0[:, s + i, None, :i] @ X[:, :i, :i])[:, 0]
        A[:, s:e] = X[:, : e - s]
    return A


def recompute_w_u(k, v, beta, A, gc, cu, C):
    """u = A (beta v), w = A (beta e^gc k)."""
    k = k.repeat_interleave(v.shape[0] // k.shape[0], 0)
    w, u = torch.zeros_like(k), torch.zeros_like(v)
    for _, s, e in chunk_list(cu, C):
        a, b = A[:, s:e, : e - s], beta[:, s:e, None]
        u[:, s:e] = a @ (b * v[:, s:e])
        w[:, s:e] = a @ (b * gc[:, s:e, None].exp() * k[:, s:e])
    return w, u


def chunk_gated_delta_rule_fwd_h(k, w, u, gc, cu, C, h0):
    """h = S at each chunk's start, v_new = u - w S, S <- e^gl S + k^T (e^(gl - gc) v_new). Returns h, v_new, states."""
    k = k.repeat_interleave(u.shape[0] // k.shape[0], 0)
    v_new, states, h = torch.zeros_like(u), h0.clone(), []
    for n, s, e in chunk_list(cu, C):
        S, g = states[n].clone(), gc[:, s:e, None]
        h.append(S)
        v_new[:, s:e] = u[:, s:e] - w[:, s:e] @ S
        states[n] = g[:, -1:].exp() * S + k[:, s:e].mT @ ((g[:, -1:] - g).exp() * v_new[:, s:e])
    return torch.stack(h, 1), v_new, states


def chunk_fwd_o(q, k, v_new, h, gc, scale, cu, C):
    """o = scale (e^gc (q S) + tril(q k^T * decay) v_new)."""
    G = v_new.shape[0] // q.shape[0]
    q, k = q.repeat_interleave(G, 0), k.repeat_interleave(G, 0)
    o = torch.zeros_like(v_new)
    for i, (_, s, e) in enumerate(chunk_list(cu, C)):
        P = (q[:, s:e] @ k[:, s:e].mT) * decay_matrix(gc[:, s:e])
        o[:, s:e] = scale * (gc[:, s:e, None].exp() * (q[:, s:e] @ h[:, i]) + P @ v_new[:, s:e])
    return o
