"""Models that use the `kernels` package: it resets forwards of instances, so it must know ours to put them back."""

from tidegate.patch.site import ForwardSite, record_of


def _run(module, op, *args, **kwargs):
    """What an instance is patched with; its class's forward if it is not patched: the registry is the process's."""
    record = record_of(module)
    site = None if record is None else record.sites.get(op)
    function = type(module).forward if site is None else site.bound
    return function(module, *args, **kwargs)


def _layer_class(op):
    """A class as the registry wants it: a forward with the original's kinds of parameters, and two flags."""
    from torch import nn

    if op == "gdn_layer":

        def forward(self, hidden_states, cache_params=None, attention_mask=None, **kwargs):
            return _run(self, op, hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs)

    elif op == "gated_rmsnorm":

        def forward(self, hidden_states, gate):
            return _run(self, op, hidden_states, gate)

    else:

        def forward(self, x):
            return _run(self, op, x)

    forward.tidegate = op
    return type(f"Tidegate_{op}", (nn.Module,), {"forward": forward, "can_torch_compile": True, "has_backward": True})


class _Here:
    """A "repository" that is already in the process."""

    def __init__(self, op):
        self.op = op

    def load(self):
        return _layer_class(self.op)

    def __hash__(self):
        return hash((_Here, self.op))

    def __eq__(self, other):
        return isinstance(other, _Here) and self.op == other.op


def register(root, sites):
    """Enters our forwards under the names of the patched classes, if the model uses `kernels` already."""
    if not getattr(root, "use_kernels", False):
        return
    from kernels import register_kernel_mapping

    for site in sites:
        name = getattr(type(site.module), "kernel_layer_name", None)
        if name is not None and isinstance(site, ForwardSite) and site.op in ("gdn_layer", "gated_rmsnorm", "rmsnorm"):
            register_kernel_mapping({name: {"cpu": _Here(site.op)}})
