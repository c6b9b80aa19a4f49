"""Finds the linear-attention layers of a model and chooses how each is served.

I: our forward of the whole layer, for families that we know. R, J: the layer's own forward, calling our operators
through private globals or, in older releases, through attributes of the instance.
"""

import torch

from tidegate.patch import selftest
from tidegate.patch.code import argument_names
from tidegate.patch.gdn_families import FAMILIES, family_of, misfit, spec_of
from tidegate.patch.gdn_forward import fused_forward
from tidegate.patch.gdn_ops import NAMES, replacements
from tidegate.patch.gdn_original import AttributeSite, attributes_of, globals_forward
from tidegate.patch.resolve import named_modules
from tidegate.patch.site import ForwardSite, Site, foreign_forward

OP = "gdn_layer"


def norm_rounding(options):
    """How the gated norm inside of a fused layer rounds; None: its module is called."""
    if not options.on("gated_rmsnorm"):
        return None
    return "fp32" if options.gated_rmsnorm_fp32 else "hf"


def not_gdn(module):
    """Why a module with A_log and dt_bias is no gated delta rule with one gate a head, or None."""
    A_log, dt_bias = module.A_log, module.dt_bias
    if A_log.dim() != 1 or A_log.shape != dt_bias.shape:
        return (
            f"not a gated delta rule with one gate a head: A_log {list(A_log.shape)}, dt_bias {list(dt_bias.shape)} "
            "(one gate a channel, as KDA has, needs another operator)"
        )
    convs = [child for child in module.children() if isinstance(child, torch.nn.Conv1d)]
    if not convs or any(conv.groups != conv.in_channels for conv in convs):
        return "no depthwise convolution"
    arguments = argument_names(type(module).forward)
    missing = [name for name in ("hidden_states", "cache_params", "attention_mask") if name not in arguments]
    return f"forward has no argument {', '.join(missing)}" if missing else None


def _site(path, module, options):
    family = family_of(module)
    reason = not_gdn(module)
    if reason is not None:
        return Site(path, OP, module).refuse(reason)
    if family is None and not options.on("discovery"):
        return Site(path, OP, module).refuse(f"no known family ({', '.join(FAMILIES)}), and discovery is off")
    other = foreign_forward(module)
    if other is not None:
        return Site(path, OP, module).refuse(f"forward already replaced by {other}")
    spec = spec_of(module) if family is not None else None
    why = "unknown family" if spec is None else misfit(module, spec) or options.why_off("gdn_layer")
    why = why or next((options.why_off(name) for name in NAMES if not options.on(name)), None)
    about = dict(known=family is not None, reason=why or "", test_key=selftest.key(module))
    if why is None:
        site = ForwardSite(path, OP, module, "I:fused", fused_forward(spec, norm_rounding(options)), **about)
        site.packs = True
        return site
    functions = replacements(options)
    forward = globals_forward(module, functions) if functions else None
    if forward is not None:
        site = ForwardSite(path, OP, module, "R:globals", forward, **about)
        site.packs = "causal_conv1d_fn" in functions and "torch_chunk_gated_delta_rule" in functions
        return site
    attributes = attributes_of(module, functions)
    if attributes:
        return AttributeSite(path, OP, module, "J:attributes", attributes, **about)
    return Site(path, OP, module).refuse(f"{why}; and its forward calls none of {', '.join(functions) or 'them'}")


def find(root, options):
    sites = []
    for path, module in named_modules(root):
        if all(isinstance(getattr(module, name, None), torch.Tensor) for name in ("A_log", "dt_bias")):
            site = _site(path, module, options)
            if not site.verdict:
                site.test = selftest.of_layer(site)
            sites.append(site)
    return sites


find.ops = (OP,)
