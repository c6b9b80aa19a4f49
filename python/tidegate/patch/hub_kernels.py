"""Models that use the `kernels` package: it resets forwards of instances, so it must know ours to put them back."""

import inspect

from tidegate.patch.site import ForwardSite, record_of


def _run(module, op, *args, **kwargs):
    """What an instance is patched with; its class's forward if it is not patched: the registry is the process's."""
    record = record_of(module)
    site = None if record is None else record.sites.get(op)
    function = type(module).forward if site is None else site.bound
    return function(module, *args, **kwargs)


def layer_class(name, run, original):
    """A class as the registry wants it: a forward with the original's kinds of parameters, and two flags. Decorators of
    some releases hide the parameters, so they are taken from the original as it is seen."""
    from torch import nn

    def forward(self, *args, **kwargs):
        return run(self, *args, **kwargs)

    if original is not None:
        forward.__signature__ = inspect.signature(original)
    return type(f"Tidegate_{name}", (nn.Module,), {"forward": forward, "can_torch_compile": True, "has_backward": True})


class _Here:
    """A "repository" that is already in the process."""

    def __init__(self, op, cls):
        self.key = op, cls

    def load(self):
        op, cls = self.key
        found = layer_class(op, lambda module, *args, **kwargs: _run(module, op, *args, **kwargs), cls.forward)
        found.forward.tidegate = op
        return found

    def __hash__(self):
        return hash((_Here, self.key))

    def __eq__(self, other):
        return isinstance(other, _Here) and self.key == other.key


def register(root, sites):
    """Enters our forwards under the names of the patched classes, if the model uses `kernels` already."""
    if not getattr(root, "use_kernels", False):
        return
    from kernels import register_kernel_mapping

    for site in sites:
        name = getattr(type(site.module), "kernel_layer_name", None)
        if name is not None and isinstance(site, ForwardSite) and site.op in ("gdn_layer", "gated_rmsnorm", "rmsnorm"):
            register_kernel_mapping({name: {"cpu": _Here(site.op, type(site.module))}})
