"""The two functions of the causal-conv1d package (1.6), same names, arguments and results, on the CPU."""

import torch

from tidegate._arguments import check_like, check_own_memory, check_tensor, require_tensors
from tidegate._native import ops

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]


def _check_activation(activation):
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError("activation must be None, silu, or swish")


def _packed(x, seq_idx):
    """Rows of x [B,T,D] as one packed row, its boundaries, and which tokens are padding (None: none is)."""
    B, T, D = x.shape
    check_like("causal_conv1d_fn", "seq_idx", seq_idx, (B, T), x, "x")
    if seq_idx.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"causal_conv1d_fn: seq_idx: expected dtype int32 or int64, got dtype {seq_idx.dtype}")
    if B * T == 0:
        return x.reshape(1, 0, D), seq_idx.new_zeros(2), None
    ids = seq_idx.long()
    padding = ids < 0
    # Rows do not share sequences, and a padding token is a sequence of its own.
    row = torch.arange(B, device=ids.device)[:, None] * (ids.amax().clamp(min=0) + 1)
    own = -1 - torch.arange(B * T, device=ids.device).view(B, T)
    cu_seqlens = ops.seqlens(None, torch.where(padding, own, ids + row).view(-1), None, tokens=B * T)
    if not torch.compiler.is_compiling() and not bool(padding.any()):
        return x.reshape(1, B * T, D), cu_seqlens, None
    # Zeros instead of the padding, so that nothing in it reaches the gradients of weight and bias.
    padding = padding[..., None]
    return x.masked_fill(padding, 0).reshape(1, B * T, D), cu_seqlens, padding


def _check_final_states_out(out, x, weight, bias):
    op, name = "causal_conv1d_fn", "final_states_out"
    if weight.dim() != 2:
        return  # the operator has more to say about it
    B, D = x.shape[:2]
    check_like(op, name, out, (B, D, weight.shape[-1] - 1), x, "x")
    if out.dtype != x.dtype:
        raise TypeError(f"{op}: {name}: expected dtype {x.dtype} (as x), got dtype {out.dtype}")
    check_own_memory(op, name, out, x=x, weight=weight, bias=bias)


def causal_conv1d_fn(
    x,
    weight,
    bias=None,
    seq_idx=None,
    initial_states=None,
    return_final_states=False,
    final_states_out=None,
    activation=None,
):
    """x [B,D,T], weight [D,W], seq_idx [B,T], states [B,D,W-1]. Returns out, or (out, final_states).

    final_states_out, used with return_final_states, may be initial_states.
    """
    _check_activation(activation)
    require_tensors("causal_conv1d_fn", x=x, weight=weight)
    check_tensor("causal_conv1d_fn", "bias", bias)
    assert seq_idx is None or initial_states is None, "initial_states must be None if seq_idx is not None"
    assert seq_idx is None or not return_final_states, "If seq_idx is not None, we don't return final_states_out"
    if x.dim() != 3:
        raise ValueError(f"causal_conv1d_fn: x: expected 3 dimensions [B, D, T], got {list(x.shape)}")
    if return_final_states and final_states_out is not None:
        _check_final_states_out(final_states_out, x, weight, bias)
    tokens_first = x.transpose(1, 2)
    if seq_idx is not None:
        packed, cu_seqlens, padding = _packed(tokens_first, seq_idx)
        y, _ = ops.causal_conv1d_fwd(packed, weight, bias, cu_seqlens=cu_seqlens, activation=activation)
        y, final = y.view(tokens_first.shape), None
        y = y if padding is None else y.masked_fill(padding, 0)
    else:
        y, final = ops.causal_conv1d_fwd(
            tokens_first, weight, bias, initial_states, output_final_state=return_final_states, activation=activation
        )
    out = y.transpose(1, 2)
    if x.is_contiguous() and not out.is_contiguous():
        out = out.contiguous()  # memory order of x, as the package promises
    if not return_final_states:
        return out
    return out, final if final_states_out is None else final_states_out.copy_(final)


def causal_conv1d_update(
    x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None
):
    """x [B,D] or [B,D,T]; conv_state [B or slots,D,S >= W-1] is changed in place. Returns out of x's shape.

    cache_seqlens makes the state circular; a negative conv_state_indices entry skips that row (out = 0).
    """
    _check_activation(activation)
    require_tensors("causal_conv1d_update", x=x, conv_state=conv_state, weight=weight)
    check_tensor("causal_conv1d_update", "conv_state_indices", conv_state_indices)
    if x.dim() not in (2, 3):
        raise ValueError(f"causal_conv1d_update: x: expected [B, D] or [B, D, T], got {list(x.shape)}")
    tokens_first = x.unsqueeze(1) if x.dim() == 2 else x.transpose(1, 2)
    indices = None if conv_state_indices is None else conv_state_indices.clamp(min=-1)
    y = ops.causal_conv1d_update(
        tokens_first,
        conv_state,
        weight,
        bias,
        cache_indices=indices,
        cache_seqlens=cache_seqlens,
        activation=activation,
        layout="BSND",
    )
    return y.squeeze(1) if x.dim() == 2 else y.transpose(1, 2)
