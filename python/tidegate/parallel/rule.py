"""Calls of the delta rule on a part of a shard and a range of its heads, for the two ways to pass states."""

import dataclasses

import torch

from tidegate._native import ops

NEEDS = ("q", "k", "v", "a", "b", "h0", "A_log", "dt_bias")  # bits of the backward operator, lowest first


@dataclasses.dataclass(frozen=True)
class RuleOptions:
    """What the layer says about its rule. Tensors have the layout; o is [1,T,HV,V]."""

    layout: str
    beta_scale: float = 1.0
    use_qk_l2norm: bool = True

    @property
    def token_dim(self):
        return 2 if self.layout == "BNSD" else 1

    @property
    def head_dim(self):
        return 3 - self.token_dim

    @property
    def keywords(self):
        return dict(use_qk_l2norm=self.use_qk_l2norm, beta_sigmoid=True, beta_scale=self.beta_scale, layout=self.layout)


def wide(x):
    """The type of states and sums."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def cut(options, inputs, part, keys):
    """(q, k, v, a, b, A_log, dt_bias) of a part's tokens and of the key heads [first, last), as views."""
    q, k, v, a, b, A_log, dt_bias = inputs
    group = len(A_log) // q.shape[options.head_dim]
    (k0, k1), (v0, v1) = keys, (keys[0] * group, keys[1] * group)
    tokens = part.end - part.begin

    def of(x, first, last):
        return x.narrow(options.head_dim, first, last - first).narrow(options.token_dim, part.begin, tokens)

    return of(q, k0, k1), of(k, k0, k1), of(v, v0, v1), of(a, v0, v1), of(b, v0, v1), A_log[v0:v1], dt_bias[v0:v1]


def place(x, part, keys, HK):
    """The places of a part's tokens and a range's heads in o [1,T,HV,V]."""
    group = x.shape[2] // HK
    return x[:, part.begin : part.end, keys[0] * group : keys[1] * group]


def forward(options, inputs, part, state, trains):
    """(o, final state or None, states for the backward) of one part."""
    q, k, v, a, b, A_log, dt_bias = inputs
    o, final, saved = ops.chunk_gated_delta_rule_fwd(
        q,
        k,
        v,
        a,
        b,
        state,
        cu_seqlens=part.cu,
        A_log=A_log,
        dt_bias=dt_bias,
        output_final_state=part.gives,
        out_layout="BSND",
        save_states=trains,
        **options.keywords,
    )
    return o, final if part.gives else None, saved


def backward(options, inputs, part, state, saved, do, dfinal, needs):
    """Gradients by name, those in `needs` only."""
    q, k, v, a, b, A_log, dt_bias = inputs
    bits = sum((name in needs) << i for i, name in enumerate(NEEDS))
    found = ops.chunk_gated_delta_rule_bwd(
        do,
        dfinal,
        q,
        k,
        v,
        a,
        b,
        state,
        cu_seqlens=part.cu,
        A_log=A_log,
        dt_bias=dt_bias,
        states=saved,
        out_layout="BSND",
        needs=bits,
        **options.keywords,
    )
    return dict(zip(NEEDS, found, strict=True))


class Gradients:
    """The gradients of the inputs, filled in part by part."""

    NAMES = tuple(name for name in NEEDS if name != "h0")

    def __init__(self, options, inputs, asked):
        self.options, self.inputs = options, inputs
        self.needs = {name for name, wanted in zip(self.NAMES, asked, strict=True) if wanted}
        self.found = [
            x.new_zeros(x.shape, dtype=wide(x)) if name in ("A_log", "dt_bias") else x.new_empty(x.shape)
            for name, x in zip(self.NAMES, inputs, strict=True)
        ]

    def add(self, found, part, keys):
        """Tokens and heads lie apart, so they are stored; the parameters of the gates are summed over parts."""
        for name, target in zip(self.NAMES, cut(self.options, self.found, part, keys), strict=True):
            if name in self.needs:
                target.add_(found[name]) if name in ("A_log", "dt_bias") else target.copy_(found[name])

    def result(self):
        found = zip(self.NAMES, self.found, self.inputs, strict=True)
        return tuple(total.to(x.dtype) if name in self.needs else None for name, total, x in found)
