"""A linear layer's product for types that torch multiplies slowly on this CPU."""

import torch

from tidegate._native import ops

ONEDNN = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """weight [N, K] times x [..., K], plus bias [N]: fp32 sums, rounded once. torch.nn.functional.linear's call."""
    return ops.linear_fwd(x, weight, bias)


def torch_is_slow(dtype):
    """Whether torch has no product of its own for a 16-bit type here: it then takes 5 to 25 times as long as ours."""
    probe = getattr(torch.ops.mkldnn, ONEDNN.get(dtype, ""), None)
    return probe is not None and not probe()
