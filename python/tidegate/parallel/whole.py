"""From shards to whole tensors and to one loss, with gradients as one process has them.

Every rank then computes the same from the whole tensor, so a rank's gradient is its own slice; where parameter
gradients are averaged over the ranks it is multiplied by their number, which the mean divides by.
"""

import torch
from torch.autograd.function import once_differentiable

from tidegate.errors import SequenceParallelError
from tidegate.parallel.plan import SpPlan


def gradient_scale(scale):
    if scale is None:
        raise SequenceParallelError(
            "a gradient is wanted, but grad_reduction is not set: pass grad_reduction='mean' to sequence_parallel if "
            "the gradients of parameters are averaged over its ranks (FSDP2, DDP), 'sum' if they are added up"
        )
    return scale


def _whole(plan, x):
    """Shards [own tokens, ...] of all ranks one after the other."""
    sizes = [shard.tokens for shard in plan.shards]
    padded = x.new_zeros(max(sizes), *x.shape[1:])
    padded[: len(x)] = x
    found = plan.link.all_gather(padded, "gather")
    return torch.cat([found[r, :n] for r, n in enumerate(sizes)])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan, x):
        ctx.plan = plan
        return _whole(plan, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        own = ctx.plan.own
        return None, gradient[own.begin : own.end] * ctx.plan.grad_scale


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan, x):
        ctx.scale = plan.grad_scale
        return plan.link.sum(x.clone(), "loss")

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return None, gradient * ctx.scale


def gather(x: torch.Tensor, plan: SpPlan, dim: int = 1) -> torch.Tensor:
    """The shards of x along its token dimension as one tensor, on every rank: exactly the real tokens, in order.

    Rows beyond the shard (a trainer's padding) are cut off first.
    """
    mine = plan.own.tokens
    if x.shape[dim] < mine:
        raise SequenceParallelError(f"gather: expected at least {mine} tokens in dimension {dim}, got {list(x.shape)}")
    x = x.narrow(dim, 0, mine).movedim(dim, 0)
    if torch.is_grad_enabled() and x.requires_grad:
        gradient_scale(plan.grad_scale)
        return _Gather.apply(plan, x).movedim(0, dim)
    return _whole(plan, x.detach()).movedim(0, dim)


def gather_loss_tensors(*tensors: torch.Tensor, plan: SpPlan, dim: int = 1) -> tuple[torch.Tensor, ...]:
    """What a loss is made of (log probabilities, labels, entropies, hidden states), whole and without padding."""
    return tuple(gather(x, plan, dim) for x in tensors)


def total(x, plan):
    """The sum over ranks of what every rank found for its own tokens."""
    if torch.is_grad_enabled() and x.requires_grad:
        gradient_scale(plan.grad_scale)
        return _Total.apply(plan, x)
    return plan.link.sum(x.detach().clone(), "loss")


def restore(x, plan, fill=0):
    """Flat tokens [1, T, ...] as the batch [B, T, ...] that was given; padding is `fill`."""
    rows, tokens = plan.shape
    if plan.kept is None:
        return x[0].unflatten(0, (rows, tokens))
    out = x.new_full((rows * tokens, *x.shape[2:]), fill)
    return out.index_copy(0, plan.kept, x[0]).unflatten(0, (rows, tokens))
