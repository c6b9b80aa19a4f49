"""The gated delta rule token by token: on a pool of states, and with the signature of flash-linear-attention (0.6)."""

import warnings
from typing import Any

import torch

from tidegate._arguments import one_autocast_dtype
from tidegate._native import ops


def recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    state_indices: torch.Tensor,
    out: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """One or several tokens per sequence on state [slots,HV,K,V], changed in place; returns o (or fills `out`).

    state_indices [N]: the slot of every sequence. [N,M]: the state after token t goes to slot [n,t], and the sequence
    starts from slot [n,a-1], a = num_accepted_tokens[n] of the previous call (default 1). Inference only.

    Options: gk, cu_seqlens, num_accepted_tokens, has_initial_state, A_log, dt_bias, null_slot, scale, use_qk_l2norm,
    beta_sigmoid, beta_scale, state_v_first, layout; see docs/operators.md.
    """
    if out is None:
        return ops.recurrent_gated_delta_rule(q, k, v, g, beta, state, state_indices=state_indices, **options)
    ops.recurrent_gated_delta_rule.out(q, k, v, g, beta, state, state_indices=state_indices, **options, o=out)
    return out


def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q, k [B,T,H,K], v [B,T,HV,V], g [B,T,HV], gk [B,T,HV,K], beta [B,T,HV] or [B,T,HV,V], states [N,HV,K,V].

    Returns (o, final_state or None); inputs are not changed. q, k and v may differ in type: o has that of v.
    """
    op = "fused_recurrent_gated_delta_rule"
    if "transpose_state_layout" in kwargs:
        if state_v_first:
            raise ValueError(f"{op}: transpose_state_layout: expected none with state_v_first, got both")
        warnings.warn(
            "`transpose_state_layout` is deprecated and renamed to `state_v_first`.", DeprecationWarning, stacklevel=2
        )
        state_v_first = kwargs.pop("transpose_state_layout")
    if kwargs:
        raise TypeError(f"{op}: unexpected arguments {sorted(kwargs)}")
    if gv is not None:
        raise ValueError(f"{op}: gv: expected None, got a tensor")
    if use_gate_in_kernel and (A_log is None or g is None):
        raise ValueError(
            f"{op}: {'A_log' if g is not None else 'g'}: expected a tensor with use_gate_in_kernel, got none"
        )
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(f"{op}: allow_neg_eigval: expected False without use_beta_sigmoid_in_kernel, got True")
    if beta is None:
        beta = torch.ones(v.shape[:-1], dtype=q.dtype, device=q.device)
    if initial_state is not None and initial_state.dtype in (torch.bfloat16, torch.float16):
        initial_state = initial_state.float()
    q, k, v = one_autocast_dtype(q, k, v)
    narrow = v.dtype
    if not q.dtype == k.dtype == v.dtype:
        wide = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
    o, final_state = ops.recurrent_gated_delta_rule_fwd(
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        cu_seqlens=cu_seqlens,
        A_log=A_log if use_gate_in_kernel else None,
        dt_bias=dt_bias if use_gate_in_kernel else None,
        gk=gk,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        beta_sigmoid=use_beta_sigmoid_in_kernel,
        beta_scale=2.0 if allow_neg_eigval else 1.0,
        state_v_first=state_v_first,
    )
    return o.to(narrow), final_state if output_final_state else None


fused_recurrent_gdn = fused_recurrent_gated_delta_rule
