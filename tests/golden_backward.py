"""Double-precision backward stages of the chunked delta rule, head-major and packed like those of golden.py."""

import torch
from golden import chunk_list, decay_matrix


def _repeat(x, heads):
    return x.repeat_interleave(heads // x.shape[0], 0)


def _sum_groups(x, heads):
    """[HV, ...] -> [HK, ...]"""
    return x.unflatten(0, (heads, x.shape[0] // heads)).sum(1)


def chunk_bwd_dv_local(q, k, do, gc, scale, cu, C):
    """dv = scale (q k^T * decay)^T do."""
    q, k, dv = _repeat(q, len(do)), _repeat(k, len(do)), torch.zeros_like(do)
    for _, s, e in chunk_list(cu, C):
        P = (q[:, s:e] @ k[:, s:e].mT) * decay_matrix(gc[:, s:e])
        dv[:, s:e] = scale * P.mT @ do[:, s:e]
    return dv


def chunk_gated_delta_rule_bwd_dhu(q, k, w, do, dv, gc, dfinal, scale, cu, C):
    """dh = D, dv2 = e^(gl - gc) (k D) + dv, D <- e^gl D + scale (e^gc q)^T do - w^T dv2, chunks from the last one on.
    Returns dh, dh0, dv2."""
    q, k = _repeat(q, len(do)), _repeat(k, len(do))
    D, dv2, dh = dfinal.clone(), torch.zeros_like(dv), []
    for n, s, e in reversed(chunk_list(cu, C)):
        X, g = D[n].clone(), gc[:, s:e, None]
        dh.insert(0, X)
        dv2[:, s:e] = (g[:, -1:] - g).exp() * (k[:, s:e] @ X) + dv[:, s:e]
        from_o = scale * (g.exp() * q[:, s:e]).mT @ do[:, s:e]
        D[n] = g[:, -1:].exp() * X + from_o - w[:, s:e].mT @ dv2[:, s:e]
    return torch.stack(dh, 1), D, dv2


def chunk_bwd_dqkwg(q, k, v_new, gc, h, do, dh, dv2, scale, cu, C):
    """dq, dk (summed over the value heads of a key head), dw, and what gc gets without w and u."""
    HK, q, k = len(q), _repeat(q, len(do)), _repeat(k, len(do))
    dq, dk, dw, dg = (torch.zeros_like(t) for t in (q, q, q, gc))
    for i, (_, s, e) in enumerate(chunk_list(cu, C)):
        Q, K, g, dO, v = q[:, s:e], k[:, s:e], gc[:, s:e], do[:, s:e], v_new[:, s:e]
        dw[:, s:e] = -dv2[:, s:e] @ h[:, i].mT
        a = scale * g.exp()[..., None] * (dO @ h[:, i].mT)
        b = (g[:, -1:] - g).exp()[..., None] * (v @ dh[:, i].mT)
        ds = scale * (dO @ v.mT) * decay_matrix(g)
        m = ds * (Q @ K.mT)
        dq[:, s:e], dk[:, s:e] = a + ds @ K, b + ds.mT @ Q
        bk = (b * K).sum(-1)
        dg[:, s:e] = (a * Q).sum(-1) - bk + m.sum(-1) - m.sum(-2)
        dg[:, e - 1] += g[:, -1].exp() * (h[:, i] * dh[:, i]).sum((-1, -2)) + bk.sum(-1)
    return _sum_groups(dq, HK), _sum_groups(dk, HK), dw, dg


def prepare_wy_repr_bwd_da(k, v, beta, A, dw, du, gc, cu, C):
    """The gradient of A0 times the decay, every chunk transposed."""
    k, dA = _repeat(k, len(v)), torch.zeros_like(A)
    for _, s, e in chunk_list(cu, C):
        a, g, b = A[:, s:e, : e - s], gc[:, s:e], beta[:, s:e, None]
        X = dw[:, s:e] @ (b * g.exp()[..., None] * k[:, s:e]).mT + du[:, s:e] @ (b * v[:, s:e]).mT
        Dm = -(a.mT @ X.tril(-1) @ a.mT * decay_matrix(g)).tril(-1)
        dA[:, s:e, : e - s] = Dm.mT
    return dA


def prepare_wy_repr_bwd_full(k, v, beta, A, dA, dw, du, gc, cu, C):
    """dk (summed over the group), dv, dbeta and the rest of what gc gets."""
    HK, k = len(k), _repeat(k, len(v))
    dk, dv, dbeta, dg = (torch.zeros_like(t) for t in (k, v, beta, gc))
    for _, s, e in chunk_list(cu, C):
        a, Dm = A[:, s:e, : e - s], dA[:, s:e, : e - s].mT
        eg, b, K = gc[:, s:e, None].exp(), beta[:, s:e, None], k[:, s:e]
        tw, tu, Dk = a.mT @ dw[:, s:e], a.mT @ du[:, s:e], Dm @ K
        twk, m = (eg * tw * K).sum(-1), b * Dm * (K @ K.mT)
        dk[:, s:e] = b * Dk + Dm.mT @ (b * K) + b * eg * tw
        dv[:, s:e] = b * tu
        dbeta[:, s:e] = (Dk * K).sum(-1) + twk + (tu * v[:, s:e]).sum(-1)
        dg[:, s:e] = beta[:, s:e] * twk + m.sum(-1) - m.sum(-2)
    return _sum_groups(dk, HK), dv, dbeta, dg
