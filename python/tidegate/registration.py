"""tidegate.register(): Tidegate under its name in the registries of other packages, without touching any model."""

from tidegate import fla_backend

_fillers = {"flash-linear-attention": (fla_backend.install, fla_backend.remove)}
_state = {}


class Registration(dict):
    """What was registered where, or why not. `undo()` takes it back."""

    def __str__(self):
        width = max(len(key) for key in self)
        return "\n".join(f"{key:<{width}}  {value}" for key, value in self.items())

    __repr__ = __str__

    def undo(self):
        unregister()


def register():
    """Registers with the packages that are installed; twice is once. Returns a Registration.

    flash-linear-attention: calls of its functions with CPU tensors run here from now on.
    """
    if "done" not in _state:
        _state["done"] = Registration({name: install() for name, (install, _) in _fillers.items()})
    return _state["done"]


def unregister():
    """Takes back what register did."""
    for _, remove in _fillers.values():
        remove()
    _state.pop("done", None)
