"""Gated MLPs, down(silu(gate(x)) * up(x)): found by their three projections, taken if they compute that."""

import inspect

import torch

from tidegate import _native
from tidegate._native import ops
from tidegate.patch import selftest
from tidegate.patch.gdn_families import family_of
from tidegate.patch.resolve import named_modules
from tidegate.patch.site import ForwardSite, Site, foreign_forward

OP = "swiglu"
PROJECTIONS = {"gate_proj", "up_proj", "down_proj"}
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def product(gate, up):
    """Adapters may leave projections in different types; torch knows which wins."""
    if gate.dtype == up.dtype and gate.dtype in TYPES and gate.device.type == "cpu":
        return ops.swiglu_fwd(gate, up)
    return torch.nn.functional.silu(gate) * up


def forward(self, x):
    return self.down_proj(product(self.gate_proj(x), self.up_proj(x)))


def _is_gated_mlp(module):
    if next(module.parameters(recurse=False), None) is not None:
        return False
    with_parameters = {name for name, child in module.named_children() if next(child.parameters(), None) is not None}
    given = [p for p in inspect.signature(type(module).forward).parameters.values() if p.default is p.empty]
    return with_parameters == PROJECTIONS and len(given) == 2  # self and x


def _known(module):
    """Whether its forward is one of a family that we know, and not that of a class derived from it."""
    owner = next(base for base in type(module).__mro__ if "forward" in vars(base))
    return family_of(module) is not None and owner.__module__.startswith("transformers.models.")


def _width(module):
    """Of the input: what the innermost matrix of the projection has, whatever wraps it."""
    return next((p.shape[-1] for name, p in module.gate_proj.named_parameters() if p.dim() == 2), None)


def _refusal(module, options):
    other = foreign_forward(module)
    if other is not None:
        return f"forward already replaced by {other}"
    if family_of(module) is None and not options.on("discovery"):
        return "unknown family, and discovery is off"
    act = getattr(module, "act_fn", None)
    if act is not None:
        x = torch.linspace(-4, 4, 33)
        try:
            same = torch.allclose(act(x), torch.nn.functional.silu(x), rtol=1e-5, atol=1e-6)
        except Exception:  # whatever it is, it is no function of one tensor
            same = False
        if not same:
            return f"activation is {getattr(act, '__name__', type(act).__name__)}, not SiLU"
    return None


def _compare(site):
    @torch.no_grad()
    def test():
        module, dtype = site.module, selftest.type_of(site.module)
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(7, _width(module), generator=generator)
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
        about = dict(known=_known(module), test_key=(OP, selftest.key(module)))
        site = ForwardSite(path, OP, module, "I:mlp", forward, **about)
        site.test = _compare(site)
        sites.append(site)
    return sites


find.ops = (OP,)
