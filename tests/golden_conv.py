"""The causal convolution; see golden.py.

x, y [T, D], weight [D, W], state [N, D, S] with the newest sample last, S >= W - 1.
"""

import torch


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
