"""Packed experts, through Transformers' registry of experts functions. The block and its router stay as they are."""

import torch

from tidegate import _native, moe
from tidegate.errors import SelfTestError
from tidegate.patch import registry
from tidegate.patch.resolve import named_modules
from tidegate.patch.site import Site

EXPERTS, ROUTER = "experts", "router"
NAMES = ("_experts_implementation", moe.NAME)
TOKENS, SLOTS = 3, 2  # of the self-test: at most six experts are widened to fp32


def is_experts(module):
    """3-D weights of all experts under the names that the experts of Transformers have."""
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return all(isinstance(weight, torch.Tensor) and weight.dim() == 3 for weight in weights)


def _loops(module, x, ids, weights):
    """The definition, in fp32, expert by expert."""
    out = torch.zeros_like(x)
    turned = getattr(module, "is_transposed", False)
    for t in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            gate_up, down = (w[ids[t, slot]].float() for w in (module.gate_up_proj, module.down_proj))
            gate, up = (x[t] @ (gate_up if turned else gate_up.T)).chunk(2)
            out[t] += weights[t, slot] * ((torch.nn.functional.silu(gate) * up) @ (down if turned else down.T))
    return out


def _test(module):
    def test():
        gate_up = module.gate_up_proj
        hidden = gate_up.shape[-2 if getattr(module, "is_transposed", False) else -1]
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(TOKENS, hidden, generator=generator).to(gate_up.dtype)
        ids = torch.arange(TOKENS * SLOTS).view(TOKENS, SLOTS) % gate_up.shape[0]
        weights = torch.rand(TOKENS, SLOTS, generator=generator).to(gate_up.dtype)
        with torch.no_grad():
            truth = _loops(module, x.float(), ids, weights.float())
            scale = truth.abs().max().clamp(min=1e-30)
            ours, theirs = (
                float((y.float() - truth).abs().max() / scale)
                for y in (moe.experts_forward(module, x, ids, weights), type(module).forward(module, x, ids, weights))
            )
        if not ours <= 2 * theirs + 1e-6:
            raise SelfTestError(f"error {ours:.1e} against fp32, the original's {theirs:.1e}")
        return f"err {ours:.1e}"

    return test


def find(root, options):
    """One site for every config that names an experts function; it governs all experts below it."""
    sites, seen = [], {}
    if _native.fallback:  # plain torch is what the model has already
        return sites
    for path, module in named_modules(root):
        if not is_experts(module):
            continue
        config = module.__dict__.get("config")
        if not hasattr(config, NAMES[0]) or not hasattr(module, "has_gate"):
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
