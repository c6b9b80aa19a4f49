"""Tidegate inside flash-linear-attention (0.6): plain calls of its functions with CPU tensors run here.

FLA asks registered backends first and launches Triton if none accepts, which cannot work without a GPU. Ours accepts
every call with CPU tensors: it computes, or says what is wrong. `fused_recurrent_gated_delta_rule` asks nobody; it is
replaced by name in the modules that have it, and given back by `remove`.
"""

import functools
import importlib
import sys

import torch

import tidegate.fla
from tidegate._native import ops

NAME = "tidegate"
OPERATION = "gated_delta_rule"
RULES = "fla.ops.gated_delta_rule"
CONV = "fla.modules.causal_conv1d"
REPLACED = ("fused_recurrent_gated_delta_rule", "fused_recurrent_gdn")
_undo = []  # what gives FLA back what it had, last first


def _on_cpu(tensor, *_args, **_kwargs):
    """(accepted, reason). Only a device may be refused: what we refuse goes to Triton."""
    device = tensor.device.type
    return device == "cpu", None if device == "cpu" else f"tidegate computes on the CPU, got {device}"


def _verifier(first):
    """The same for a call whose first tensor may come by name."""
    return lambda *args, **kwargs: _on_cpu(args[0] if args else kwargs[first])


def _flat(x, weight):
    """[B,T,D]; FLA also takes [B,T,H,D/H]."""
    return x if x.shape[-1] == weight.shape[0] else x.flatten(2)


def conv_fwd(
    x, weight, bias, residual, initial_state=None, output_final_state=False, activation=None, cu_seqlens=None, **_
):
    """FLA's causal_conv1d_fwd; the chunk lists among its arguments have no use here."""
    tokens = _flat(x, weight)
    extra = None if residual is None else residual.reshape(tokens.shape)
    options = {"activation": activation, "cu_seqlens": cu_seqlens, "output_final_state": bool(output_final_state)}
    y, final = tidegate.fla.causal_conv1d(tokens, weight, bias, extra, initial_state, **options)
    return y.view(x.shape), final


def conv_bwd(
    x, dy, dht, weight=None, bias=None, residual=None, initial_state=None, activation=None, cu_seqlens=None, **_
):
    """FLA's causal_conv1d_bwd: gradients of x, weight, bias, residual and initial state."""
    tokens, dy_tokens = _flat(x, weight), _flat(dy, weight)
    dx, dw, db, dh0 = ops.causal_conv1d_bwd(
        dy_tokens, tokens, weight, bias, initial_state, dht, cu_seqlens=cu_seqlens, activation=activation
    )
    return (
        dx.view(x.shape),
        dw.to(weight.dtype),
        None if bias is None else db.to(bias.dtype),
        None if residual is None else dy,
        None if initial_state is None else dh0,
    )


def conv_update(x, cache, residual=None, weight=None, bias=None, activation=None):
    """FLA's causal_conv1d_update."""
    tokens = _flat(x, weight) if x.dim() > 2 else x
    extra = None if residual is None else residual.reshape(tokens.shape)
    y, cache = tidegate.fla.causal_conv1d_update(tokens, cache, extra, weight, bias, activation)
    return y.view(x.shape), cache


def gate_fwd(g, A_log, dt_bias=None, output_dtype=torch.float32):
    """FLA's gdn_gate_fwd."""
    return tidegate.fla.fused_gdn_gate(g, A_log.reshape(-1), dt_bias, output_dtype)


def gate_bwd(g, A_log, dt_bias, dyg):
    """FLA's gdn_gate_bwd: gradients of g, A_log and dt_bias. Our operator has a second gate, which is not used."""
    flat, dflat = (x.reshape(-1, g.shape[-1]) for x in (g, dyg))
    none = torch.zeros_like(flat)
    dg, _, dA, dbias = ops.gdn_gating_bwd(dflat.float(), none, flat, flat, A_log.reshape(-1), dt_bias, layout="TND")
    return dg.view(g.shape), dA.view_as(A_log).to(A_log), None if dt_bias is None else dbias.to(dt_bias)


def _route(original, ours):
    """original, with CPU tensors taken to ours. Keeps its signature, which Transformers reads."""

    @functools.wraps(original)
    def call(*args, **kwargs):
        q = args[0] if args else kwargs["q"]
        return (ours if q.device.type == "cpu" else original)(*args, **kwargs)

    return call


def _replace(originals):
    """Puts routes into every module that has imported one of the functions."""
    for name, original in originals.items():
        route = _route(original, getattr(tidegate.fla, name))
        for module in list(sys.modules.values()):
            space = getattr(module, "__dict__", {})
            if space.get(name) is original and space is not globals():
                space[name] = route
                _undo.append(lambda space=space, name=name, was=original, now=route: _restore(space, name, was, now))


def _restore(space, name, was, now):
    if space.get(name) is now:  # somebody else's replacement stays
        space[name] = was


def _register_conv(backends, Backend):
    """The convolution's parts, each a registry of its own. A release without one of them keeps Triton there."""
    module = importlib.import_module(CONV)
    served = []
    for name, ours, first in (
        ("causal_conv1d_fwd", conv_fwd, "x"),
        ("causal_conv1d_bwd", conv_bwd, "x"),
        ("causal_conv1d_update", conv_update, "x"),
    ):
        function = getattr(module, name, None)
        try:
            backends.register(function, backend=Backend, verifier=_verifier(first))(ours)
        except (KeyError, TypeError, AttributeError):  # not a function that asks backends
            continue
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        registry = backends._function_registries[function]
        _undo.append(lambda registry=registry: registry._backends.pop(NAME, None))
        served.append(name)
    return served


def install():
    """Registers with FLA if it can be imported. Returns what is served, or why not, as text."""
    if _undo:
        return "registered"
    try:
        backends, rules = importlib.import_module("fla.backends"), importlib.import_module(RULES)
    except Exception as error:  # any: a broken Triton fails in many ways
        return f"not importable: {type(error).__name__}: {error}"

    class TidegateBackend(backends.BaseBackend):
        backend_type = NAME
        priority = 0  # before those that only look at the machine, not at the tensors

        @staticmethod
        def chunk_gated_delta_rule(*args, **kwargs):
            return tidegate.fla.chunk_gated_delta_rule(*args, **kwargs)

        gdn_gate_fwd, gdn_gate_bwd = staticmethod(gate_fwd), staticmethod(gate_bwd)
        chunk_gated_delta_rule_verifier = staticmethod(_verifier("q"))
        gdn_gate_fwd_verifier = gdn_gate_bwd_verifier = staticmethod(_verifier("g"))

    _replace({name: getattr(rules, name) for name in REPLACED if hasattr(rules, name)})
    if getattr(backends, "_DISPATCH_DISABLED", False):
        return f"FLA_DISABLE_BACKEND_DISPATCH is set: only {REPLACED[0]} is served, unset it for the others"
    backends.register(OPERATION)(TidegateBackend)
    registry = backends._operation_registries[OPERATION]
    _undo.append(lambda: registry._backends.pop(NAME, None))
    served = ["chunk_gated_delta_rule", "gdn_gate", REPLACED[0], *_register_conv(backends, TidegateBackend)]
    return f"registered for CPU tensors: {', '.join(served)}"


def remove():
    """Takes everything back that install did."""
    while _undo:
        _undo.pop()()
