"""Packed experts, through Transformers' registry of experts functions. The block around them stays as it is."""

import torch

from tidegate import _native, moe
from tidegate.errors import SelfTestError
from tidegate.patch import lora, registry
from tidegate.patch.resolve import named_modules
from tidegate.patch.site import ForwardSite, Site, foreign_forward
from tidegate.weight_cache import ATTRIBUTE, WeightCache, cache_of, invalidate

EXPERTS = "experts"
NAMES = ("_experts_implementation", moe.NAME)
TOKENS, SLOTS = 3, 2  # of the self-test: at most six experts are widened to fp32


def is_experts(module):
    """3-D weights of all experts under the names that the experts of Transformers have."""
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
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

    def invalidate(self):
        invalidate(self.module)

    def remarks(self):
        if not self.caches:
            return self.reason
        held = sum(cache.bytes for module in self._governed() if (cache := cache_of(module)) is not None)
        return f"copies of frozen weights: {held / 2**20:.1f} MiB"


def _loops(module, x, ids, weights, additions):
    """The definition, in fp32, expert by expert."""
    out = torch.zeros_like(x)

    def matrix(name, e):
        weight = getattr(module, f"{name}_proj")[e].float()
        weight = weight.T if getattr(module, "is_transposed", False) else weight
        a, b, scale = additions.get(f"{name}_lora", (None, None, 0))
        return weight if a is None else weight + scale * (b[e].float() @ a[e].float())

    for t in range(x.shape[0]):
        for slot, e in enumerate(ids[t].tolist()):
            gate, up = (matrix("gate_up", e) @ x[t]).chunk(2)
            out[t] += weights[t, slot] * (matrix("down", e) @ (torch.nn.functional.silu(gate) * up))
    return out


def _test(outer):
    """Of an experts module, or of the outermost wrapper that PEFT has put around one."""

    def test():
        wrappers, module = lora.unwrapped(outer)
        additions = (lora.additions(outer) or (module, {}))[1]
        gate_up = module.gate_up_proj
        hidden = gate_up.shape[-2 if getattr(module, "is_transposed", False) else -1]
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(TOKENS, hidden, generator=generator).to(gate_up.dtype)
        ids = torch.arange(TOKENS * SLOTS).view(TOKENS, SLOTS) % gate_up.shape[0]
        weights = torch.rand(TOKENS, SLOTS, generator=generator).to(gate_up.dtype)
        with torch.no_grad():
            truth = _loops(module, x.float(), ids, weights.float(), additions)
            scale = truth.abs().max().clamp(min=1e-30)
            # With LoRA the original would merge the weights of all experts.
            theirs = type(module).forward(module, x, ids, weights) if not wrappers else truth.to(x.dtype)
            ours, theirs = (
                float((y.float() - truth).abs().max() / scale)
                for y in (moe.experts_forward(module, x, ids, weights, **additions), theirs)
            )
        slack = torch.finfo(x.dtype).eps if wrappers and x.dtype != torch.float32 else 1e-6
        if not ours <= 2 * theirs + slack:
            raise SelfTestError(f"error {ours:.1e} against fp32, the original's {theirs:.1e}")
        return f"err {ours:.1e}"

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
        if not hasattr(config, NAMES[0]) or not hasattr(module, "is_transposed"):
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
