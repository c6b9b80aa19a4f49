"""Fake kernels of the experts: shapes and dtypes, without computing anything."""

import torch

from tidegate._contracts import surely
from tidegate._fake import _fake, _nothing, wide


@_fake("moe_route_fwd")
def _(logits, replay_ids=None, *, top_k, weights_dtype=None, output_probs=False, **_options):
    T, E = logits.shape
    probs = logits.new_empty((T, E), dtype=wide(logits)) if output_probs else _nothing(logits, wide(logits))
    ids = logits.new_empty((T, top_k), dtype=torch.int32)
    return logits.new_empty((T, top_k), dtype=weights_dtype or logits.dtype), ids, probs


@_fake("moe_route_bwd")
def _(dweights, dprobs, logits, ids, **_options):
    return logits.new_empty(logits.shape)


@_fake("moe_init_routing")
def _(ids, *, num_experts, **_options):
    index = lambda shape, dtype: ids.new_empty(shape, dtype=dtype)  # noqa: E731
    pairs = ids.shape[0] * ids.shape[1]
    return index((num_experts,), torch.int64), index((pairs,), torch.int32), index(ids.shape, torch.int32)


@_fake("moe_permute")
def _(x, src, pos):
    return x.new_empty((src.shape[0], x.shape[1]))


@_fake("moe_unpermute_fwd")
def _(y, pos, weights=None):
    return y.new_empty((pos.shape[0], y.shape[1]))


@_fake("moe_unpermute_bwd")
def _(dout, y, pos, weights=None):
    dweights = _nothing(y, wide(y)) if weights is None else weights.new_empty(weights.shape)
    return y.new_empty(y.shape), dweights


@_fake("grouped_matmul_fwd")
def _(x, weight, groups, bias=None, *, weight_axes="nk", out_dtype=None, **_options):
    return x.new_empty((x.shape[0], weight.shape[1 if weight_axes == "nk" else 2]), dtype=out_dtype or x.dtype)


def _weight_like(t):
    """The gradient of a parameter: a matrix whose rows are its inner dimension in memory stays that way."""
    if t.dim() < 2 or surely(t.stride(-1) == 1) or not surely(t.stride(-2) == 1):
        return t.new_empty(t.shape)
    return t.new_empty(t.transpose(-2, -1).shape).transpose(-2, -1)


@_fake("grouped_matmul_bwd")
def _(dy, x, weight, groups, *, needs=7, **_options):
    made = x.new_empty(x.shape), _weight_like(weight), weight.new_empty((groups.shape[0], dy.shape[1]))
    return tuple(t if needs >> i & 1 else _nothing(weight) for i, t in enumerate(made))


@_fake("moe_experts_fwd")
def _(x, ids, weights, gate_up, down, *_tensors, weight_axes="nk", save_hidden=False, **_options):
    if not save_hidden or x.dtype == torch.float64:
        return x.new_empty(x.shape), _nothing(x, torch.float32)
    shape = ids.shape[0] * ids.shape[1], 2, down.shape[2 if weight_axes == "nk" else 1]
    return x.new_empty(x.shape), x.new_empty(shape, dtype=torch.float32)


@_fake("moe_experts_bwd")
def _(
    dout,
    x,
    ids,
    weights,
    gate_up,
    down,
    shared_gate=None,
    shared_up=None,
    shared_down=None,
    shared_router=None,
    gate_up_lora_a=None,
    gate_up_lora_b=None,
    down_lora_a=None,
    down_lora_b=None,
    hidden=None,
    *,
    needs=4095,
    **_options,
):
    inputs = (x, weights, gate_up, down, shared_gate, shared_up, shared_down, shared_router)
    inputs += (gate_up_lora_a, gate_up_lora_b, down_lora_a, down_lora_b)
    return tuple(
        _nothing(x if t is None else t) if t is None or not needs >> i & 1 else _weight_like(t)
        for i, t in enumerate(inputs)
    )


@_fake("quantize")
def _(x, *, axis=-1):
    d = axis % x.dim()
    turned = x.dim() >= 2 and not surely(x.stride(-1) == 1) and surely(x.stride(-2) == 1)
    q = x.transpose(-2, -1).new_empty(x.transpose(-2, -1).shape, dtype=torch.int8).transpose(-2, -1) if turned else None
    q = x.new_empty(x.shape, dtype=torch.int8) if q is None else q
    return q, x.new_empty((*x.shape[:d], *x.shape[d + 1 :]), dtype=torch.float32)


@_fake("grouped_matmul_swiglu_quant")
def _(x, weight, groups, weight_scale, x_scale, smooth_scale=None, *, weight_axes="nk", **_options):
    columns = weight.shape[1 if weight_axes == "nk" else 2]
    return x.new_empty((x.shape[0], columns // 2)), x_scale.new_empty((x.shape[0],))


@_fake("grouped_matmul_quant")
def _(x, weight, groups, weight_scale, x_scale, *, weight_axes="nk", out_dtype=torch.float32, **_options):
    return x.new_empty((x.shape[0], weight.shape[1 if weight_axes == "nk" else 2]), dtype=out_dtype)


@_fake("moe_experts_quant")
def _(x, *_tensors, **_options):
    return x.new_empty(x.shape)
