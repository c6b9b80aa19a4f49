"""Fake kernels: shapes, dtypes and devices of every native operator, without computing anything."""

import functools

import torch
from torch.library import register_fake

from tidegate import _contracts

ops = torch.ops.tidegate
SAVED_STATE_TOKENS = 256  # from one state that the backward of the delta rule wants to the next: kSavedStateTokens
names = []  # every operator that has a fake kernel, in order


def _register(name, overload, shapes):
    op = getattr(getattr(ops, name), overload)
    known = [argument.name for argument in op._schema.arguments]
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}

    @functools.wraps(shapes)
    def kernel(*args, **kwargs):
        given = dict(zip(known, args, strict=False)) | kwargs
        given |= {k: v for k, v in defaults.items() if k not in given}
        _contracts.check(name, given)
        results = shapes(*args, **kwargs)
        values = results if isinstance(results, tuple) else (results,)
        made = {slot.name: value for slot, value in zip(op._schema.returns, values, strict=False)}
        # Results too: an option may have asked for a type that they cannot have. Those not asked for are empty.
        made = {k: v for k, v in made.items() if v.dim() != 1 or not _contracts.surely(v.shape[0] == 0)}
        _contracts.check(name, given | made)
        return results

    register_fake(op, kernel)


def _fake(name):
    """Decorator for the shapes of an operator. Its .out form, if there is one, writes only into what is given."""

    def decorate(shapes):
        names.append(name)
        _register(name, "default", shapes)
        if "out" in getattr(ops, name).overloads():
            _register(name, "out", lambda *args, **kwargs: None)
        return shapes

    return decorate


def wide(x):
    """The dtype of statistics and sums."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _nothing(x, dtype=None):
    return x.new_empty((0,), dtype=dtype or x.dtype)


def _conv_sizes(x, layout):
    if layout in ("BNSD", "NTD"):
        heads, tokens, width = x.shape[-3:]
        return tokens, heads * width
    return x.shape[-2], x.shape[-1]


def _conv_output(x, head_num, layout):
    if head_num == 0:
        return x.new_empty(x.shape)
    tokens, channels = _conv_sizes(x, layout)
    lead = (x.shape[0],) if layout in ("BSND", "BNSD") else ()
    return x.new_empty((*lead, head_num, tokens, channels // head_num))


@_fake("causal_conv1d_fwd")
def _(
    x,
    weight,
    bias=None,
    initial_state=None,
    cu_seqlens=None,
    *,
    activation=None,
    head_num=0,
    output_final_state=False,
    state_len=0,
    layout="BSND",
):
    y = _conv_output(x, head_num, layout)
    if not output_final_state:
        return y, _nothing(x)
    rows = x.shape[0] if layout in ("BSND", "BNSD") else 1
    count = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else rows
    length = state_len or (initial_state.shape[2] if initial_state is not None else weight.shape[1] - 1)
    return y, x.new_empty((count, _conv_sizes(x, layout)[1], length))


@_fake("causal_conv1d_bwd")
def _(dy, x, weight, bias=None, initial_state=None, dfinal_state=None, cu_seqlens=None, **_options):
    sums = wide(x)
    return (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape, dtype=sums),
        bias.new_empty(bias.shape, dtype=sums) if bias is not None else _nothing(x, sums),
        initial_state.new_empty(initial_state.shape) if initial_state is not None else _nothing(x),
    )


@_fake("causal_conv1d_update")
def _(x, conv_state, weight, bias=None, *, head_num=0, layout="TND", **_options):
    return _conv_output(x, head_num, layout)


def _rule_sizes(k, v, cu_seqlens, layout):
    """Rows, sequences, tokens, HV, K, V."""
    rows = k.shape[0] if layout in ("BSND", "BNSD") else 1
    tokens, heads = (-2, -3) if layout in ("BNSD", "NTD") else (-3, -2)
    count = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else rows
    return rows, count, k.shape[tokens], v.shape[heads], k.shape[-1], v.shape[-1]


def _rule_output(k, v, layout, out_layout):
    rows, _, T, HV, _, V = _rule_sizes(k, v, None, layout)
    shape = {"TND": (T, HV, V), "NTD": (HV, T, V), "BSND": (rows, T, HV, V), "BNSD": (rows, HV, T, V)}
    return k.new_empty(shape[out_layout or layout])


@_fake("chunk_gated_delta_rule_fwd")
def _(
    q,
    k,
    v,
    g,
    beta,
    initial_state=None,
    cu_seqlens=None,
    A_log=None,
    dt_bias=None,
    snapshot_at=None,
    *,
    output_final_state=False,
    state_v_first=False,
    layout="BSND",
    out_layout=None,
    save_states=False,
    **_options,
):
    rows, count, T, HV, K, V = _rule_sizes(k, v, cu_seqlens, layout)
    state = (HV, V, K) if state_v_first else (HV, K, V)
    snapshots = _nothing(k, wide(k))
    if save_states:  # room for the most that any boundaries could ask for
        most = rows * ((torch.sym_max(T, 1) - 1) // SAVED_STATE_TOKENS)
        snapshots = k.new_empty((most, HV, K, V), dtype=wide(k))
    elif snapshot_at is not None:
        snapshots = k.new_empty((snapshot_at.shape[0], *state), dtype=wide(k))
    return (
        _rule_output(k, v, layout, out_layout),
        k.new_empty((count, *state), dtype=wide(k)) if output_final_state else _nothing(k, wide(k)),
        snapshots,
    )


@_fake("chunk_gated_delta_rule_bwd")
def _(
    do,
    dfinal_state,
    q,
    k,
    v,
    g,
    beta,
    initial_state=None,
    cu_seqlens=None,
    A_log=None,
    dt_bias=None,
    states=None,
    *,
    needs=255,
    **_options,
):
    sums = wide(k)
    inputs = (q, k, v, g, beta, initial_state, A_log, dt_bias)
    types = (q.dtype, k.dtype, v.dtype, sums, beta.dtype, sums, sums, sums)
    return tuple(
        x.new_empty(x.shape, dtype=dtype) if needs >> i & 1 and x is not None else _nothing(k, dtype)
        for i, (x, dtype) in enumerate(zip(inputs, types, strict=True))
    )


@_fake("chunk_gated_delta_rule_pool")
def _(q, k, v, g, beta, state, *, layout="BSND", out_layout=None, **_options):
    return _rule_output(k, v, layout, out_layout)


@_fake("recurrent_gated_delta_rule")
def _(q, k, v, g, beta, state, *, layout="TND", **_options):
    return _rule_output(k, v, layout, None)


@_fake("recurrent_gated_delta_rule_fwd")
def _(
    q,
    k,
    v,
    g,
    beta,
    initial_state=None,
    cu_seqlens=None,
    A_log=None,
    dt_bias=None,
    gk=None,
    *,
    output_final_state=False,
    state_v_first=False,
    layout="BSND",
    **_options,
):
    _, count, T, HV, K, V = _rule_sizes(k, v, cu_seqlens, layout)
    count = T if cu_seqlens is None and layout in ("TND", "NTD") else count  # a decode step: every token is a sequence
    state = (count, HV, V, K) if state_v_first else (count, HV, K, V)
    o = _rule_output(k, v, layout, None)
    return o, k.new_empty(state, dtype=wide(k)) if output_final_state else _nothing(k, wide(k))


@_fake("gdn_packed_decode")
def _(mixed, *_tensors, HV, V, **_options):
    return mixed.new_empty((mixed.shape[0], HV * V))


@_fake("gdn_segment_map")
def _(k, v, g, beta, cu_seqlens=None, A_log=None, dt_bias=None, *, layout="BSND", **_options):
    _, count, _, HV, K, V = _rule_sizes(k, v, cu_seqlens, layout)
    return k.new_empty((count, HV, K, K), dtype=wide(k)), k.new_empty((count, HV, K, V), dtype=wide(k))


@_fake("gdn_segment_combine")
def _(phi1, s1, phi2, s2):
    return phi1.new_empty(phi1.shape), s1.new_empty(s1.shape)


@_fake("gdn_gating_fwd")
def _(a, b, A_log, dt_bias=None, *, beta_scale=1.0, beta_dtype=None, layout="BSND"):
    return a.new_empty(a.shape, dtype=wide(a)), b.new_empty(b.shape, dtype=beta_dtype or b.dtype)


@_fake("gdn_gating_bwd")
def _(dg, dbeta, a, b, A_log, dt_bias=None, **_options):
    dA_log = A_log.new_empty(A_log.shape, dtype=wide(a))
    ddt_bias = torch.empty_like(dA_log) if dt_bias is not None else _nothing(a, wide(a))
    return a.new_empty(a.shape), b.new_empty(b.shape), dA_log, ddt_bias


@_fake("l2norm_fwd")
def _(x, *, eps=1e-6, out_dtype=None):
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype), x.new_empty(x.shape[:-1], dtype=wide(x))


@_fake("l2norm_bwd")
def _(dy, x, rstd, **_options):
    return x.new_empty(x.shape)


@_fake("rms_norm_gated_fwd")
def _(x, z, weight, *, eps=1e-6, activation="silu", rounding="hf", out_memory=None):
    y = x.new_empty(x.shape)
    if out_memory == "swapped":
        y = x.new_empty(x.transpose(-3, -2).shape).transpose(-3, -2)
    return y, x.new_empty(x.shape[:-1], dtype=wide(x))


@_fake("rms_norm_gated_bwd")
def _(dy, x, z, weight, rstd, **_options):
    dweight = x.new_empty((x.shape[-1],), dtype=wide(x)) if weight is not None else _nothing(x, wide(x))
    return x.new_empty(x.shape), z.new_empty(z.shape), dweight


@_fake("rms_norm_fwd")
def _(x, weight, *, eps=1e-6):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=wide(x))


@_fake("rms_norm_bwd")
def _(dy, x, weight, rstd):
    return x.new_empty(x.shape), weight.new_empty(weight.shape, dtype=wide(x))


@_fake("swiglu_fwd")
def _(gate, up):
    return gate.new_empty(gate.shape)


@_fake("swiglu_bwd")
def _(dy, gate, up):
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


@_fake("linear_fwd")
def _(x, weight, bias=None):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@_fake("linear_bwd")
def _(dy, x, weight, *, needs=7):
    dx = x.new_empty(x.shape) if needs & 1 else _nothing(x, x.dtype)
    dweight = weight.new_empty(weight.shape) if needs & 2 else _nothing(weight, weight.dtype)
    return dx, dweight, weight.new_empty(weight.shape[:1]) if needs & 4 else _nothing(weight, weight.dtype)


@_fake("partial_rope_fwd")
def _(x, cos, sin, **_options):
    return x.new_empty(x.shape)


@_fake("partial_rope_bwd")
def _(dy, cos, sin, **_options):
    return dy.new_empty(dy.shape)


@_fake("mrope_cos_sin")
def _(position_ids, inv_freq, section, *, scaling=1.0, dtype=torch.float32):
    shape = (*position_ids.shape[-2:], 2 * inv_freq.shape[0])
    return inv_freq.new_empty(shape, dtype=dtype), inv_freq.new_empty(shape, dtype=dtype)


@_fake("seqlens")
def _(cu_seqlens=None, seq_idx=None, position_ids=None, *, tokens):
    given = next(t for t in (cu_seqlens, seq_idx, position_ids) if t is not None)
    return given.new_empty((tokens + 1,), dtype=torch.int32)
