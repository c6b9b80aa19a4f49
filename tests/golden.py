"""The truth: one plain function per operator, written to be read. In float64 it is what results are compared with; in
float32 the same code is the plain computation whose error sets the scale.

    conv tensors  x, y [T, D], weight [D, W], state [N, D, S] with the newest sample last, S >= W - 1
    gate tensors  a, b, g, beta, gc [HV, T];  A_log, dt_bias [HV]
    delta rule    q, k [HK, T, K], v, o, u, v_new [HV, T, V], w [HV, T, K]; value head h reads key head h // (HV // HK)
    of a chunk    A0, A [HV, T, C]: row t is token t, columns count from its chunk's start;  h [HV, NT, K, V]
    states        [N, HV, K, V]
    rows          x [..., D], rstd [...]
    cu            list of N + 1 offsets: sequence n owns tokens cu[n] .. cu[n+1]-1; zero-length sequences are legal
"""

import torch


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


# --- causal convolution ----------------------------------------------------------------------------------------------
def _act(x, activation):
    return x if activation is None else x * torch.sigmoid(x)


def _act_grad(x, activation):
    s = torch.sigmoid(x)
    return torch.ones_like(x) if activation is None else s * (1 + x * (1 - s))


def causal_conv1d_fwd(x, weight, bias=None, cu=None, initial_state=None, activation="silu"):
    """y[t] = act(bias + sum_j weight[:, j] * x[t - (W-1) + j]); samples before a sequence come from its state or are 0.
    Returns y, the pre-activation, and the final state = last S samples of (initial state, sequence)."""
    (T, D), W = x.shape, weight.shape[1]
    cu = [0, T] if cu is None else cu
    h0 = x.new_zeros(len(cu) - 1, D, W - 1) if initial_state is None else initial_state
    S = h0.shape[2]
    pre, ht = torch.zeros_like(x), torch.zeros_like(h0)
    for n in range(len(cu) - 1):
        L = cu[n + 1] - cu[n]
        xe = torch.cat([h0[n].T, x[cu[n] : cu[n + 1]]])  # [S + L, D]
        acc = torch.zeros_like(xe[:L]) if bias is None else bias.expand(L, D).clone()
        for j in range(W):
            first = S - (W - 1) + j
            acc = acc + weight[:, j] * xe[first : first + L]
        pre[cu[n] : cu[n + 1]] = acc
        ht[n] = xe[L:].T
    return _act(pre, activation), pre, ht


def causal_conv1d_bwd(x, weight, dy, bias=None, cu=None, initial_state=None, dht=None, activation="silu"):
    """Gradients dx, dweight, dbias, dinitial_state. dht reaches both x and the old state."""
    (T, D), W = x.shape, weight.shape[1]
    cu = [0, T] if cu is None else cu
    h0 = x.new_zeros(len(cu) - 1, D, W - 1) if initial_state is None else initial_state
    S = h0.shape[2]
    _, pre, _ = causal_conv1d_fwd(x, weight, bias, cu, h0, activation)
    ge = dy * _act_grad(pre, activation)
    dx, dw, dh0 = torch.zeros_like(x), torch.zeros_like(weight), torch.zeros_like(h0)
    for n in range(len(cu) - 1):
        L = cu[n + 1] - cu[n]
        xe = torch.cat([h0[n].T, x[cu[n] : cu[n + 1]]])
        dxe = torch.zeros_like(xe)
        if dht is not None:
            dxe[L:] += dht[n].T
        g_n = ge[cu[n] : cu[n + 1]]
        for j in range(W):
            first = S - (W - 1) + j
            dxe[first : first + L] += g_n * weight[:, j]
            dw[:, j] += (g_n * xe[first : first + L]).sum(0)
        dx[cu[n] : cu[n + 1]], dh0[n] = dxe[S:], dxe[:S].T
    return dx, dw, ge.sum(0), dh0


def to_head_major(y, head_num):
    """Token-major [T, D] -> head-major [head_num, T, D / head_num]."""
    return y.reshape(y.shape[0], head_num, -1).transpose(0, 1)


def causal_conv1d_update(
    x,
    pool,
    weight,
    bias=None,
    cu=None,
    slots=None,
    pad_slot=-1,
    num_accepted=None,
    cache_seqlens=None,
    has_initial_state=None,
    state_anchor="tail",
    activation="silu",
):
    """x [T, D] packed, pool [slots, D, S] changed in place, returns y (0 for sequences whose slot is pad_slot).
    has_initial_state[n] = False: the old row counts as zeros.
    plain, tail:  history = last W-1 columns; the row becomes the last S columns of (row, new samples).
    plain, head:  history = first W-1 columns, replaced by the last W-1 samples; later columns stay.
    circular:     cache_seqlens[n] samples were written before; history and new samples sit at (count + i) mod S.
    speculative:  num_accepted[n] = a >= 1 tokens of the previous call became final. The row is anchored at column 0:
                  history = row[a-1 : a-1+W-1]; then row[0 : W-2] = its last W-2 samples, row[W-2 : W-2+L] = x."""
    W, S, y = weight.shape[1], pool.shape[2], torch.zeros_like(x)
    for n in range(len(cu) - 1):
        L = cu[n + 1] - cu[n]
        slot = n if slots is None else int(slots[n])
        if slot == pad_slot or L == 0:
            continue
        xn, row = x[cu[n] : cu[n + 1]].T, pool[slot]  # [D, L], [D, S]
        if has_initial_state is not None and not has_initial_state[n]:
            row.zero_()
        if num_accepted is not None:
            a = int(num_accepted[n])
            hist = row[:, a - 1 : a - 1 + W - 1].clone()
        elif cache_seqlens is not None:
            c = int(cache_seqlens[n])
            hist = row[:, [(c - (W - 1) + i) % S for i in range(W - 1)]].clone()
        else:
            hist = (row[:, : W - 1] if state_anchor == "head" else row[:, S - (W - 1) :]).clone()
        y[cu[n] : cu[n + 1]] = causal_conv1d_fwd(xn.T, weight, bias, None, hist[None], activation)[0]
        if num_accepted is not None:
            row[:, : W - 2], row[:, W - 2 : W - 2 + L] = hist[:, 1:], xn
        elif cache_seqlens is not None:
            for i in range(L):
                row[:, (int(cache_seqlens[n]) + i) % S] = xn[:, i]
        elif state_anchor == "head":
            row[:, : W - 1] = torch.cat([hist, xn], 1)[:, L:]
        else:
            row.copy_(torch.cat([row, xn], 1)[:, L:])
    return y


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
    o, ht = torch.zeros_like(v), h0.clone()
    for n in range(len(cu) - 1):
        S = h0[n]
        for t in range(cu[n], cu[n + 1]):
            S = S * g[:, t].exp()[:, None, None]
            d = beta[:, t, None] * (v[:, t] - torch.einsum("hkv,hk->hv", S, k[:, t]))
            S = S + k[:, t, :, None] * d[:, None, :]
            o[:, t] = scale * torch.einsum("hkv,hk->hv", S, q[:, t])
        ht[n] = S
    return o, ht


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


# --- RMSNorm ---------------------------------------------------------------------------------------------------------
def _gate_act(z, activation):
    return torch.sigmoid(z) if activation == "sigmoid" else z * torch.sigmoid(z)


def rms_norm_gated_fwd(x, z, weight, eps=1e-6, activation="silu"):
    """y = weight * x / sqrt(mean x^2 + eps) * act(z), norm before gate, no intermediate rounding. Returns y, rstd."""
    rstd = (x.square().mean(-1) + eps).rsqrt()
    return weight * x * rstd[..., None] * _gate_act(z, activation), rstd


def rms_norm_gated_bwd(x, z, weight, rstd, dy, activation="silu"):
    """Gradients dx, dz, dweight (summed over all rows)."""
    s, xh, act = torch.sigmoid(z), x * rstd[..., None], _gate_act(z, activation)
    dact = s * (1 - s) if activation == "sigmoid" else s * (1 + z * (1 - s))
    dxh = dy * weight * act
    dx = rstd[..., None] * (dxh - xh * (dxh * xh).mean(-1, keepdim=True))
    return dx, dy * weight * xh * dact, (dy * xh * act).reshape(-1, x.shape[-1]).sum(0)


def rms_norm_gated_hf(x, z, weight, eps=1e-6, activation="silu"):
    """Rounding order of Transformers for x of a 16-bit type: normalise in fp32, round to x.dtype, multiply by weight in
    the promoted type of (weight, x) and round there, multiply by act(z) in fp32, round to x.dtype."""
    xf = x.float()
    xh = (xf * (xf.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
    wide = torch.promote_types(weight.dtype, x.dtype)
    wx = (weight.float() * xh.float()).to(wide)
    return (wx.float() * _gate_act(z.float(), activation)).to(x.dtype)


def rms_norm_fwd(x, weight, eps=1e-6):
    """Zero-centred: y = x / sqrt(mean x^2 + eps) * (1 + weight). Returns y, rstd."""
    rstd = (x.square().mean(-1) + eps).rsqrt()
    return x * rstd[..., None] * (1 + weight), rstd


def rms_norm_bwd(x, weight, rstd, dy):
    """Gradients dx, dweight (summed over all rows)."""
    xh = x * rstd[..., None]
    dxh = dy * (1 + weight)
    dx = rstd[..., None] * (dxh - xh * (dxh * xh).mean(-1, keepdim=True))
    return dx, (dy * xh).reshape(-1, x.shape[-1]).sum(0)


# --- rotary position embedding ---------------------------------------------------------------------------------------
def mrope_axis(half_dim, section):
    """Which position axis (0 time, 1 height, 2 width) drives frequency i in the interleaved layout."""
    return [
        1 if i % 3 == 1 and i < 3 * section[1] else 2 if i % 3 == 2 and i < 3 * section[2] else 0
        for i in range(half_dim)
    ]


def mrope_cos_sin(pos, inv_freq, section):
    """pos [3, ..., T] -> cos, sin [..., T, 2 * half], both halves equal. The angle is an fp32 product, as in models."""
    axis = mrope_axis(inv_freq.shape[0], section)
    angle = (pos.float()[axis].movedim(0, -1) * inv_freq.float()).double()
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def partial_rope_fwd(x, cos, sin):
    """x [..., T, D]: rotate pairs (i, i + R/2) of the first R = cos.shape[-1] channels, pass the rest."""
    R = cos.shape[-1]
    x1, x2 = x[..., : R // 2], x[..., R // 2 : R]
    (c1, c2), (s1, s2) = cos.chunk(2, -1), sin.chunk(2, -1)
    return torch.cat([x1 * c1 - x2 * s1, x2 * c2 + x1 * s2, x[..., R:]], -1)


def partial_rope_bwd(dy, cos, sin):
    """Transpose of the rotation."""
    R = cos.shape[-1]
    d1, d2 = dy[..., : R // 2], dy[..., R // 2 : R]
    (c1, c2), (s1, s2) = cos.chunk(2, -1), sin.chunk(2, -1)
    return torch.cat([d1 * c1 + d2 * s2, d2 * c2 - d1 * s1, dy[..., R:]], -1)


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
