"""Functions of flash-linear-attention (0.6), same names, arguments and results, on the CPU."""

import math

import torch
from torch import nn

from tidegate._arguments import boundaries, check_chunk_indices, check_float, check_residual, require_tensors
from tidegate._native import ops
from tidegate.delta_rule import chunk_gated_delta_rule, chunk_gdn
from tidegate.recurrent import fused_recurrent_gated_delta_rule, fused_recurrent_gdn

__all__ = [
    "FusedRMSNormGated",
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "fused_gdn_gate",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "l2norm",
    "rms_norm_gated",
]


def _check_activation(op, activation):
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"{op}: activation: expected None, silu or swish, got {activation}")


def causal_conv1d(
    x,
    weight=None,
    bias=None,
    residual=None,
    initial_state=None,
    output_final_state=False,
    activation=None,
    backend="triton",
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    chunk_indices=None,
    cp_context=None,
    **kwargs,
):
    """x [B,T,D], weight [D,W], states [N,D,W]. Returns (y, final_state or None)."""
    op = "causal_conv1d"
    if kwargs:
        raise TypeError(f"{op}: unexpected arguments {sorted(kwargs)}")
    if backend not in ("triton", "cuda", "mix"):
        raise ValueError(f"{op}: backend: expected triton, cuda or mix, got {backend}")
    if cp_context is not None:
        assert initial_state is None, "Initial state is not supported for CP"
        assert not output_final_state, "Output final state is not supported for CP"
        raise ValueError(f"{op}: cp_context: expected None, got a context")
    require_tensors(op, x=x, weight=weight)
    check_residual(op, residual, x)
    _check_activation(op, activation)
    cu_seqlens = boundaries(op, cu_seqlens, cu_seqlens_cpu)
    check_chunk_indices(op, chunk_indices, cu_seqlens)
    y, final_state = ops.causal_conv1d_fwd(
        x,
        weight,
        bias,
        initial_state,
        cu_seqlens=cu_seqlens,
        activation=activation,
        output_final_state=output_final_state,
        state_len=weight.shape[-1] if output_final_state and weight.dim() else 0,
    )
    return y if residual is None else y + residual, final_state if output_final_state else None


def causal_conv1d_update(x, cache, residual=None, weight=None, bias=None, activation=None):
    """x [N,D], [1,N,D] or [N,1,D]; cache [N,D,W] is changed in place. Returns (y of x's shape, cache)."""
    op = "causal_conv1d_update"
    _check_activation(op, activation)
    require_tensors(op, x=x, cache=cache, weight=weight)
    check_residual(op, residual, x)
    if cache.dim() != 3:
        raise ValueError(f"{op}: cache: expected [N, D, W], got {list(cache.shape)}")
    N, D = cache.shape[:2]
    if x.shape not in ((N, D), (1, N, D), (N, 1, D)):
        raise ValueError(f"{op}: x: expected [{N}, {D}], [1, {N}, {D}] or [{N}, 1, {D}], got {list(x.shape)}")
    y = ops.causal_conv1d_update(x.reshape(N, 1, D), cache, weight, bias, activation=activation, layout="BSND")
    y = y.view(x.shape)
    return y if residual is None else y + residual, cache


def l2norm(x, eps=1e-6, output_dtype=None):
    """x / sqrt(sum x^2 + eps) over the last dimension."""
    return ops.l2norm_fwd(x, eps=eps, out_dtype=output_dtype)[0]


def fused_gdn_gate(g, A_log, dt_bias=None, output_dtype=torch.float32):
    """-exp(A_log) * softplus(g + dt_bias), g [..., HV]."""
    op = "fused_gdn_gate"
    require_tensors(op, g=g, A_log=A_log)
    check_float(op, "output_dtype", output_dtype)
    if g.dim() == 0:
        raise ValueError(f"{op}: g: expected [..., HV], got {list(g.shape)}")
    flat = g.reshape(math.prod(g.shape[:-1]), g.shape[-1])
    return ops.gdn_gating_fwd(flat, flat, A_log, dt_bias, layout="TND")[0].view(g.shape).to(output_dtype)


def rms_norm_gated(
    x,
    g,
    weight,
    bias,
    activation="swish",
    residual=None,
    prenorm=False,
    residual_in_fp32=False,
    eps=1e-6,
):
    """weight * x / rms(x) * act(g), x + residual first if given. Returns y, or (y, residual) with prenorm."""
    op = "rms_norm_gated"
    if bias is not None:
        raise ValueError(f"{op}: bias: expected None, got a tensor")
    if activation not in ("swish", "silu", "sigmoid"):
        raise ValueError(f"{op}: activation: expected swish, silu or sigmoid, got {activation}")
    require_tensors(op, x=x, g=g)
    check_residual(op, residual, x)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = x if residual is None else x.to(wide) + residual.to(wide)
    if g.dtype != total.dtype:
        total, g = total.to(wide), g.to(wide)
    y = ops.rms_norm_gated_fwd(total, g, weight, eps=eps, activation=activation, rounding="fp32")[0].to(x.dtype)
    if not prenorm:
        return y
    if residual is None:
        return y, x.to(wide) if residual_in_fp32 else x
    return y, total.to(residual.dtype)


class FusedRMSNormGated(nn.Module):
    """FLA's gated norm layer: norm before gate, fp32 inside, one rounding."""

    def __init__(self, hidden_size, elementwise_affine=True, eps=1e-5, activation="swish", device=None, dtype=None):
        super().__init__()
        if activation not in ("swish", "silu", "sigmoid"):
            raise ValueError(f"Unsupported activation: {activation}")
        self.hidden_size = hidden_size
        self.elementwise_affine = elementwise_affine
        self.eps = eps
        self.activation = activation
        weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        self.register_parameter("bias", None)

    def reset_parameters(self):
        if self.elementwise_affine:
            nn.init.ones_(self.weight)

    def extra_repr(self):
        return (
            f"{self.hidden_size}, elementwise_affine={self.elementwise_affine}, eps={self.eps}, "
            f"activation={self.activation}"
        )

    def forward(self, x, g, residual=None, prenorm=False, residual_in_fp32=False):
        return rms_norm_gated(
            x, g, self.weight, self.bias, self.activation, residual, prenorm, residual_in_fp32, self.eps
        )
