"""Packed experts, through Transformers' registry of experts functions. The block around them stays as it is."""

import torch

from tidegate import _native, moe
from tidegate.patch import lora, registry, selftest
from tidegate.patch.code import attribute_names
from tidegate.patch.resolve import named_modules
from tidegate.patch.site import ForwardSite, Site, foreign_forward
from tidegate.weight_cache import ATTRIBUTE, WeightCache, cache_of, invalidate

EXPERTS = "experts"
NAMES = ("_experts_implementation", moe.NAME)
WEIGHTS = ("gate_up_proj", "down_proj")
TOKENS, SLOTS = 3, 2  # of the self-test: at most six experts are widened to fp32


def is_experts(module):
    """3-D weights of all experts under the names that the experts of Transformers have."""
    weights = [getattr(module, name, None) for name in WEIGHTS]
    return all(isinstance(weight, torch.Tensor) and weight.dim() == 3 for weight in weights)


class ExpertsSite(registry.RegistrySite):
    """The registry's, and the copies of weights that its modules keep if `moe_cache` is on."""

    caches = False

    def _governed(self):
        return [module for module in self.module.modules() if is_experts(module) and "config" in module.__dict__]

    def _install(self):
        super()._install()
        # FSDP fills the same memory anew in every call: there is nothing to keep.
        self.caches = self.caches and not any(type(m).__name__.startswith("FSDP") for m in self.module.modules())
        for module in self._governed() if self.caches else ():
            if module.config is self.selected:
                setattr(module, ATTRIBUTE, WeightCache())

    def _remove(self):
        for module in self._governed():
            module.__dict__.pop(ATTRIBUTE, None)
        return super()._remove()

    def intact(self):
        return super().intact() and bool(self._governed())  # int8 experts ask no registry

    def invalidate(self):
        invalidate(self.module)

    def remarks(self):
        if not self.caches:
            return self.reason
        held = sum(cache.bytes for module in self._governed() if (cache := cache_of(module)) is not None)
        return f"copies of frozen weights: {held / 2**20:.1f} MiB"


def _first(module, count, additions, dtype):
    """The module with its first experts only, in another type, what LoRA adds to them merged."""
    twin = type(module).__new__(type(module))
    twin.__dict__.update(module.__dict__, _parameters=dict(module._parameters), num_experts=count)
    for name in WEIGHTS:
        weight = getattr(module, name)[:count].to(dtype)
        if lora.PARTS[name] in additions:
            a, b, scale = additions[lora.PARTS[name]]
            added = scale * (b[:count].to(dtype) @ a[:count].to(dtype))
            weight = weight + (added.mT if getattr(module, "is_transposed", False) else added)
        twin._parameters[name] = torch.nn.Parameter(weight, requires_grad=False)
    return twin


def _test(outer):
    """Of an experts module, or of the outermost wrapper that PEFT has put around one."""

    def test():
        wrappers, module = lora.unwrapped(outer)
        additions = (lora.additions(outer) or (module, {}))[1]
        gate_up, original = module.gate_up_proj, type(module).forward
        hidden = gate_up.shape[-2 if getattr(module, "is_transposed", False) else -1]
        count = min(TOKENS * SLOTS, gate_up.shape[0])
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(TOKENS, hidden, generator=generator).to(gate_up.dtype)
        ids = torch.arange(TOKENS * SLOTS).view(TOKENS, SLOTS) % count
        weights = torch.rand(TOKENS, SLOTS, generator=generator).to(gate_up.dtype)
        with torch.no_grad():
            # With LoRA the original would merge the weights of all experts.
            stock = _first(module, count, additions, x.dtype) if wrappers else module
            results = (
                moe.experts_forward(module, x, ids, weights, **additions),
                original(stock, x, ids, weights),
                original(_first(module, count, additions, torch.float32), x.float(), ids, weights.float()),
            )
        return selftest.summary([selftest.judge("experts", *results)], gate_up.dtype)

    return test


def _find_lora(root, refused):
    """A site for every outermost wrapper that PEFT has put around experts."""
    sites = []
    wrappers = [(path, module) for path, module in named_modules(root) if lora.is_wrapper(module)]
    inner = {id(module.base_layer) for _, module in wrappers}
    for path, module in wrappers:
        parts, experts = lora.unwrapped(module)
        if id(module) in inner or not is_experts(experts) or id(experts.__dict__.get("config")) in refused:
            continue
        why = lora.why_not(parts)
        other = foreign_forward(module)
        why = why if other is None else f"forward already replaced by {other}"
        if why is not None:
            sites.append(Site(path, EXPERTS, module).refuse(why))
            continue
        key = EXPERTS, experts.gate_up_proj.dtype, tuple(experts.gate_up_proj.shape), len(parts)
        sites.append(ForwardSite(path, EXPERTS, module, "I:lora", lora.forward, test=_test(module), test_key=key))
    return sites


def find(root, options):
    """One site for every config that names an experts function; it governs all experts below it."""
    sites, seen = [], {}
    if _native.fallback:  # the model's own experts are as fast there
        return sites
    for path, module in named_modules(root):
        if not is_experts(module):
            continue
        config = module.__dict__.get("config")
        if not hasattr(config, NAMES[0]) or NAMES[0] not in attribute_names(type(module).forward):
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
                site = ExpertsSite(path, EXPERTS, where[1], module, NAMES, moe.register_experts, test=_test(module))
                site.caches = options.on("moe_cache")
            else:
                site = Site(path, EXPERTS, module)
            seen[id(config)] = site
            sites.append(site)
        if why is not None:  # one name governs them all
            seen[id(config)].refuse(f"{type(module).__name__}: {why}")
    refused = {config for config, site in seen.items() if site.verdict}
    return sites + _find_lora(root, refused)


find.ops = (EXPERTS,)
