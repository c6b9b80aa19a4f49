"""A linear layer's product in 16 bits, for CPUs or numbers of rows for which torch's own is slower."""

import math

import torch

from tidegate import _native
from tidegate._native import ops

ONEDNN = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """weight [N, K] times x [..., K], plus bias [N]: fp32 sums, rounded once. torch.nn.functional.linear's call."""
    return ops.linear_fwd(x, weight, bias)


def torch_is_slow(dtype):
    """Whether torch has no product of its own for a 16-bit type here: it then takes 5 to 25 times as long as ours."""
    probe = getattr(torch.ops.mkldnn, ONEDNN.get(dtype, ""), None)
    return probe is not None and not probe()


# bf16 on AVX-512 BF16: up to 16 rows the time is that of reading the weight, which torch does at a half of the rate
# (1.05 to 1.4 times ours for one row, 1.5 to 2.5 times for 2 to 16); it draws level between 64 and 1024 rows.
FEW_ROWS = 64


def rows_served(dtype: torch.dtype) -> float:
    """Up to how many rows `linear` is faster than torch's product here: none, some, or any number."""
    if torch_is_slow(dtype):
        return math.inf
    return FEW_ROWS if dtype == torch.bfloat16 and not _native.fallback and _native.isa() == "avx512_bf16" else 0
