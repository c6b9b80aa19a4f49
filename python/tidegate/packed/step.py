"""Attention of one new token a row to a cache: a decode step.

SDPA of torch takes 3.4 ms for 16 heads of 256 over 1024 keys in bf16, and 8 ms where a mask makes Transformers repeat
the KV heads; the two products below take 0.1 ms. The query heads of a KV head are the rows of a group, its keys and
values the weights: they are read once, where they lie. Scores, softmax and sums are fp32, with one rounding at the end.
"""

import torch
from torch.autograd import forward_ad

from tidegate import _native
from tidegate._native import ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_plain_inference(*tensors):
    """Whether nobody follows a call: no gradient of either mode, no tracing, no function mode, no autocast, and tensors
    that are nothing but tensors."""
    return not (
        (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        or forward_ad._current_level >= 0
        or torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
        or torch._C._is_torch_function_mode_enabled()
    ) and all(type(t) is torch.Tensor for t in tensors)


def _heads_are_matrices(x):
    """Whether [B,Hkv,L,D] is [B * Hkv,L,D] without a copy."""
    return x.stride(-1) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))


def _is_mask(mask, query):
    return mask.dim() == 4 and mask.dtype in (torch.bool, torch.float32, query.dtype)


def serves(query, key, value, attention_mask, dropout):
    """Whether step_attention takes a call; the rest is SDPA's."""
    tensors = query, key, value
    return (
        query.shape[2] == 1
        and not dropout
        and is_plain_inference(*tensors)
        and all(t.device.type == "cpu" and t.dtype == query.dtype for t in tensors)
        and query.dtype in DTYPES
        and not _native.fallback
        and key.shape[:3] == value.shape[:3]
        and query.shape[0] == key.shape[0]
        and query.shape[3] == key.shape[3]
        and key.shape[2] > 0
        and query.shape[1] % key.shape[1] == 0
        and _heads_are_matrices(key)
        and _heads_are_matrices(value)
        and (attention_mask is None or _is_mask(attention_mask, query))
    )


def step_attention(query, key, value, attention_mask, scale):
    """query [B,H,1,D], key and value [B,Hkv,L,D], a mask as SDPA takes it -> [B,1,H,D of value]."""
    batch, heads, _, width = query.shape
    kv_heads, length = key.shape[1:3]
    groups = torch.full((batch * kv_heads,), heads // kv_heads, device=query.device)
    rows = query.reshape(batch * heads, width)
    scores = ops.grouped_matmul_fwd(rows, key.flatten(0, 1), groups, out_dtype=torch.float32)
    scores = scores.mul_(scale).view(batch, heads, 1, length)  # not in place below: a mask may be a batch of vmap
    if attention_mask is not None:
        mask = attention_mask[..., :length]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = torch._safe_softmax(scores, -1).view(batch * heads, length)  # a row that sees nothing is 0, as SDPA's
    out = ops.grouped_matmul_fwd(weights, value.flatten(0, 1), groups, weight_axes="kn", out_dtype=torch.float32)
    return out.to(query.dtype).view(batch, 1, heads, value.shape[3])
