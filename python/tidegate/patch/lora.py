"""Experts that PEFT wraps for LoRA (target_parameters): a side path of low rank instead of merged weights.

PEFT's ParamWrapper makes a parameter of its base layer W + scale b a while it is called, a tensor of the size of all
experts, in every forward; its gradient has that size too. Here a and b go to the operator as they are.
"""

import torch
from torch import nn

from tidegate import moe
from tidegate.patch.site import call_original

PARTS = {"gate_up_proj": "gate_up_lora", "down_proj": "down_lora"}


def is_wrapper(module):
    """PEFT's ParamWrapper, told by what it has: peft need not be installed."""
    names = ("parameter_name", "lora_A", "active_adapters")
    return isinstance(getattr(module, "base_layer", None), nn.Module) and all(hasattr(module, n) for n in names)


def unwrapped(module):
    """The wrappers around a module, outermost first, and the module."""
    wrappers = []
    while is_wrapper(module):
        wrappers.append(module)
        module = module.base_layer
    return wrappers, module


def why_not(wrappers):
    """Why the side path cannot stand for these wrappers; None if it can."""
    for wrapper in wrappers:
        if wrapper.parameter_name not in PARTS:
            return f"LoRA on {wrapper.parameter_name}: expected {' or '.join(PARTS)}"
        if not hasattr(wrapper, "get_delta_factors"):
            return "this PEFT does not hand out the factors of its addition (get_delta_factors): it is merged"
    return None


def _one_step(t):
    """PEFT's b has the experts as its inner dimension; a product needs one of the others there. A copy of b alone."""
    return t if 1 in t.stride()[-2:] else t.contiguous()


def _factors(wrapper, adapter, turned):
    """(a [E,r,K], b [E,N,r], scale): PEFT's addition to the stored weight is scale * left @ right."""
    left, right, scale = wrapper.get_delta_factors(adapter)
    b, a = (right.mT, left.mT) if turned else (left, right)
    return _one_step(a), _one_step(b), scale


def _joined(parts):
    """Additions of several adapters as one of higher rank."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([a for a, _, _ in parts], 1), torch.cat([b * scale for _, b, scale in parts], 2), 1.0


def _changes_calls(module):
    """Whether somebody watches or replaces the calls of a module that the side path would skip."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def additions(wrapper):
    """(experts, keywords for the experts function), or None where PEFT must do it itself."""
    wrappers, experts = unwrapped(wrapper)
    turned, found = getattr(experts, "is_transposed", False), {}
    if any(_changes_calls(module) for module in (*wrappers[1:], experts)):
        return None
    for layer in wrappers:
        if layer.disable_adapters and layer.merged:
            return None  # it takes the addition out of the weight first
        if layer.disable_adapters or layer.merged:
            continue
        names = [name for name in layer.active_adapters if name in layer.lora_A]
        if names and (layer.num_experts == 1 or PARTS[layer.parameter_name] in found):
            return None
        if names:
            found[PARTS[layer.parameter_name]] = _joined([_factors(layer, name, turned) for name in names])
    return experts, found


def forward(self, hidden_states, *args, **kwargs):
    """In place of the outermost wrapper's."""
    side = None if kwargs.get("adapter_names") else additions(self)
    if side is None:
        return call_original(self, "experts", hidden_states, *args, **kwargs)
    experts, lora = side
    return moe.experts_forward(experts, hidden_states, *args, **kwargs, **lora)
