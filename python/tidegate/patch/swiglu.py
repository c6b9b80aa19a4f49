"""Gated MLPs, down(silu(gate(x)) * up(x)): taken if their forward is that expression and nothing else.

A comparison of numbers alone would not do: limits on large values, dropout in training or a second argument do not show
on a few random rows. So the code of the forward must be one of the forms below; the numbers are compared besides.
"""

import torch

from tidegate import _native
from tidegate._native import ops
from tidegate.patch import selftest
from tidegate.patch.gdn_families import family_of
from tidegate.patch.resolve import is_sharded, named_modules, unreadable
from tidegate.patch.site import ForwardSite, Site, call_original, foreign_forward

OP = "swiglu"
PROJECTIONS = {"gate_proj", "up_proj", "down_proj"}
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def _returned(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _named(self, x):
    y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return y


def shape(code):
    """What a function does, whatever its argument and its local variables are called; None of no code."""
    if code is None:
        return None
    counts = code.co_argcount, code.co_kwonlyargcount, code.co_nlocals, code.co_flags & 0x0C  # *args, **kwargs
    return code.co_code, code.co_names, counts


FORMS = {shape(function.__code__) for function in (_returned, _named)}


def product(gate, up):
    """Adapters may leave projections in different types; torch knows which wins, and what to do with sharded ones."""
    plain = gate.dtype == up.dtype and gate.dtype in TYPES and gate.device.type == up.device.type == "cpu"
    if plain and not is_sharded(gate) and not is_sharded(up):
        return ops.swiglu_fwd(gate, up)
    return torch.nn.functional.silu(gate) * up


def forward(self, *args, **kwargs):
    if len(args) + len(kwargs) != 1:
        return call_original(self, OP, *args, **kwargs)  # says what is wrong
    x = args[0] if args else next(iter(kwargs.values()))
    return self.down_proj(product(self.gate_proj(x), self.up_proj(x)))


def _is_gated_mlp(module):
    with_parameters = {name for name, child in module.named_children() if next(child.parameters(), None) is not None}
    return with_parameters == PROJECTIONS and next(module.parameters(recurse=False), None) is None


def activation_problem(act):
    """Why an activation is not SiLU, or None. It is called past its hooks: these numbers are not the model's."""
    name = getattr(act, "__name__", type(act).__name__)
    if isinstance(act, torch.nn.Module):
        if act._forward_hooks or act._forward_pre_hooks:
            return f"activation {name} has hooks"
        act = act.forward
    x = torch.linspace(-4, 4, 33)
    try:
        same = torch.allclose(act(x), torch.nn.functional.silu(x), rtol=1e-5, atol=1e-6)
    except Exception:  # whatever it is, it is no function of one tensor
        same = False
    return None if same else f"activation is {name}, not SiLU"


def _refusal(module, options):
    other = foreign_forward(module)
    if other is not None:
        return f"forward already replaced by {other}"
    if family_of(module) is None and not options.on("discovery"):
        return "unknown family, and discovery is off"
    code = getattr(type(module).forward, "__code__", None)
    if shape(code) not in FORMS:
        return "its forward is not down_proj(act_fn(gate_proj(x)) * up_proj(x)) alone"
    return activation_problem(module.act_fn)


def _compare(site):
    @torch.no_grad()
    def test():
        module, dtype = site.module, selftest.type_of(site.module)
        width = getattr(module.gate_proj, "in_features", None)
        if width is None:  # what wraps the projection has its matrix inside
            width = next(p.shape[-1] for p in module.gate_proj.parameters() if p.dim() == 2)
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(7, width, generator=generator)
        original, reference = selftest.plain_copy(module), selftest.plain_copy(module, torch.float32)
        results = selftest.trial_copy(site).forward(x.to(dtype)), original.forward(x.to(dtype)), reference.forward(x)
        return selftest.summary([selftest.judge("random rows", *results)], dtype)

    return test


def find(root, options):
    sites = []
    if _native.fallback:  # two operators of torch are what the layer has already
        return sites
    for path, module in named_modules(root):
        if not _is_gated_mlp(module):
            continue
        reason = _refusal(module, options)
        if reason is not None:
            sites.append(Site(path, OP, module).refuse(reason))
            continue
        # Known only where nothing can be compared (sharded, on meta): a test that fails, as it may with quantised
        # projections, leaves an MLP as it is and never the model unpatched.
        known = family_of(module) is not None and bool(unreadable(module))
        about = dict(known=known, test_key=(OP, selftest.key(module)))
        site = ForwardSite(path, OP, module, "I:mlp", forward, **about)
        site.test = _compare(site)
        sites.append(site)
    return sites


find.ops = (OP,)
