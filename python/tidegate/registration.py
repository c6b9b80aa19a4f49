"""tidegate.register(): Tidegate under its name in the registries of other packages, without touching any model.

Nothing changes for a model until somebody selects the name, but for flash-linear-attention: its functions crash with
CPU tensors, so there our backend serves them at once.
"""

import importlib
import sys

from tidegate import fla_backend, moe

LAYERS = ("Qwen3_5GatedDeltaNet",)  # names of whole layers in the registry of `kernels`


class Registration(dict):
    """What was registered where, or why not. `undo()` takes it back."""

    def __str__(self):
        width = max(len(key) for key in self)
        return "\n".join(f"{key:<{width}}  {value}" for key, value in self.items())

    __repr__ = __str__

    def undo(self) -> None:
        """The same as unregister()."""
        unregister()


def _run(self, hidden_states, cache_params=None, attention_mask=None, **kwargs):
    """The forward that `kernels` gives to a layer."""
    from tidegate.patch.gdn_families import misfit, spec_of
    from tidegate.patch.gdn_forward import fused_forward

    spec = spec_of(self)
    function = type(self).forward if spec is None or misfit(self, spec) else fused_forward(spec, "hf")
    return function(self, hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs)


class _Here:
    """What `kernels` takes for a repository: our layer class, already loaded."""

    def __init__(self, name):
        self.name = name

    def load(self):
        from tidegate.patch.hub_kernels import layer_class

        models = [m for key, m in list(sys.modules.items()) if key.startswith("transformers.models.")]
        found = (vars(m).get(self.name) for m in models)
        original = next((cls for cls in found if getattr(cls, "kernel_layer_name", None) == self.name), None)
        return layer_class("gdn_layer", _run, _run if original is None else original.forward)

    def __hash__(self):
        return hash((_Here, self.name))

    def __eq__(self, other):
        return isinstance(other, _Here) and self.name == other.name


def _fill_kernels():
    try:
        kernels = importlib.import_module("kernels")
        kernels.register_kernel_mapping({name: {"cpu": _Here(name)} for name in LAYERS})
    except Exception as error:  # not installed, or another release of it
        return f"not used: {type(error).__name__}: {error}"
    return f"{', '.join(LAYERS)} for CPUs: model.set_use_kernels(True) selects it"


def _empty_kernels():
    """Takes our entries out again where this release of `kernels` lets us see them."""
    try:
        mapping = importlib.import_module("kernels.layer.globals")._KERNEL_MAPPING.get()
    except (ImportError, AttributeError):
        return
    for name in LAYERS:
        devices = mapping.get(name, {})
        for device in [device for device in devices if getattr(device, "type", device) == "cpu"]:
            del devices[device]


def _attention():
    return importlib.import_module("tidegate.packed.attention")


def _fill_attention():
    try:
        _attention().register()
    except ImportError as error:
        return f"not used: {error}"
    return f'{_attention().NAME!r}: model.set_attn_implementation("{_attention().NAME}") selects it'


def _fill_experts():
    try:
        moe.register_experts()
    except ImportError as error:
        return f"not used: {error}"
    return f'{moe.NAME!r}: model.set_experts_implementation("{moe.NAME}") selects it'


def _keep():
    """A name stays: models may have been built with it, and alone it does nothing."""


_fillers = {
    "flash-linear-attention": (fla_backend.install, fla_backend.remove),
    "kernels": (_fill_kernels, _empty_kernels),
    "attention of Transformers": (_fill_attention, _keep),
    "experts of Transformers": (_fill_experts, _keep),
}
_state = {}


def register() -> Registration:
    """Registers with the packages that are installed; twice is once. Returns a Registration: what is where."""
    if "done" not in _state:
        _state["done"] = Registration({name: install() for name, (install, _) in _fillers.items()})
    return _state["done"]


def unregister() -> None:
    """Takes back what register did."""
    for _, remove in _fillers.values():
        remove()
    _state.pop("done", None)
