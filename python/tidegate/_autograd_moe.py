"""Autograd kernels of the experts. Wiring only; the arithmetic is in C++."""

from tidegate._autograd import _gradient, _refuse_grad_mode, ops


def _route_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(inputs[0], output[1])
    ctx.options = {k: keyword_only_inputs[k] for k in ("renormalise", "logits_rounding")}
    ctx.output_probs = keyword_only_inputs["output_probs"]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


@_gradient("moe_route_fwd", _route_setup)
def _(ctx, dweights, _dids, dprobs):
    logits, ids = ctx.saved_tensors
    dprobs = dprobs if ctx.output_probs else None  # of probabilities that were not asked for
    return ops.moe_route_bwd(dweights, dprobs, logits, ids, **ctx.options), None


def _permute_setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[2])


@_gradient("moe_permute", _permute_setup)
def _(ctx, dy):
    return ops.moe_unpermute_fwd(dy, ctx.saved_tensors[0]), None, None


def _unpermute_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


@_gradient("moe_unpermute_fwd", _unpermute_setup)
def _(ctx, dout):
    y, pos, weights = ctx.saved_tensors
    dy, dweights = ops.moe_unpermute_bwd(dout, y, pos, weights)
    return dy, None, dweights if weights is not None else None


def _matmul_setup(ctx, inputs, keyword_only_inputs, output):
    x, weight, groups, bias = inputs
    ctx.save_for_backward(x, weight, groups)
    ctx.options = {k: keyword_only_inputs[k] for k in ("weight_axes", "group_list")}
    ctx.bias_dtype = None if bias is None else bias.dtype


@_gradient("grouped_matmul_fwd", _matmul_setup)
def _(ctx, dy):
    x, weight, groups = ctx.saved_tensors
    asked = (*ctx.needs_input_grad, False)
    needs = asked[0] | asked[1] << 1 | (asked[3] and ctx.bias_dtype is not None) << 2
    dx, dweight, dbias = ops.grouped_matmul_bwd(dy.to(x.dtype), x, weight, groups, **ctx.options, needs=needs)
    dbias = dbias.to(ctx.bias_dtype) if needs & 4 else None
    return dx if needs & 1 else None, dweight if needs & 2 else None, None, dbias


EXPERTS = (0, *range(2, 13))  # inputs that can have a gradient, in the order of the gradients


def _experts_setup(ctx, inputs, keyword_only_inputs, output):
    hidden = output[1]
    ctx.save_for_backward(*inputs, hidden if hidden.dim() == 3 else None)
    ctx.options = {k: v for k, v in keyword_only_inputs.items() if k not in ("round_y", "save_hidden")}
    ctx.mark_non_differentiable(hidden)
    ctx.set_materialize_grads(False)  # zeros for hidden would be as large as it is


@_gradient("moe_experts_fwd", _experts_setup)
def _(ctx, dout, _):
    gradients = [None] * 13
    if dout is None:
        return tuple(gradients)
    *inputs, hidden = ctx.saved_tensors
    asked = (*ctx.needs_input_grad, *[False] * 13)  # torch leaves out what was not given at the end
    needs = sum(asked[place] << i for i, place in enumerate(EXPERTS))
    results = ops.moe_experts_bwd(dout, *inputs, hidden=hidden, **ctx.options, needs=needs)
    for place, gradient in zip(EXPERTS, results, strict=True):
        if asked[place]:
            gradients[place] = gradient
    return tuple(gradients)


for _name in ("quantize", "grouped_matmul_swiglu_quant", "grouped_matmul_quant", "moe_experts_quant"):
    _refuse_grad_mode(_name, "default", "int8 is for inference only")
