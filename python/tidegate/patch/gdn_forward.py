"""The forward of a whole linear-attention layer over our operators.

Projections stay modules, so LoRA, quantisation, hooks and sharding keep working; of the other parts the parameters are
read, of the norm only if it has no hooks. q and k are never repeated, gates are formed inside the delta rule, and a
step of one token is one call.
"""

import functools

import torch

from tidegate._native import ops
from tidegate.delta_rule import _trains
from tidegate.errors import PackedInputError, PatchError
from tidegate.patch import gdn_cache, gdn_padding
from tidegate.patch.gdn_families import norm_eps
from tidegate.patch.gdn_ops import boundaries
from tidegate.patch.resolve import is_sharded

STEP_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def plain(tensor, name):
    """A parameter that is read here and not through its module: it must be whole."""
    if is_sharded(tensor):
        raise PatchError(
            f"{name} is sharded on its own: apply fully_shard to the whole linear-attention layer (or its decoder "
            "layer), not to its parts"
        )
    return tensor


def fetch(module):
    """Accelerate's offloading: weights arrive when their module is called. Where they are only read: call for them."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        hook.pre_forward(module)
    return module


def release(module):
    """The other half of fetch."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        hook.post_forward(module, ())


def conv_parameters(layer, names):
    """weight [C, W] and bias of one convolution, or of several side by side."""
    weights, biases = [], []
    for name in names:
        conv = fetch(getattr(layer, name))
        weights.append(plain(conv.weight, f"{name}.weight").squeeze(1))
        biases.append(conv.bias)
    bias = None if biases[0] is None else biases[0] if len(biases) == 1 else torch.cat(biases)
    return weights[0] if len(weights) == 1 else torch.cat(weights), bias


def release_conv(layer, names):
    """The other half of conv_parameters."""
    for name in names:
        release(getattr(layer, name))


def gated_norm(layer, spec, o, z, rounding):
    """The layer's output norm; rounding None: by its own module."""
    norm = getattr(layer, spec.norm)
    if rounding is None:
        return norm(o.flatten(0, -2), z.reshape(-1, z.shape[-1])).view(o.shape)
    activation = getattr(norm, "activation", "silu")
    y = ops.rms_norm_gated_fwd(
        o, z.to(o.dtype), fetch(norm).weight, eps=norm_eps(norm), activation=activation, rounding=rounding
    )[0]
    release(norm)
    return y


def has_hooks(module):
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def step(layer, spec, x, conv_state, state, rounding):
    """One token of every row: conv and recurrent states of the cache are changed in place."""
    B = x.shape[0]
    mixed, z, a, b = spec.step(layer, x)
    weight, bias = conv_parameters(layer, spec.convs)
    norm = fetch(getattr(layer, spec.norm))
    y = ops.gdn_packed_decode(
        mixed.view(B, -1),
        None if z is None else z.view(B, -1),
        None if a is None else a.view(B, -1),
        b.view(B, -1),
        conv_state,
        weight,
        bias,
        plain(layer.A_log, "A_log"),
        layer.dt_bias,
        state,
        norm.weight,
        state_indices=torch.arange(B),
        HK=layer.num_k_heads,
        HV=layer.num_v_heads,
        K=layer.head_k_dim,
        V=layer.head_v_dim,
        eps=norm_eps(norm),
        activation=getattr(norm, "activation", "silu"),
        norm_rounding=rounding,
        projection=spec.projection,
    )
    release_conv(layer, spec.convs)
    release(norm)
    return getattr(layer, spec.out)(y.view(B, 1, -1))


def prefill(layer, spec, x, cache, conv_state, state, recording, mask, cu, rounding):
    """Any number of tokens, from zero or from a state, with gradients."""
    B, T, _ = x.shape
    HK, HV, K, V = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    mixed, z, a, b = spec.project(layer, x)
    weight, bias = conv_parameters(layer, spec.convs)
    taps = weight.shape[-1]
    if conv_state is not None:
        conv_state = conv_state.to(mixed.dtype)
    # With heads of one size the convolution can write them one after the other, as the rule likes to read them.
    head_major = K == V
    y, window = ops.causal_conv1d_fwd(
        mixed,
        weight,
        bias,
        conv_state,
        cu_seqlens=cu,
        activation="silu",
        head_num=2 * HK + HV if head_major else 0,
        output_final_state=cache is not None and mask is None and not recording,
        state_len=taps,
    )
    release_conv(layer, spec.convs)
    if cache is not None and mask is not None:
        # What follows a row's last real token must not touch its states: no decay, nothing written.
        ended = ~gdn_padding.before_end(mask)[..., None]
        a, b = (t.masked_fill(ended, gdn_padding.CLOSED) for t in (a, b))
        window = gdn_padding.last_columns(mixed, conv_state, mask, taps)
    if head_major:
        q, k, v = y.split((HK, HK, HV), 1)
        a, b = a.transpose(1, 2), b.transpose(1, 2)
    else:
        q, k, v = y.split((HK * K, HK * K, HV * V), -1)
        q, k, v = q.unflatten(-1, (HK, K)), k.unflatten(-1, (HK, K)), v.unflatten(-1, (HV, V))
    A_log, dt_bias = plain(layer.A_log, "A_log"), layer.dt_bias
    o, last, _ = ops.chunk_gated_delta_rule_fwd(
        q,
        k,
        v,
        a,
        b,
        state,
        cu_seqlens=cu,
        A_log=A_log,
        dt_bias=dt_bias,
        output_final_state=cache is not None,
        use_qk_l2norm=True,
        beta_sigmoid=True,
        beta_scale=2.0 if getattr(layer, "allow_neg_eigval", False) else 1.0,
        layout="BNSD" if head_major else "BSND",
        out_layout="BSND",
        save_states=_trains(mixed, a, b, A_log, dt_bias, state),
    )
    if recording:
        gdn_cache.record(cache, layer.layer_idx, mixed.transpose(1, 2), taps, last)
    elif cache is not None:
        gdn_cache.write(cache, layer.layer_idx, window, last, (HK * K, HK * K, HV * V))
    o = gated_norm(layer, spec, o, z.view(B, T, HV, V), rounding)
    return getattr(layer, spec.out)(o.view(B, T, HV * V))


@functools.cache
def fused_forward(spec, norm_rounding):
    """The forward of a family's layer. norm_rounding: that of the gated norm, or None to call the norm's module."""

    def forward(self, hidden_states, cache_params=None, *rest, attention_mask=None, **kwargs):
        if rest:  # (attention_mask,), or (cache_position, attention_mask) in the oldest releases
            attention_mask = rest[-1]
        x, T = hidden_states, hidden_states.shape[1]
        # Its hooks run only if the module is called.
        rounding = None if has_hooks(getattr(self, spec.norm)) else norm_rounding
        plan = kwargs.get("sequence_parallel")
        if plan is not None:
            from tidegate.parallel import linear_attention

            return linear_attention.forward(self, spec, x, plan, rounding)
        mask = attention_mask
        if mask is not None:
            mask = mask[:, mask.shape[1] - T :] if mask.dim() == 2 else None
        cu = boundaries(kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx"), T)
        if cu is not None:
            if cache_params is not None:
                raise PackedInputError("packed input cannot fill a cache; call with use_cache=False")
            mask = None  # a packed batch has no padding
        if mask is not None:
            x = x * mask[:, :, None].to(x.dtype)
        conv_state, state, recording = gdn_cache.read(cache_params, self.layer_idx)
        if (
            T == 1
            and state is not None
            and not recording
            and rounding is not None
            and mask is None
            and not torch.is_grad_enabled()
            and conv_state.dtype == x.dtype
            and x.dtype in STEP_TYPES
            and not getattr(self, "allow_neg_eigval", False)
            and gdn_cache.in_place(cache_params)
        ):
            return step(self, spec, x, conv_state, state, rounding)
        return prefill(self, spec, x, cache_params, conv_state, state, recording, mask, cu, rounding)

    return forward
