"""Row norms with the names and the arithmetic of the models."""

import torch
from torch import nn

from tidegate._native import ops


def rms_norm_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    activation: str = "silu",
    rounding: str = "hf",
) -> torch.Tensor:
    """weight * x / rms(x) * act(gate) over the last dimension.

    rounding "hf" repeats Transformers' roundings bit for bit (up to 1 ulp in rare values); "fp32" rounds once.
    """
    return ops.rms_norm_gated_fwd(x, gate, weight, eps=eps, activation=activation, rounding=rounding)[0]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x / rms(x) * (1 + weight), in fp32, rounded once: the block norm of these models."""
    return ops.rms_norm_fwd(x, weight, eps=eps)[0]


class RMSNormGated(nn.Module):
    """The gated norm of a linear-attention layer; same parameters and call as Transformers' Qwen3_5RMSNormGated.

    fp32=True keeps every intermediate in fp32 and rounds once.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        activation: str = "silu",
        fp32: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.variance_epsilon = eps
        self.activation = activation
        self.fp32 = fp32

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """rms_norm_gated with this module's weight."""
        rounding = "fp32" if self.fp32 else "hf"
        return rms_norm_gated(hidden_states, gate, self.weight, self.variance_epsilon, self.activation, rounding)

    def extra_repr(self) -> str:
        """For print()."""
        return f"{self.weight.shape[0]}, eps={self.variance_epsilon}, activation={self.activation}, fp32={self.fp32}"
