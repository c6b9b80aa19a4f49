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
# (1.05 to 1.4 times ours for one row, 1.5 to 2.7 times for 2 to 16). At 64 rows it is still 1.2 times ours, at 256
# level, and beyond a little faster; with AMX it multiplies more than 16 rows faster than any vector can.
FEW_ROWS, FEW_ROWS_AMX = 64, 16


def _has_amx():
    probe = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return probe is None or probe()


def rows_served(dtype: torch.dtype) -> float:
    """Up to how many rows without gradients `linear` is faster than torch's product here: none, some, any number.

    Where torch has no product at all for the type, that is so for training too: see torch_is_slow.
    """
    if torch_is_slow(dtype):
        return math.inf
    if dtype != torch.bfloat16 or _native.fallback or _native.isa() != "avx512_bf16":
        return 0
    return FEW_ROWS_AMX if _has_amx() else FEW_ROWS
