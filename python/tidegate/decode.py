"""One decode step of a whole linear-attention layer, between its projections."""

from typing import Any

import torch

from tidegate._native import ops


def gdn_packed_decode(
    mixed: torch.Tensor,
    z: torch.Tensor | None,
    a: torch.Tensor | None,
    b: torch.Tensor,
    conv_state: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    state_indices: torch.Tensor,
    HK: int,
    HV: int,
    K: int,
    V: int,
    out: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Convolution, gates, l2norm, delta rule and gated norm in one call; returns y [T, HV*V] (or fills `out`).

    projection="qkv": mixed [T, 2*HK*K + HV*V], z [T, HV*V], a and b [T, HV]. projection="qkvz_ba": mixed and b as
    Qwen3-Next projects them, z and a None. conv_state [rows,D,S] and state [slots,HV,K,V] are changed in place.

    Options: conv_indices, cu_seqlens, num_accepted_tokens, null_slot, scale, eps, activation, norm_rounding,
    projection, state_v_first; see docs/operators.md. Inference only.
    """
    tensors = (mixed, z, a, b, conv_state, conv_weight, conv_bias, A_log, dt_bias, state, norm_weight)
    if out is None:
        return ops.gdn_packed_decode(*tensors, state_indices=state_indices, HK=HK, HV=HV, K=K, V=V, **options)
    ops.gdn_packed_decode.out(*tensors, state_indices=state_indices, HK=HK, HV=HV, K=K, V=V, **options, y=out)
    return out
