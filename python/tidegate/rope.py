"""Rotary position embedding on the first channels of each head."""

from tidegate._native import ops


def partial_rope(q, k, cos, sin, layout="BNSD", rounding="hf"):
    """Rotates q and k by cos and sin [B, T, R] or [T, R]; channels from R on pass through. Returns (q, k)."""
    return (
        ops.partial_rope_fwd(q, cos, sin, layout=layout, rounding=rounding),
        ops.partial_rope_fwd(k, cos, sin, layout=layout, rounding=rounding),
    )
