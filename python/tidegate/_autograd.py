"""Autograd kernels of the native operators. Wiring only; the arithmetic is in C++."""

import torch
from torch.library import register_autograd

import tidegate._fake_chunk  # noqa: F401  (adds to names)
import tidegate._fake_moe  # noqa: F401
from tidegate._fake import names, wide
from tidegate._transforms import refuse_transforms

ops = torch.ops.tidegate


class _Library(torch.library.Library):
    """Every autograd kernel goes through here, also those that register_autograd makes."""

    def impl(self, op_name, fn, dispatch_key="", **options):
        name = op_name if isinstance(op_name, str) else op_name._name
        super().impl(op_name, refuse_transforms(name.split("::")[-1], fn), dispatch_key, **options)


lib = _Library("tidegate", "IMPL")
# Kernels of forms that write in place, by operator: what the dispatcher would call, without the way through it.
direct = {}


def _gradient(name, setup):
    """Decorator for the backward function of tidegate::<name>; setup saves what it needs."""

    def decorate(backward):
        register_autograd(f"tidegate::{name}", backward, setup_context=setup, lib=lib)
        return backward

    return decorate


def _add_rstd_gradient(dx, drstd, x, rstd, count):
    """What comes in through rstd = (sum x^2 / count + eps)^-1/2. No model uses it; a wrong gradient would be silent."""
    if drstd is None:
        return dx
    extra = (x * (drstd * rstd**3 / -max(count, 1))[..., None]).to(x.dtype)
    return extra if dx is None else dx + extra


def _conv_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.options = {k: keyword_only_inputs[k] for k in ("activation", "head_num", "layout")}
    ctx.y_shape = output[0].shape
    ctx.set_materialize_grads(False)


@_gradient("causal_conv1d_fwd", _conv_setup)
def _(ctx, dy, dfinal):
    x, weight, bias, initial_state, cu_seqlens = ctx.saved_tensors
    dy = x.new_zeros(ctx.y_shape) if dy is None else dy
    dfinal = None if dfinal is None or dfinal.numel() == 0 else dfinal
    dx, dw, db, dh = ops.causal_conv1d_bwd(
        dy, x, weight, bias, initial_state, dfinal, cu_seqlens=cu_seqlens, **ctx.options
    )
    db = db.to(bias.dtype) if bias is not None else None
    return dx, dw.to(weight.dtype), db, dh if initial_state is not None else None, None


def _gating_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.options = {k: keyword_only_inputs[k] for k in ("beta_scale", "layout")}
    ctx.beta_dtype = output[1].dtype
    ctx.set_materialize_grads(False)


@_gradient("gdn_gating_fwd", _gating_setup)
def _(ctx, dg, dbeta):
    a, b, A_log, dt_bias = ctx.saved_tensors
    dg = a.new_zeros(a.shape, dtype=wide(a)) if dg is None else dg
    dbeta = b.new_zeros(b.shape, dtype=ctx.beta_dtype) if dbeta is None else dbeta
    da, db, dA_log, ddt_bias = ops.gdn_gating_bwd(dg, dbeta, a, b, A_log, dt_bias, **ctx.options)
    return da, db, dA_log.to(A_log.dtype), ddt_bias.to(dt_bias.dtype) if dt_bias is not None else None


def _l2norm_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(inputs[0], output[1])
    ctx.set_materialize_grads(False)


@_gradient("l2norm_fwd", _l2norm_setup)
def _(ctx, dy, drstd):
    x, rstd = ctx.saved_tensors
    dx = None if dy is None else ops.l2norm_bwd(dy, x, rstd)
    return _add_rstd_gradient(dx, drstd, x, rstd, 1)


def _gated_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs, output[1])
    ctx.options = {k: keyword_only_inputs[k] for k in ("activation", "rounding")}
    ctx.set_materialize_grads(False)


@_gradient("rms_norm_gated_fwd", _gated_setup)
def _(ctx, dy, drstd):
    x, z, weight, rstd = ctx.saved_tensors
    dx, dz, dw = None, None, None
    if dy is not None:
        dx, dz, dw = ops.rms_norm_gated_bwd(dy, x, z, weight, rstd, **ctx.options)
        dw = dw.to(weight.dtype) if weight is not None else None
    return _add_rstd_gradient(dx, drstd, x, rstd, x.shape[-1]), dz, dw


def _swiglu_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


@_gradient("swiglu_fwd", _swiglu_setup)
def _(ctx, dy):
    return ops.swiglu_bwd(dy, *ctx.saved_tensors)


def _rms_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs, output[1])
    ctx.set_materialize_grads(False)


@_gradient("rms_norm_fwd", _rms_setup)
def _(ctx, dy, drstd):
    x, weight, rstd = ctx.saved_tensors
    dx, dw = None, None
    if dy is not None:
        dx, dw = ops.rms_norm_bwd(dy, x, weight, rstd)
        dw = dw.to(weight.dtype)
    return _add_rstd_gradient(dx, drstd, x, rstd, x.shape[-1]), dw


def _linear_setup(ctx, inputs, output):
    x, weight, bias = (*inputs, None)[:3]  # torch leaves out what was not given at the end
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


@_gradient("linear_fwd", _linear_setup)
def _(ctx, dy):
    x, weight = ctx.saved_tensors
    asked = ctx.needs_input_grad
    dx, dweight, dbias = ops.linear_bwd(dy, x, weight, needs=sum(need << i for i, need in enumerate(asked)))
    found = (dx, dweight, dbias if ctx.bias_dtype is None else dbias.to(ctx.bias_dtype))
    return tuple(gradient if need else None for gradient, need in zip(found, asked, strict=False))


def _rope_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs[1:])
    ctx.options = dict(keyword_only_inputs)


@_gradient("partial_rope_fwd", _rope_setup)
def _(ctx, dy):
    cos, sin = ctx.saved_tensors
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        raise RuntimeError("partial_rope_fwd: cos, sin: expected no gradient, got a request for one")
    return ops.partial_rope_bwd(dy, cos, sin, **ctx.options), None, None


RULE_OPTIONS = "scale use_qk_l2norm beta_sigmoid beta_scale state_v_first zero_row_safe layout out_layout".split()


def _rule_setup(ctx, inputs, keyword_only_inputs, output):
    *tensors, _ = inputs
    saves = keyword_only_inputs.get("save_states", False)
    ctx.save_for_backward(*tensors, output[2] if saves else None)
    ctx.options = {k: keyword_only_inputs[k] for k in RULE_OPTIONS if k in keyword_only_inputs}
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)
    ctx.token_sequences = False


@_gradient("chunk_gated_delta_rule_fwd", _rule_setup)
def _rule_backward(ctx, do, dfinal_state, *_):
    *inputs, states = ctx.saved_tensors
    if ctx.token_sequences:
        inputs[6] = torch.arange(inputs[1].shape[-3 if ctx.options["layout"] == "TND" else -2] + 1)
    if inputs[3] is None:  # the recurrence may have no decay
        inputs[3] = torch.zeros_like(inputs[4])
    if dfinal_state is not None and dfinal_state.dim() == 1:  # of a final state that was not asked for
        dfinal_state = None
    asked = (*ctx.needs_input_grad, *[False] * 10)  # torch leaves out what was not given at the end
    places = (0, 1, 2, 3, 4, 5, 7, 8)  # of the tensors that can have a gradient
    needs = sum(asked[place] << i for i, place in enumerate(places))
    results = ops.chunk_gated_delta_rule_bwd(do, dfinal_state, *inputs, states, **ctx.options, needs=needs)
    gradients = [None] * 10
    for place, gradient in zip(places, results, strict=True):
        if asked[place]:
            gradients[place] = gradient.to(inputs[place].dtype)
    return tuple(gradients)


def _recurrent_setup(ctx, inputs, keyword_only_inputs, output):
    _rule_setup(ctx, inputs, keyword_only_inputs, output)
    beta, cu_seqlens, gk = inputs[4], inputs[6], inputs[9]
    # Without boundaries every token of a packed layout is a sequence of its own.
    ctx.token_sequences = cu_seqlens is None and keyword_only_inputs["layout"] in ("TND", "NTD")
    ctx.other_rule = "gk" if gk is not None else "beta" if beta.dim() == inputs[2].dim() else None


@_gradient("recurrent_gated_delta_rule_fwd", _recurrent_setup)
def _(ctx, do, dfinal_state):
    """The same function of its inputs as the chunk form, as long as its gates are one number a head."""
    if ctx.other_rule is not None:
        name, what = "recurrent_gated_delta_rule_fwd", {"gk": "None", "beta": "one number for every head"}
        raise RuntimeError(
            f"{name}: {ctx.other_rule}: expected {what[ctx.other_rule]} where a gradient is wanted, got a tensor with "
            "channels"
        )
    return _rule_backward(ctx, do, dfinal_state)


def _cumsum_setup(ctx, inputs, keyword_only_inputs, output):
    g, ctx.chunk_size, cu_seqlens = inputs
    ctx.floor = keyword_only_inputs["floor"]
    ctx.save_for_backward(cu_seqlens, None if ctx.floor is None else g)
    ctx.options = {k: keyword_only_inputs[k] for k in ("reverse", "scale", "layout")}
    ctx.dtype = g.dtype


@_gradient("chunk_local_cumsum", _cumsum_setup)
def _(ctx, dout):
    """The same operator from the other end; a gate at its floor does not move the sum."""
    cu_seqlens, g = ctx.saved_tensors
    options = {**ctx.options, "reverse": not ctx.options["reverse"], "out_dtype": dout.dtype}
    dg = ops.chunk_local_cumsum(dout, ctx.chunk_size, cu_seqlens, **options).to(ctx.dtype)
    return dg if ctx.floor is None else dg.masked_fill(g <= ctx.floor, 0), None, None


def _refuse_gradient(name, reason):
    def backward(ctx, *grads):
        raise RuntimeError(f"{name}: {reason}")

    register_autograd(f"tidegate::{name}", backward, lib=lib)


def _refuse_grad_mode(name, overload, reason="this form writes in place and is for inference only"):
    """Operators without a gradient, or that write into the caller's memory: what they wrote gets a new version."""
    op = getattr(getattr(ops, name), overload)
    arguments = op._schema.arguments
    written = [(i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]

    def kernel(*args, **kwargs):
        if torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in (*args, *kwargs.values())
        ):
            raise RuntimeError(f"{name}: {reason}: use it under torch.no_grad()")
        with torch._C._AutoDispatchBelowADInplaceOrView():
            result = op(*args, **kwargs)
        for i, target in written:
            value = args[i] if i < len(args) else kwargs.get(target)
            if value is not None and not value.is_inference():
                torch.autograd.graph.increment_version(value)
        return result

    direct[op] = refuse_transforms(op._name.split("::")[-1], kernel)
    # In inference mode the second alone is reached.
    for key in ("Autograd", "ADInplaceOrView") if written else ("Autograd",):
        lib.impl(op._name, kernel, key)


for _name in names:
    if _name.endswith("_bwd"):
        _refuse_gradient(_name, "a gradient of a gradient (double backward) is not supported")
    for _overload in getattr(ops, _name).overloads():
        if getattr(getattr(ops, _name), _overload)._schema.is_mutable:
            _refuse_grad_mode(_name, _overload)
for _name in ("gdn_segment_map", "gdn_segment_combine"):
    _refuse_gradient(_name, "a gradient is not supported yet: use it under torch.no_grad()")
_refuse_gradient("mrope_cos_sin", "a gradient of the position tables is not supported")
for _name in (
    "chunk_scaled_dot_kkt",
    "solve_tril",
    "recompute_w_u",
    "chunk_gated_delta_rule_fwd_h",
    "chunk_fwd_o",
    "chunk_bwd_dv_local",
    "chunk_gated_delta_rule_bwd_dhu",
    "chunk_bwd_dqkwg",
    "prepare_wy_repr_bwd_da",
    "prepare_wy_repr_bwd_full",
):
    _refuse_gradient(_name, "a gradient of a single stage is not supported")
