"""int8 experts in plain torch. Sums of products of int8 are exact in fp64 as they are in int32."""

import torch

from tidegate.fallback.checks import refuse
from tidegate.fallback.products import group_offsets, laid_as, matrices
from tidegate.fallback.routing import expert_ids

MOST = 131071  # products in a sum: int32 holds no more of them for sure


def _quantized(x, axis=-1):
    """(numbers from -127 to 127 in fp32, scales); a row with NaN or Inf has 0 and NaN."""
    x = x.float()
    most = x.abs().amax(axis, keepdim=True) if x.shape[axis] else x.sum(axis, keepdim=True)
    scale = most / 127
    scale = torch.where(scale == 0, 1.0, scale)
    finite = x.isfinite().all(axis, keepdim=True)
    q = torch.where(finite, torch.round(x / scale).clamp(-127, 127), 0.0)
    return q, torch.where(finite, scale, torch.nan).squeeze(axis)


def quantize(x, axis=-1):
    q, scale = _quantized(x, axis)
    return laid_as(q.to(torch.int8), x), scale


def _weights(op, name, weight, weight_axes):
    weight = matrices(op, name, weight, weight_axes)
    if weight.shape[2] > MOST:
        refuse(op, name, f"at most {MOST} products in a sum", weight.shape[2])
    return weight


def _product(x, x_scale, weight, weight_scale):
    return (x.double() @ weight.double().T).float() * weight_scale * x_scale[:, None]


def _swiglu(x, x_scale, weight, weight_scale, smooth=None):
    """silu(gate) * up as the numbers and scales of its rows."""
    gate, up = _product(x, x_scale, weight, weight_scale).double().chunk(2, 1)
    s = torch.nn.functional.silu(gate) * up
    return _quantized((s if smooth is None else s * smooth.double()).float())


def grouped_matmul_quant(
    x, weight, groups, weight_scale, x_scale, weight_axes="nk", group_list="counts", out_dtype=torch.float32
):
    op = "grouped_matmul_quant"
    weight = _weights(op, "weight", weight, weight_axes)
    ends = group_offsets(op, groups, x.shape[0], group_list)
    y = torch.zeros(x.shape[0], weight.shape[1])
    for g, (a, b) in enumerate(zip(ends, ends[1:], strict=False)):
        y[a:b] = _product(x[a:b], x_scale[a:b], weight[g], weight_scale[g])
    return y.to(out_dtype)


def grouped_matmul_swiglu_quant(
    x, weight, groups, weight_scale, x_scale, smooth_scale=None, weight_axes="nk", group_list="counts"
):
    op = "grouped_matmul_swiglu_quant"
    weight = _weights(op, "weight", weight, weight_axes)
    if weight.shape[1] % 2:
        refuse(op, "weight", "an even number of rows (gate and up)", weight.shape[1])
    ends = group_offsets(op, groups, x.shape[0], group_list)
    q, q_scale = torch.zeros(x.shape[0], weight.shape[1] // 2), torch.zeros(x.shape[0])
    for g, (a, b) in enumerate(zip(ends, ends[1:], strict=False)):
        smooth = None if smooth_scale is None else smooth_scale[g]
        q[a:b], q_scale[a:b] = _swiglu(x[a:b], x_scale[a:b], weight[g], weight_scale[g], smooth)
    return q.to(torch.int8), q_scale


def moe_experts_quant(
    x, ids, weights, gate_up, gate_up_scale, down, down_scale, weight_axes="nk", ids_convention="plain"
):
    op = "moe_experts_quant"
    gate_up, down = _weights(op, "gate_up", gate_up, weight_axes), _weights(op, "down", down, weight_axes)
    ids = expert_ids(op, ids, len(gate_up), ids_convention)
    q, scale = _quantized(x)
    out = torch.zeros(x.shape)
    for e in ids[ids >= 0].unique().tolist():
        t, slot = (ids == e).nonzero(as_tuple=True)
        inner = _swiglu(q[t], scale[t], gate_up[e], gate_up_scale[e])
        out.index_add_(0, t, weights[t, slot, None].float() * _product(*inner, down[e], down_scale[e]))
    return out.to(x.dtype)
