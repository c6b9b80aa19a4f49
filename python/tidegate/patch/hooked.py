"""Text models that had a forward of their own before patch() of the process gave their class ours."""

import functools
import gc
import types

from tidegate.packed.sites import PACKED
from tidegate.patch.site import MISSING, Site, is_bound, reaches, record_of

KEPT = "_tidegate_forward"  # name of the forward that ours goes around, in the module's __dict__: copies have their own


def _place(module):
    """The mapping and the name in it where a call of the module ends, or where it will after its own patch is undone.

    Accelerate's hooks put themselves into `forward` and keep what was there as `_old_forward`; we go beneath them.
    """
    record = record_of(module)
    own = None if record is None else record.sites.get(PACKED)
    if own is not None and own.installed and own.before:
        return own.before, next(iter(own.before))
    name = "_old_forward" if hasattr(module, "_hf_hook") and "_old_forward" in module.__dict__ else "forward"
    return module.__dict__, name


class HookedSite(Site):
    """The forward of one instance: hooks of accelerate, kernelize and other wrappers keep the class's from being asked.

    Where they call that of the class, ours takes its place; else ours goes around what is there. The module gets no
    record: patch(model) may have been there before, or come later.
    """

    def __init__(self, path, module, parent):
        super().__init__(path, PACKED, module, "I:wrapper", reason="had a forward of its own")
        self.parent, self.before, self.bound = parent, MISSING, None

    def _around(self, value):
        looking = self.parent.looking_at(lambda text_model, **arguments: text_model.__dict__[KEPT](**arguments))

        @functools.wraps(value)
        def forward(text_model, *args, **kwargs):
            if self.installed:
                return looking(text_model, *args, **kwargs)
            return text_model.__dict__[KEPT](*args, **kwargs)

        forward.__name__ = "forward"  # torch.save stores it by that name
        return forward

    def install(self, settings, handle):
        self._install()
        self.installed = self.active = True

    def undo(self):
        if self.installed:
            self.installed = False
            self.active = not self._remove()

    def _install(self):
        if self.bound is not None and self.intact():
            return
        place, name = _place(self.module)
        value = self.before = place[name]
        function = self.parent.function
        if not is_bound(value, self.parent.original, self.module):
            self.module.__dict__[KEPT] = value
            function = self._around(value)
        self.bound = place[name] = types.MethodType(function, self.module)

    def _remove(self):
        place, name = _place(self.module)
        value = place.get(name, MISSING)
        if value != self.bound:
            return value is not MISSING and reaches(value, self.bound)
        place[name] = self.before
        self.module.__dict__.pop(KEPT, None)
        return False

    def intact(self):
        place, name = _place(self.module)
        value = place.get(name, MISSING)
        return value is MISSING or reaches(value, self.bound)  # without one of its own, its class's is asked


def hooked_models(family, parent):
    """Sites for the instances there are of the class of `parent`, a site, that have a forward of their own."""
    cls = parent.module
    made = [
        value for value in gc.get_objects() if cls in type(value).__mro__ and type(value).forward is parent.original
    ]
    places = [(module, *_place(module)) for module in made]
    return [
        HookedSite(f"{family} text model", module, parent)
        for module, place, name in places
        if place.get(name, MISSING) is not MISSING
    ]
