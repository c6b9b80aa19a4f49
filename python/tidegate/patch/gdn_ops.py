"""The four functions that a linear-attention layer of Transformers calls, over our operators.

Named parameters matter: Transformers hands a function only what it names.
"""

import torch

from tidegate._native import ops
from tidegate.causal_conv1d import causal_conv1d_update as _update
from tidegate.delta_rule import chunk_gated_delta_rule as _chunk
from tidegate.errors import PackedInputError
from tidegate.recurrent import fused_recurrent_gated_delta_rule as _recurrent


def boundaries(cu_seqlens, seq_idx, tokens, fills_cache=False):
    """The boundaries of a packed batch from what reaches a layer, or None.

    With a cache the model's full attention does not keep the samples of a pack apart, so that is refused here.
    """
    packed = seq_idx is not None if cu_seqlens is None else cu_seqlens.numel() > 2
    if packed and fills_cache:
        raise PackedInputError("packed input cannot fill a cache; call with use_cache=False")
    if cu_seqlens is None and seq_idx is not None:
        return ops.seqlens(None, seq_idx.reshape(-1), None, tokens=tokens)
    return cu_seqlens


def causal_conv1d_fn(
    x, weight, bias=None, activation=None, seq_idx=None, cu_seq_lens_q=None, cu_seqlens=None, **kwargs
):
    """x [B,C,T]. Boundaries come under three names."""
    cu = boundaries(cu_seqlens if cu_seqlens is not None else cu_seq_lens_q, seq_idx, x.shape[-1])
    return ops.causal_conv1d_fwd(x.transpose(1, 2), weight, bias, cu_seqlens=cu, activation=activation)[0].transpose(
        1, 2
    )


def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, **kwargs):
    """x [B,C,T]; conv_state is changed in place."""
    if not torch.is_grad_enabled():
        return _update(x, conv_state, weight, bias, activation)
    y, state = ops.causal_conv1d_fwd(
        x.transpose(1, 2), weight, bias, conv_state.clone(), activation=activation, output_final_state=True
    )
    conv_state.copy_(state.detach())
    return y.transpose(1, 2)


def chunk_gated_delta_rule(
    query,
    key,
    value,
    g,
    beta,
    chunk_size=64,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
    seq_idx=None,
    **kwargs,
):
    return _chunk(
        query,
        key,
        value,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=boundaries(cu_seqlens, seq_idx, query.shape[1], output_final_state),
    )


def recurrent_gated_delta_rule(
    query,
    key,
    value,
    g,
    beta,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
    seq_idx=None,
    **kwargs,
):
    return _recurrent(
        query,
        key,
        value,
        g=g,
        beta=beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=boundaries(cu_seqlens, seq_idx, query.shape[1], output_final_state),
    )


# option -> names as module globals (newer releases), names as instance attributes (older ones)
NAMES = {
    "gdn_chunk": {"torch_chunk_gated_delta_rule": chunk_gated_delta_rule},
    "gdn_recurrent": {"torch_recurrent_gated_delta_rule": recurrent_gated_delta_rule},
    "gdn_conv": {"causal_conv1d_fn": causal_conv1d_fn, "causal_conv1d_update": causal_conv1d_update},
}


def replacements(options):
    """Name -> function for the operators that are switched on."""
    return {name: function for option, names in NAMES.items() if options.on(option) for name, function in names.items()}


def as_attributes(functions):
    """The same under the names that older layers keep on the instance."""
    return {name.removeprefix("torch_"): function for name, function in functions.items()}
