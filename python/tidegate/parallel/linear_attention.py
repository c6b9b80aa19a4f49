"""A linear-attention layer on a shard of tokens: by heads, or with states that pass from shard to shard."""

import functools

import torch

from tidegate._native import ops
from tidegate.delta_rule import _trains
from tidegate.parallel.chain import ChainRule
from tidegate.parallel.exchange import ToHeads, ToTokens
from tidegate.parallel.halo import HaloConv
from tidegate.parallel.plan import fill_up, shares
from tidegate.parallel.rule import RuleOptions
from tidegate.parallel.scan import ScanRule
from tidegate.patch.gdn_forward import conv_parameters, gated_norm, plain, release_conv


def by_heads(plan, sizes, mixed, a, b, weight, bias, A_log, dt_bias, beta_scale=1.0):
    """All tokens, this rank's heads: conv and rule as in one process, on ranges of the whole weights.

    mixed [1,T,C] (q, k, v of all heads), a, b [1,T,HV] of this rank's tokens -> o [1,T,HV,V] of them.
    """
    HK, HV, K, V = sizes
    dtype = functools.reduce(torch.promote_types, (mixed.dtype, a.dtype, b.dtype))
    q, k, v = mixed[0].split((HK * K, HK * K, HV * V), 1)
    tensors = [
        q.unflatten(1, (HK, K)),
        k.unflatten(1, (HK, K)),
        v.unflatten(1, (HV, V)),
        a[0, :, :, None],
        b[0, :, :, None],
    ]
    keys = shares(HK, plan.ranks)
    values = [(first * (HV // HK), last * (HV // HK)) for first, last in keys]
    found = ToHeads.apply(plan, [keys, keys, values, values, values], *(t.to(dtype) for t in tensors))
    (k0, k1), (v0, v1) = keys[plan.rank], values[plan.rank]

    def conv(x, first, last, width):
        """x [T,heads,width], channels [first, last) of the weights -> [1,heads,T,width]"""
        x = x.flatten(1)[None].to(mixed.dtype)
        part = None if bias is None else bias[first:last]
        options = dict(cu_seqlens=plan.whole_cu, activation="silu", head_num=x.shape[-1] // width)
        return ops.causal_conv1d_fwd(x, weight[first:last], part, **options)[0]

    q = conv(found[0], k0 * K, k1 * K, K)
    k = conv(found[1], (HK + k0) * K, (HK + k1) * K, K)
    v = conv(found[2], 2 * HK * K + v0 * V, 2 * HK * K + v1 * V, V)
    gates = [x[..., 0].T[None].to(like.dtype) for x, like in ((found[3], a), (found[4], b))]
    A_log, dt_bias = A_log[v0:v1], dt_bias[v0:v1]
    o, _, _ = ops.chunk_gated_delta_rule_fwd(
        q,
        k,
        v,
        *gates,
        cu_seqlens=plan.whole_cu,
        A_log=A_log,
        dt_bias=dt_bias,
        use_qk_l2norm=True,
        beta_sigmoid=True,
        beta_scale=beta_scale,
        layout="BNSD",
        out_layout="BSND",
        save_states=_trains(q, k, v, *gates, A_log, dt_bias),
    )
    return ToTokens.apply(plan, values, HV, o[0])[None]


def by_states(plan, sizes, mixed, a, b, weight, bias, A_log, dt_bias, beta_scale=1.0):
    """This rank's tokens, all heads. Arguments and result as of by_heads."""
    HK, HV, K, V = sizes
    head_major = K == V
    y = HaloConv.apply(plan, 2 * HK + HV if head_major else 0, mixed, weight, bias)
    if head_major:
        q, k, v = y.split((HK, HK, HV), 1)
        a, b = a.transpose(1, 2), b.transpose(1, 2)
    else:
        q, k, v = y.split((HK * K, HK * K, HV * V), -1)
        q, k, v = q.unflatten(-1, (HK, K)), k.unflatten(-1, (HK, K)), v.unflatten(-1, (HV, V))
    options = RuleOptions("BNSD" if head_major else "BSND", beta_scale)
    function = ScanRule if plan.linear == "scan" else ChainRule
    return function.apply(plan, options, q, k, v, a, b, A_log, dt_bias)


def forward(layer, spec, x, plan, rounding):
    """What gdn_forward.prefill does, for a shard. Rows of x beyond the shard's tokens are padding and get zeros."""
    sizes = HK, HV, K, V = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    mixed, z, a, b = spec.project(layer, x)
    weight, bias = conv_parameters(layer, spec.convs)
    mix = by_heads if plan.linear == "heads" else by_states
    beta_scale = 2.0 if getattr(layer, "allow_neg_eigval", False) else 1.0
    mixed, a, b = (t[:, : plan.own.tokens] for t in (mixed, a, b))
    o = mix(plan, sizes, mixed, a, b, weight, bias, plain(layer.A_log, "A_log"), layer.dt_bias, beta_scale)
    release_conv(layer, spec.convs)
    o = fill_up(o, x.shape[1])
    o = gated_norm(layer, spec, o, z.view(*z.shape[:2], HV, V), rounding)
    return getattr(layer, spec.out)(o.flatten(2))
