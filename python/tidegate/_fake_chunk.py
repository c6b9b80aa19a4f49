"""Fake kernels of the stages of the chunked delta rule; see _fake.py."""

import torch

from tidegate._fake import _fake, _nothing, wide


@_fake("chunk_local_cumsum")
def _(g, chunk_size, cu_seqlens=None, *, out_dtype=None, **_options):
    return g.new_empty(g.shape, dtype=out_dtype or wide(g))


@_fake("chunk_scaled_dot_kkt")
def _(k, gc, beta, cu_seqlens=None, *, chunk_size=64, inter_dtype=None, layout="BSND"):
    return k.new_empty((*beta.shape, chunk_size), dtype=inter_dtype or wide(k))


@_fake("solve_tril")
def _(A0, cu_seqlens=None, *, inter_dtype=None, layout="BSND"):
    return A0.new_empty(A0.shape, dtype=inter_dtype or wide(A0))


@_fake("recompute_w_u")
def _(k, v, beta, A, gc, cu_seqlens=None, *, inter_dtype=None, layout="BSND"):
    dtype = inter_dtype or wide(k)
    return k.new_empty((*beta.shape, k.shape[-1]), dtype=dtype), v.new_empty(v.shape, dtype=dtype)


def _chunk_count(tokens, chunk_size, cu_seqlens, num_chunks):
    """Chunks in a row. With boundaries their number depends on values: the caller says it, or it stays unknown."""
    if cu_seqlens is None:
        return (tokens + chunk_size - 1) // chunk_size
    return torch.library.get_ctx().new_dynamic_size() if num_chunks is None else num_chunks


def _states(gc, K, V, cu_seqlens, chunk_size, state_v_first, num_chunks, layout):
    """Shapes of one state per chunk (h) and of one per sequence."""
    rows = gc.shape[0] if layout in ("BSND", "BNSD") else 1
    tokens, heads = (-1, -2) if layout in ("BNSD", "NTD") else (-2, -1)
    steps = list(gc.shape)
    steps[tokens] = _chunk_count(gc.shape[tokens], chunk_size, cu_seqlens, num_chunks)
    count = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else rows
    return (*steps, K, V), (count, gc.shape[heads], *((V, K) if state_v_first else (K, V)))


@_fake("chunk_gated_delta_rule_fwd_h")
def _(
    k,
    w,
    u,
    gc,
    initial_state=None,
    cu_seqlens=None,
    *,
    chunk_size=64,
    output_final_state=False,
    state_v_first=False,
    num_chunks=None,
    inter_dtype=None,
    layout="BSND",
):
    dtype = inter_dtype or wide(k)
    h, state = _states(gc, k.shape[-1], u.shape[-1], cu_seqlens, chunk_size, state_v_first, num_chunks, layout)
    final_state = k.new_empty(state, dtype=wide(k)) if output_final_state else _nothing(k, wide(k))
    return k.new_empty(h, dtype=dtype), u.new_empty(u.shape, dtype=dtype), final_state


@_fake("chunk_fwd_o")
def _(q, k, v_new, h, gc, cu_seqlens=None, **_options):
    return v_new.new_empty(v_new.shape, dtype=q.dtype)


@_fake("chunk_bwd_dv_local")
def _(q, k, do, gc, cu_seqlens=None, *, inter_dtype=None, **_options):
    return do.new_empty(do.shape, dtype=inter_dtype or wide(q))


@_fake("chunk_gated_delta_rule_bwd_dhu")
def _(
    q,
    k,
    w,
    do,
    dv,
    gc,
    dfinal_state=None,
    cu_seqlens=None,
    *,
    scale=None,
    chunk_size=64,
    state_v_first=False,
    num_chunks=None,
    inter_dtype=None,
    layout="BSND",
):
    dtype = inter_dtype or wide(q)
    dh, dh0 = _states(gc, q.shape[-1], do.shape[-1], cu_seqlens, chunk_size, state_v_first, num_chunks, layout)
    return q.new_empty(dh, dtype=dtype), q.new_empty(dh0, dtype=wide(q)), do.new_empty(do.shape, dtype=dtype)


@_fake("chunk_bwd_dqkwg")
def _(q, k, v_new, gc, h, do, dh, dv2, cu_seqlens=None, *, inter_dtype=None, **_options):
    dtype = inter_dtype or wide(q)
    shapes = (q.shape, q.shape, (*gc.shape, q.shape[-1]))
    return (*(q.new_empty(shape, dtype=dtype) for shape in shapes), gc.new_empty(gc.shape, dtype=wide(q)))


@_fake("prepare_wy_repr_bwd_da")
def _(k, v, beta, A, dw, du, gc, cu_seqlens=None, *, inter_dtype=None, layout="BSND"):
    return A.new_empty(A.shape, dtype=inter_dtype or wide(k))


def _wy_gradients(k, v, gc, inter_dtype):
    """dk, dv, dbeta, dg"""
    dtype, sums = inter_dtype or wide(k), wide(k)
    return (
        k.new_empty(k.shape, dtype=dtype),
        v.new_empty(v.shape, dtype=dtype),
        gc.new_empty(gc.shape, dtype=sums),
        gc.new_empty(gc.shape, dtype=sums),
    )


@_fake("prepare_wy_repr_bwd_full")
def _(k, v, beta, A, dA, dw, du, gc, cu_seqlens=None, *, inter_dtype=None, layout="BSND"):
    return _wy_gradients(k, v, gc, inter_dtype)


@_fake("prepare_wy_repr_bwd")
def _(k, v, beta, A, dw, du, gc, cu_seqlens=None, *, inter_dtype=None, layout="BSND"):
    return _wy_gradients(k, v, gc, inter_dtype)
