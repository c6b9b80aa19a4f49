"""A linear-attention layer's own forward with our operators in it: for families that we do not know, and on request."""

import copy
import functools

import torch

from tidegate.errors import PackedInputError
from tidegate.patch.code import attribute_names, that_names, with_globals
from tidegate.patch.gdn_forward import fetch, release_conv
from tidegate.patch.gdn_ops import as_attributes
from tidegate.patch.site import MISSING, ForwardSite, call_original

PACKED = ("cu_seq_lens_q", "seq_idx")


def conv_names(module):
    """The depthwise convolutions of a layer: their hooks must fire, because only their weights are read."""
    return tuple(name for name, child in module.named_children() if isinstance(child, torch.nn.Conv1d))


@functools.cache
def _with_hooks(function, convs):
    def forward(self, *args, **kwargs):
        for name in convs:
            fetch(getattr(self, name))
        output = function(self, *args, **kwargs)
        release_conv(self, convs)
        return output

    return forward


def globals_forward(module, functions):
    """The module's forward with these global functions replaced, or None if it does not call all of them."""
    original = that_names(type(module).forward, functions)
    return None if original is None else _with_hooks(with_globals(original, functions), conv_names(module))


class StandIn:
    """A function of ours as an instance attribute. In a saved model it is the one it stands for."""

    def __init__(self, function, original):
        self.function, self.original = function, original

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    def __reduce__(self):
        return copy.copy, (self.original,)  # of a function: itself

    def __deepcopy__(self, memo):
        return self


def _packed_forward(self, *args, **kwargs):
    """Older layers look at seq_idx in the convolution and at cu_seq_lens_q in the rule: both must be there."""
    cu, seq_idx = (kwargs.get(name) for name in PACKED)
    if cu is not None or seq_idx is not None:
        if not self._tidegate.sites["gdn_layer"].packs:
            raise PackedInputError(
                f"packed input: {type(self).__name__} of this Transformers release does not pass the boundaries to "
                "its convolution; switch gdn_layer on or use a newer release"
            )
        tokens = (args[0] if args else kwargs["hidden_states"]).shape[1]
        if cu is None:
            kwargs["cu_seq_lens_q"] = torch.ops.tidegate.seqlens(None, seq_idx.reshape(-1), None, tokens=tokens)
        if seq_idx is None:
            places = torch.arange(tokens, device=cu.device)
            kwargs["seq_idx"] = torch.searchsorted(cu[1:].contiguous(), places, right=True)[None].int()
    return call_original(self, "gdn_layer", *args, **kwargs)


class AttributeSite(ForwardSite):
    """The operators that an older layer keeps as attributes of the instance, replaced there."""

    def __init__(self, path, op, module, mechanism, functions, **options):
        super().__init__(path, op, module, mechanism, _packed_forward, **options)
        self.functions, self.kept = functions, {}
        used = attribute_names(type(module).forward)
        # Layers that take no keywords, or call convolution modules, cannot pack.
        self.packs = "causal_conv1d_fn" in functions and "causal_conv1d_fn" in used and "get" in used

    def _install(self):
        super()._install()
        for name, function in self.functions.items():
            if not isinstance(self.module.__dict__.get(name), StandIn):
                self.kept[name] = self.module.__dict__.get(name, MISSING)
            setattr(self.module, name, StandIn(function, self.kept[name]))

    def _remove(self):
        for name, value in self.kept.items():
            delattr(self.module, name) if value is MISSING else setattr(self.module, name, value)
        self.kept = {}
        return super()._remove()

    def intact(self):
        attributes = self.module.__dict__
        return super().intact() and all(isinstance(attributes.get(name), StandIn) for name in self.functions)


def attributes_of(module, functions):
    """Those of the functions that the module keeps as attributes of its own; causal_conv1d_fn may be None there."""
    return {name: value for name, value in as_attributes(functions).items() if name in module.__dict__}
