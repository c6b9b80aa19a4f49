"""Router and experts: the socket for their operators."""

from tidegate.patch.resolve import named_modules
from tidegate.patch.site import Site

OPS = ("router", "experts")


def find(root, options):
    """The places for them, reported as absent: there is no operator yet to put in."""
    sites = []
    for path, module in named_modules(root):
        parameters = dict(module.named_parameters(recurse=False))
        if {"gate_up_proj", "down_proj"} <= parameters.keys() and parameters["gate_up_proj"].dim() == 3:
            sites.append(Site(path, "experts", module).refuse("no operator in this version", "absent"))
    return sites


find.ops = OPS
