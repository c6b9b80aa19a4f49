"""Packed experts, through Transformers' registry of experts functions. The block and its router stay as they are."""

import torch

from tidegate import _native, moe
from tidegate.patch import registry, selftest
from tidegate.patch.code import attribute_names
from tidegate.patch.resolve import named_modules
from tidegate.patch.site import Site

EXPERTS, ROUTER = "experts", "router"
NAMES = ("_experts_implementation", moe.NAME)
WEIGHTS = ("gate_up_proj", "down_proj")
TOKENS, SLOTS = 3, 2  # of the self-test: at most six experts are widened to fp32


def is_experts(module):
    """3-D weights of all experts under the names that the experts of Transformers have."""
    weights = [getattr(module, name, None) for name in WEIGHTS]
    return all(isinstance(weight, torch.Tensor) and weight.dim() == 3 for weight in weights)


def _widened(module, count):
    """The module with its first experts only, in fp32."""
    twin = type(module).__new__(type(module))
    twin.__dict__.update(module.__dict__, _parameters=dict(module._parameters), num_experts=count)
    for name in WEIGHTS:
        twin._parameters[name] = torch.nn.Parameter(getattr(module, name)[:count].float(), requires_grad=False)
    return twin


def _test(module):
    def test():
        gate_up, original = module.gate_up_proj, type(module).forward
        hidden = gate_up.shape[-2 if getattr(module, "is_transposed", False) else -1]
        count = min(TOKENS * SLOTS, gate_up.shape[0])
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(TOKENS, hidden, generator=generator).to(gate_up.dtype)
        ids = torch.arange(TOKENS * SLOTS).view(TOKENS, SLOTS) % count
        weights = torch.rand(TOKENS, SLOTS, generator=generator).to(gate_up.dtype)
        with torch.no_grad():
            results = (
                moe.experts_forward(module, x, ids, weights),
                original(module, x, ids, weights),
                original(_widened(module, count), x.float(), ids, weights.float()),
            )
        return selftest.summary([selftest.judge("experts", *results)], gate_up.dtype)

    return test


def find(root, options):
    """One site for every config that names an experts function; it governs all experts below it."""
    sites, seen = [], {}
    if _native.fallback:  # the model's own experts are as fast there
        return sites
    for path, module in named_modules(root):
        if not is_experts(module):
            continue
        config = module.__dict__.get("config")
        asks = NAMES[0] in attribute_names(type(module).forward)
        if not asks or not hasattr(config, NAMES[0]) or not hasattr(module, "has_gate"):
            why = f"{type(module).__name__} does not ask Transformers' registry of experts functions"
            sites.append(Site(path, EXPERTS, module).refuse(why))
            continue
        why = moe.why_not(module)
        where = registry.holder(root, config, module)
        if why is None and where is None:
            why = "its config is not held by the model"
        known = seen.get(id(config))
        if known is None:
            if why is None:
                site = registry.RegistrySite(
                    path, EXPERTS, where[1], module, NAMES, moe.register_experts, test=_test(module)
                )
            else:
                site = Site(path, EXPERTS, module)
            seen[id(config)] = site
            sites.append(site)
        if why is not None:  # one name governs them all
            seen[id(config)].refuse(f"{type(module).__name__}: {why}")
    return sites


find.ops = (EXPERTS, ROUTER)
