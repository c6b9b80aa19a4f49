"""Dispatch, combine and the whole layer with gradients.

The gradient of a dispatch is a combine and the other way round, along the same handle. Every rank takes part in every
backward exchange, also with no tokens or no rows: nodes hang on tensors of size zero then, and the ranks compare at the
dispatch whether a backward will come.
"""

from contextlib import contextmanager

import torch

from tidegate import _native
from tidegate.ep.buffer import Buffer, Handle, call
from tidegate.ep.checks import check_experts
from tidegate.ep.nodes import NodesBuffer, NodesHandle
from tidegate.ep.special import special_bwd

tidegate_ops = torch.ops.tidegate


def _wants_grad(*tensors):
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _named(special):
    """Tensors of special experts by name, those that were given."""
    names = ("ori_x", "alpha1", "alpha2", "v")
    return {name: t for name, t in zip(names, special, strict=True) if t is not None}


def _gives_back_tokens(buffer):
    return isinstance(buffer, Buffer) and buffer.copy_experts + buffer.const_experts > 0


@contextmanager
def _alone(buffer):
    """Around what a rank does for itself before the next exchange. The others hear of it if it fails."""
    if isinstance(buffer, NodesBuffer):
        with buffer.agreement.checking():
            yield
        return
    try:
        yield
    except Exception as error:
        error = _native.translated(error)
        if buffer.is_open:
            call("poison", buffer.number, str(error).split("\n", 1)[0])
        raise error from None


def _check_special(op, buffer, special):
    if isinstance(buffer, NodesBuffer):
        with _alone(buffer):
            for name in _named(special):
                raise ValueError(f"{op}: {name}: expected none between nodes, got a tensor")


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, x, ids, weights, mask, static_shape):
        handle = buffer.dispatch(x, ids, weights, mask, needs_backward=True, static_shape=static_shape)
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.expand(handle), handle

    @staticmethod
    def backward(ctx, drows, *_):
        dx, _ = ctx.buffer.combine(drows, ctx.handle, weighted=False)
        return None, dx, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, handle, y, weights, shared_x, rows, *special):
        ctx.buffer, ctx.handle = buffer, handle
        used = None if special[0] is None else weights  # again in backward; otherwise those of the rows are
        ctx.save_for_backward(y if ctx.needs_input_grad[3] else None, used, *special)
        ctx.weights_dtype = None if weights is None else weights.dtype
        return buffer.combine(y, handle, shared_x=shared_x, needs_backward=True, **_named(special))[0]

    @staticmethod
    def backward(ctx, dout):
        buffer, handle, dout = ctx.buffer, ctx.handle, dout.contiguous()
        y, weights, *special = ctx.saved_tensors
        d = buffer.redispatch(dout, handle)
        places = torch.arange(handle.shape_rows, dtype=torch.int32)[:, None]
        dy, dw = tidegate_ops.moe_unpermute_bwd(d, d if y is None else y, places, handle.row_weights)
        dweights = buffer.combine(None, handle, row_values=dw.view(-1))[1] if y is not None else None
        *dspecial, of_special = (
            (None,) * 5 if special[0] is None else special_bwd(buffer, handle, dout, weights, *special)
        )
        if dweights is not None:
            dweights = (dweights if of_special is None else dweights + of_special).to(ctx.weights_dtype)
        return None, None, dy, dweights, dout if ctx.needs_input_grad[4] else None, None, *dspecial


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, x, ids, weights, gate_up, down, weight_axes, trains, *special):
        # trains: needs_input_grad does not know of torch.no_grad(), and grad mode is off in here
        handle = buffer.dispatch(x, ids, weights, needs_backward=trains)
        rows = buffer.expand(handle)
        ones = torch.ones_like(handle.row_weights)
        options = {"weight_axes": weight_axes}
        with _alone(buffer):
            y, hidden = tidegate_ops.moe_experts_fwd(
                rows, handle.row_expert, ones, gate_up, down, round_y=True, save_hidden=trains, **options
            )
        special = (x if _gives_back_tokens(buffer) else None, *special)
        used = None if special[0] is None else weights  # as in _Combine
        ctx.save_for_backward(rows, gate_up, down, hidden if hidden.dim() == 3 else None, used, *special)
        ctx.buffer, ctx.handle, ctx.options, ctx.weights_dtype = buffer, handle, options, weights.dtype
        return buffer.combine(y, handle, **_named(special))[0]

    @staticmethod
    def backward(ctx, dout):
        buffer, handle, dout = ctx.buffer, ctx.handle, dout.contiguous()
        rows, gate_up, down, hidden, weights, *special = ctx.saved_tensors
        _, dx_wanted, _, *wanted = ctx.needs_input_grad
        d = buffer.redispatch(dout, handle)
        # Always the gradient of the weights: one number a row, and so every rank makes the same exchange.
        needs = dx_wanted | 2 | wanted[1] << 2 | wanted[2] << 3
        drows, dw, dgate_up, ddown, *_ = tidegate_ops.moe_experts_bwd(
            d, rows, handle.row_expert, handle.row_weights, gate_up, down, hidden=hidden, needs=needs, **ctx.options
        )
        at_home, *dspecial, of_special = (
            (None,) * 4 + (0,) if special[0] is None else special_bwd(buffer, handle, dout, weights, *special)
        )
        dx, dweights = buffer.combine(
            drows if dx_wanted else None,
            handle,
            weighted=False,
            shared_x=at_home if dx_wanted else None,
            row_values=dw.view(-1),
        )
        return (
            None,
            dx if dx_wanted else None,
            None,
            (dweights + of_special).to(ctx.weights_dtype) if wanted[0] else None,
            dgate_up if wanted[1] else None,
            ddown if wanted[2] else None,
            None,
            None,
            *dspecial,
        )


def dispatch(
    buffer: Buffer | NodesBuffer,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    static_shape: bool = False,
) -> tuple[torch.Tensor, Handle | NodesHandle]:
    """(rows [A,H] for the local experts, sorted by expert, handle).

    x [T,H], ids [T,K] (-1: nobody), weights [T,K] travel along; mask, bool [T] or [T,K]: False stays at home.
    static_shape: A is the sum of T * min(K, local experts) over all ranks, whatever the ids are. Rows behind those that
    came (handle.rows) are 0 and have the expert -1; a token may not have more pairs on a rank than that has experts.
    """
    if not _wants_grad(x, weights):
        handle = buffer.dispatch(x, ids, weights, mask, static_shape=static_shape)
        return buffer.expand(handle), handle
    # The node must be there on every rank, so x takes part even where only the weights have a gradient.
    rows, handle = _Dispatch.apply(
        buffer, x if x.requires_grad else x.detach().requires_grad_(), ids, weights, mask, static_shape
    )
    handle.weights = weights
    return rows, handle


def combine(
    buffer: Buffer | NodesBuffer,
    y: torch.Tensor,
    handle: Handle | NodesHandle,
    shared_x: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    ori_x: torch.Tensor | None = None,
    alpha1: torch.Tensor | None = None,
    alpha2: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[t] = sum over k of weights[t,k] * y[row of (t,k)] + shared_x[t], in order of the ids, in fp32, rounded once.

    rows: what dispatch returned. Experts that leave their input alone when there is none break the graph on one rank
    only; with it the graph holds. ori_x [T,H], alpha1, alpha2 [n], v [n,H]: of special experts.
    """
    weights, special = handle.weights, (ori_x, alpha1, alpha2, v)
    _check_special("ep_combine", buffer, special)
    if not _wants_grad(y, weights, shared_x, rows, *special):
        return buffer.combine(y, handle, shared_x=shared_x, **_named(special))[0]
    return _Combine.apply(buffer, handle, y, weights, shared_x, rows, *special)


def experts(
    buffer: Buffer | NodesBuffer,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    weight_axes: str = "nk",
    alpha1: torch.Tensor | None = None,
    alpha2: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
) -> torch.Tensor:
    """The experts of all ranks on the tokens of this one: out [T,H].

    x [T,H], ids and weights [T,K] with ids of all experts; gate_up [local experts, 2I, H] and down
    [local experts, H, I] are those of this rank; alpha1, alpha2 [n] and v [n,H] of const experts. Any number of
    processes gives the bits of one, in out and in all gradients: an expert sees its tokens in the order of ranks, and
    results are rounded to x's type before they are summed, as tidegate.moe_experts(..., round_y=True) does.
    """
    special = (alpha1, alpha2, v)
    _check_special("ep_experts", buffer, (None, *special))
    with _alone(buffer):
        check_experts(buffer, x, ids, weights, gate_up, down)
    trains = _wants_grad(x, weights, gate_up, down, *special)
    # Over several nodes, and in fp64, there is no other way.
    if trains or not isinstance(buffer, Buffer) or x.dtype == torch.float64:
        return _Experts.apply(buffer, x, ids, weights, gate_up, down, weight_axes, trains, *special)
    return call("experts", buffer.number, x, ids, weights, gate_up, down, weight_axes, None, *special)
