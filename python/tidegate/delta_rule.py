"""The gated delta rule over whole sequences, with the signature of flash-linear-attention (0.6)."""

import warnings
from typing import Any

import torch

from tidegate._arguments import boundaries, check_chunk_indices, one_autocast_dtype
from tidegate._native import ops, require

CHUNK_SIZES = (16, 32, 64)  # what FLA allows; here only a hint
KEYWORDS = {"A_log", "chunk_size", "dt_bias", "precision", "use_gate_in_kernel", "zero_row_safe"}


def chunk_size() -> int:
    """Tokens that the fused operator takes in at a time: snapshots at its multiples are the cheap ones."""
    require()
    return torch.ops.tidegate.chunk_size()


def _trains(*tensors):
    """Whether a backward may follow: then the forward leaves it some states."""
    return torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors)


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: object = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q, k [B,T,H,K], v [B,T,HV,V], g, beta [B,T,HV], states [N,HV,K,V]. Returns (o, final_state or None).

    kwargs: use_gate_in_kernel with A_log and dt_bias (g is then the raw gate), chunk_size (16, 32 or 64: a hint), and
    our own precision="fp32" or "bf16" and zero_row_safe=True (rows of zeros in q and k, as padding has them, get the
    gradient 0). Differentiable in all tensors.
    """
    op = "chunk_gated_delta_rule"
    if "transpose_state_layout" in kwargs:
        if state_v_first:
            raise ValueError(f"{op}: transpose_state_layout: expected none with state_v_first, got both")
        if not torch.compiler.is_compiling():  # it cannot trace a warning
            warnings.warn(
                "`transpose_state_layout` is deprecated and renamed to `state_v_first`.",
                DeprecationWarning,
                stacklevel=2,
            )
        state_v_first = kwargs.pop("transpose_state_layout")
    if "head_first" in kwargs:
        raise DeprecationWarning("head_first has been removed. Inputs must be in `[B, T, H, ...]` format.")
    if kwargs.keys() - KEYWORDS:
        raise TypeError(f"{op}: unexpected arguments {sorted(kwargs.keys() - KEYWORDS)}")
    size = kwargs.get("chunk_size", 64)
    if size not in CHUNK_SIZES:
        raise ValueError(f"{op}: chunk_size: expected 16, 32 or 64, got {size}")
    if cp_context is not None:
        if not hasattr(cp_context, "cu_seqlens"):
            raise TypeError(f"{op}: cp_context: expected type FLACPContext, got type {type(cp_context).__name__}")
        assert initial_state is None, "Initial state is not supported for CP"
        assert output_final_state is False, "Output final state is not supported for CP"
        assert cp_context.cu_seqlens is not None, "cu_seqlens is required for CP"
        raise ValueError(f"{op}: cp_context: expected None, got a context")
    use_gate = kwargs.get("use_gate_in_kernel", False)
    if use_gate:
        assert kwargs.get("A_log") is not None, "A_log must be provided when use_gate_in_kernel=True."
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(f"{op}: allow_neg_eigval: expected False without use_beta_sigmoid_in_kernel, got True")
    cu_seqlens = boundaries(op, cu_seqlens, cu_seqlens_cpu)
    check_chunk_indices(op, chunk_indices, cu_seqlens, (size,))
    q, k, v = one_autocast_dtype(q, k, v)
    A_log, dt_bias = (kwargs.get("A_log"), kwargs.get("dt_bias")) if use_gate else (None, None)
    o, final_state, _ = ops.chunk_gated_delta_rule_fwd(
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        cu_seqlens=cu_seqlens,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        beta_sigmoid=use_beta_sigmoid_in_kernel,
        beta_scale=2.0 if allow_neg_eigval else 1.0,
        state_v_first=state_v_first,
        precision=kwargs.get("precision", "fp32"),
        save_states=_trains(q, k, v, g, beta, initial_state, A_log, dt_bias),
        zero_row_safe=kwargs.get("zero_row_safe", False),
    )
    return o, final_state if output_final_state else None


chunk_gdn = chunk_gated_delta_rule
