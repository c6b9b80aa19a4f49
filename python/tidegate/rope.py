"""Rotary position embedding on the first channels of each head."""

import torch

from tidegate._native import ops


def partial_rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str = "BNSD", rounding: str = "hf"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates q and k by cos and sin [B, T, R] or [T, R]; channels from R on pass through. Returns (q, k)."""
    return (
        ops.partial_rope_fwd(q, cos, sin, layout=layout, rounding=rounding),
        ops.partial_rope_fwd(k, cos, sin, layout=layout, rounding=rounding),
    )
