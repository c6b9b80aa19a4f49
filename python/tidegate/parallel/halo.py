"""The causal convolution of a shard: its first fragment looks back at the last rows of the shards before it."""

import torch
from torch.autograd.function import once_differentiable

from tidegate._native import ops


def _sizes(plan, width):
    """Global row ranges that this rank sends to and receives from every rank."""
    mine, ranks = plan.rank, range(plan.ranks)
    return [plan.halo(width, r, mine) for r in ranks], [plan.halo(width, mine, r) for r in ranks]


def rows_from_left(plan, x, width):
    """The `width` rows in front of the shard's first fragment, [width, C], zeros where its sequence has none; None if
    the shard takes nothing. x [own tokens, C]."""
    sends, receives = _sizes(plan, width)
    first = plan.own.begin
    buffer = torch.cat([x[a - first : b - first] for a, b in sends if b > a] or [x[:0]])
    C = x.shape[1]
    found = plan.link.all_to_all(
        buffer.view(-1), [(b - a) * C for a, b in sends], [(b - a) * C for a, b in receives], "halo"
    )
    if not plan.own.takes:
        return None
    found = found.view(-1, C)
    return torch.cat([found.new_zeros(width - len(found), C), found])


def gradients_to_left(plan, gradient, dx, width):
    """Brings the gradients of rows_from_left home and adds them to dx [own tokens, C]. gradient: [width, C] or None."""
    receives, sends = _sizes(plan, width)
    C, first = dx.shape[1], plan.own.begin
    count = sum(b - a for a, b in sends)
    buffer = dx[:0] if gradient is None else gradient[width - count :]
    found = plan.link.all_to_all(
        buffer.reshape(-1), [(b - a) * C for a, b in sends], [(b - a) * C for a, b in receives], "halo"
    )
    for (a, b), rows in zip(receives, found.split([(b - a) * C for a, b in receives]), strict=True):
        dx[a - first : b - first] += rows.view(-1, C)


class HaloConv(torch.autograd.Function):
    """y = silu(conv(x)) of a shard x [1,T,C]; heads > 0: y is [1,heads,T,C/heads]."""

    @staticmethod
    def forward(ctx, plan, heads, x, weight, bias):
        width = weight.shape[-1] - 1
        halo = rows_from_left(plan, x[0], width) if plan.straddles else None
        state = None
        if halo is not None:
            state = x.new_zeros(len(plan.own.cu) - 1, x.shape[-1], width)
            state[0] = halo.T
        ctx.plan, ctx.width = plan, width
        ctx.options = dict(cu_seqlens=_cu(plan), activation="silu", head_num=heads)
        ctx.save_for_backward(x, weight, bias, state)
        return ops.causal_conv1d_fwd(x, weight, bias, state, **ctx.options)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, bias, state = ctx.saved_tensors
        dx, dweight, dbias, dstate = ops.causal_conv1d_bwd(dy, x, weight, bias, state, None, **ctx.options)
        if ctx.plan.straddles:
            gradients_to_left(ctx.plan, None if state is None else dstate[0].T, dx[0], ctx.width)
        return None, None, dx, dweight.to(weight.dtype), None if bias is None else dbias.to(bias.dtype)


def _cu(plan):
    return plan.local_cu if len(plan.own.cu) > 2 else None
