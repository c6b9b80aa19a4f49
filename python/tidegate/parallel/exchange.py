"""Differentiable exchanges between the two ways to cut [tokens, heads, width]: by tokens and by heads."""

import torch
from torch.autograd.function import once_differentiable


def _columns(ranges, widths, rank):
    """Elements of a token's row that a rank has of every tensor."""
    return [(last - first) * width for (first, last), width in zip((r[rank] for r in ranges), widths, strict=True)]


def to_heads(plan, ranges, tensors):
    """Tensors [own tokens, heads, width] -> the same with all tokens and this rank's heads; one exchange.

    ranges[i][r]: (first, last) head of tensor i for rank r. All tensors have one type.
    """
    link, widths = plan.link, [t.shape[-1] for t in tensors]
    mine = plan.own.tokens
    columns = [_columns(ranges, widths, r) for r in range(plan.ranks)]
    sends = [mine * sum(c) for c in columns]
    buffer = tensors[0].new_empty(sum(sends))
    for r, block in enumerate(buffer.split(sends)):
        block = block.view(mine, sum(columns[r])).split(columns[r], 1)
        for place, tensor, of in zip(block, tensors, ranges, strict=True):
            first, last = of[r]
            place.unflatten(1, (last - first, tensor.shape[-1])).copy_(tensor[:, first:last])
    own = columns[plan.rank]
    found = link.all_to_all(buffer, sends, [shard.tokens * sum(own) for shard in plan.shards], "heads")
    found = found.view(plan.tokens, sum(own)).split(own, 1)
    return tuple(part.unflatten(1, (-1, width)) for part, width in zip(found, widths, strict=True))


def to_tokens(plan, ranges, heads, tensors):
    """The way back, and the gradient of to_heads. heads: of every tensor, on all ranks together."""
    link, widths = plan.link, [t.shape[-1] for t in tensors]
    columns = [_columns(ranges, widths, r) for r in range(plan.ranks)]
    rows = torch.cat([t.flatten(1) for t in tensors], 1) if len(tensors) > 1 else tensors[0].flatten(1)
    mine = plan.own.tokens
    receives = [mine * sum(c) for c in columns]
    sends = [shard.tokens * sum(columns[plan.rank]) for shard in plan.shards]
    found = link.all_to_all(rows.contiguous().view(-1), sends, receives, "heads")
    out = [t.new_empty(mine, n, t.shape[-1]) for t, n in zip(tensors, heads, strict=True)]
    for r, block in enumerate(found.split(receives)):
        block = block.view(mine, sum(columns[r])).split(columns[r], 1)
        for part, tensor, of in zip(block, out, ranges, strict=True):
            first, last = of[r]
            tensor[:, first:last] = part.unflatten(1, (last - first, tensor.shape[-1]))
    return tuple(out)


class ToHeads(torch.autograd.Function):
    """ToHeads.apply(plan, ranges, *tensors)"""

    @staticmethod
    def forward(ctx, plan, ranges, *tensors):
        ctx.plan, ctx.ranges, ctx.heads = plan, ranges, [t.shape[1] for t in tensors]
        return to_heads(plan, ranges, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        return None, None, *to_tokens(ctx.plan, ctx.ranges, ctx.heads, gradients)


class ToTokens(torch.autograd.Function):
    """ToTokens.apply(plan, ranges, heads, tensor): of one tensor."""

    @staticmethod
    def forward(ctx, plan, ranges, heads, tensor):
        ctx.plan, ctx.ranges = plan, ranges
        return to_tokens(plan, [ranges], [heads], [tensor])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return None, None, None, to_heads(ctx.plan, [ctx.ranges], [gradient])[0]
