"""The product inside a gated MLP."""

import torch

from tidegate._native import ops


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: fp32 arithmetic, rounded once, one pass over memory forward and one backward."""
    return ops.swiglu_fwd(gate, up)
