"""Functions that Transformers finds by a name in a model's config: attention, experts."""

import copy

from tidegate.patch.site import Site


def _configs(config, found=None):
    """A config and those inside it."""
    found = {} if found is None else found
    found[id(config)] = config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type") and id(value) not in found:
            _configs(value, found)
    return found


def holder(root, config, user):
    """(path, module) of the outermost module whose config holds this one, with the module that uses it inside."""
    for path, module in root.named_modules():
        own = module.__dict__.get("config")
        if hasattr(own, "to_dict") and id(config) in _configs(own):
            if any(inner is user for inner in module.modules()):
                return path, module
    return None


class _Saved:
    """In a saved model: puts a name back when the model is loaded. Needs nothing but Python there."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return setattr, self.arguments


class RegistrySite(Site):
    """Selects our function by name, on a copy of the config that belongs to this model alone.

    `module` is the outermost one that holds the config, so that all holders are inside it; `user` reads `attribute` of
    its config, where our function is called `ours`; register() makes the name known.
    """

    def __init__(self, path, op, module, user, names, register, **options):
        super().__init__(path, op, module, "B:registry" if op == "experts" else "C:registry", **options)
        self.user, self.register = user, register
        self.attribute, self.ours = names
        self.pairs = []  # (our copy, the user's config)

    @property
    def name(self):
        return getattr(self.user.config, self.attribute, None)

    def _install(self):
        self.register()
        originals = _configs(self.module.__dict__["config"])
        memo = {}
        copy.deepcopy(self.module.__dict__["config"], memo)
        self.pairs = [(memo[key], original) for key, original in originals.items()]
        self._rebind({key: memo[key] for key in originals})
        self.selected, self.before = self.user.config, self.name
        setattr(self.selected, self.attribute, self.ours)
        self.facts = self._facts()

    def _facts(self):
        """The values of our copy but for the name, to see whether the user has changed any."""
        return self.pairs[0][0].to_dict()

    def _remove(self):
        changed = self._facts() != self.facts or not self.intact()
        for config in (self.selected, self.user.config):  # not the same if a later copy of it was kept
            if getattr(config, self.attribute) == self.ours:
                setattr(config, self.attribute, self.before)
        if not changed:
            self._rebind({id(ours): theirs for ours, theirs in self.pairs})
        return False

    def _rebind(self, to):
        for module in self.module.modules():
            target = to.get(id(module.__dict__.get("config")))
            if target is not None:
                module.config = target

    def intact(self):
        return self.name == self.ours

    def saved(self):
        return _Saved(self.user.config, self.attribute, self.before)

    def repair(self):
        if self.installed and not self.intact():
            self.selected = self.user.config
            setattr(self.selected, self.attribute, self.ours)

    def copy_to(self, module, memo):
        twin = super().copy_to(module, memo)
        for name in ("user", "pairs", "selected"):
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        return twin
