"""A place in a model that is patched: what is put there, whether it still is, and how it goes away again.

A finder looks at a model and returns sites. The base class knows how a site is reported; a subclass says how it is
installed. ForwardSite gives one module another forward.
"""

import copy
import functools
import types

from tidegate.errors import PatchError

RECORD = "_tidegate"  # name of the record in a patched module's __dict__
MISSING = object()


class Record:
    """What a patched module carries: its sites by op, and the settings and handle of the patch. Copies carry it too."""

    def __init__(self, module, settings=None, handle=None):
        self.module, self.settings, self.handle = module, settings, handle
        self.sites = {}

    def __deepcopy__(self, memo):
        module = memo.get(id(self.module))  # torch's deepcopy has made it before it copies the attributes
        twin = Record(module, self.settings)
        if module is not None:
            twin.sites = {op: site.copy_to(module, memo) for op, site in self.sites.items()}
        return twin

    def __reduce__(self):
        # torch.save: the loaded model is an unpatched one, and needs no tidegate.
        return tuple, ([site.saved() for site in self.sites.values()],)


def record_of(module):
    """The record of a patched module, or None."""
    record = module.__dict__.get(RECORD)
    return record if isinstance(record, Record) and record.module is module else None


class Site:
    """path: where in the model; op: which operator; mechanism: how it gets there, for the report.

    Override `_install` and `_remove`, and `intact` if others may undo what was done. `test`, a function without
    arguments, compares the replacement with the original before anything is installed: it returns a measured error or
    a text for the report, and raises SelfTestError. Sites with equal `test_key` are tested once.
    """

    def __init__(self, path, op, module, mechanism="-", *, reason="", test=None, test_key=None, known=True):
        self.path, self.op, self.module, self.mechanism, self.reason = path, op, module, mechanism, reason
        self.test, self.test_key, self.known = test, test_key, known
        self.checked = ""  # what the self-test found
        self.verdict = ""  # "refused" or "absent": nothing is installed here, `reason` says why
        self.installed = False
        self.active = True  # False: undone, but someone still calls our function

    def refuse(self, reason, verdict="refused"):
        """Found, but not taken. Returns the site: Site(path, op, module).refuse("why")."""
        self.verdict, self.reason = verdict, reason
        return self

    def install(self, settings, handle):
        """Puts the replacement in place and enters it into the module's record."""
        self._install()
        record = record_of(self.module)
        if record is None:
            record = Record(self.module, settings, handle)
            setattr(self.module, RECORD, record)
        record.handle = handle
        record.sites[self.op] = self
        self.installed = self.active = True

    def undo(self):
        """Takes the replacement away; the module is as it was."""
        if not self.installed:
            return
        self.installed = False
        self.active = not self._remove()
        record = record_of(self.module)
        if record is not None and self.active:
            record.sites.pop(self.op, None)
            if not record.sites:
                delattr(self.module, RECORD)

    def repair(self):
        """Installs again what someone else removed."""
        if self.installed and not self.intact():
            self._install()

    def status(self):
        if self.verdict:
            return self.verdict
        if not self.installed:
            return "absent" if self.active else "inactive"
        return "installed" if self.intact() else "lost"

    def copy_to(self, module, memo):
        """The same site on a deep copy of its module."""
        twin = copy.copy(self)
        twin.module, twin.test = module, None
        return twin

    def _install(self):
        raise NotImplementedError

    def _remove(self):
        """Returns a true value if our function had to stay, because someone wrapped it."""
        raise NotImplementedError

    def intact(self):
        """Whether what was installed is still in force."""
        return True

    def invalidate(self):
        """Forgets everything that was derived from weights."""

    def remarks(self):
        """The last cell of the report's row."""
        return self.reason

    def saved(self):
        """What stands for the site in a saved model; making it again there undoes what was saved with the model."""
        return None


@functools.cache
def _guarded(function, op, like):
    """The function that is bound to the module. Its name must be `forward`: torch.save then stores it by that name."""

    @functools.wraps(like)
    def forward(self, *args, **kwargs):
        site = self._tidegate.sites[op]
        if site.active:
            return function(self, *args, **kwargs)
        return site.base(self, *args, **kwargs)

    forward.__name__ = "forward"
    forward.tidegate = op
    return forward


_GUARD = _guarded(lambda self: None, "", lambda self: None).__code__


def is_our_forward(value, module):
    """Whether a value is a function of ours bound to a module, and not one that only took over its attributes."""
    function = getattr(value, "__func__", None)
    return getattr(function, "__code__", None) is _GUARD and value.__self__ is module


def is_bound(value, function, module):
    """Whether a value is a function, or one of ours for an op (a text), bound to a module."""
    if not isinstance(value, types.MethodType) or value.__self__ is not module:
        return False
    return value.__func__ is function or (isinstance(function, str) and getattr(value, "tidegate", None) == function)


def reaches(value, target, depth=4):
    """Whether a callable holds another one: as a partial, a closure or a wrapped function."""
    if value is target or value == target:
        return True
    if depth == 0:
        return False
    parts = [getattr(value, "__wrapped__", None), getattr(value, "__func__", None)]
    if isinstance(value, functools.partial):
        parts += [value.func, *value.args, *value.keywords.values()]
    for cell in getattr(value, "__closure__", None) or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # an empty cell
            continue
    return any(reaches(part, target, depth - 1) for part in parts if callable(part))


def own_forward(module):
    """The attribute that decides what a call of the module runs, and its value: MISSING if it is the class's forward.

    Accelerate's hooks put themselves into `forward` and keep what was there as `_old_forward`; we go beneath them.
    """
    name = "_old_forward" if hasattr(module, "_hf_hook") and "_old_forward" in module.__dict__ else "forward"
    value = module.__dict__.get(name, MISSING)
    if name == "forward" and is_bound(value, type(module).forward, module):
        return name, MISSING  # left by kernelize: nothing but the class's forward
    return name, value


def foreign_forward(module):
    """Who replaced a module's forward, or None: then it may be ours."""
    name, value = own_forward(module)
    if value is MISSING or (name == "_old_forward" and is_bound(value, type(module).forward, module)):
        return None
    function = getattr(value, "__func__", value)
    if getattr(function, "tidegate", None):
        return None
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(value).__name__)}"


class ForwardSite(Site):
    """Another forward on one instance. function(self, *args, **kwargs) is called with the module as self.

    `call_original(self, op, ...)` runs what the module did before, for functions that only wrap it.
    """

    def __init__(self, path, op, module, mechanism, function, **options):
        super().__init__(path, op, module, mechanism, **options)
        self.base = type(module).forward
        self.function = function
        self.bound = None  # the guarded function, known once it is installed
        self.before = {}

    @property
    def installed_function(self):
        return _guarded(self.function, self.op, type(self.module).forward)

    def _install(self):
        self.bound = self.installed_function
        if self.intact():  # someone who wrapped us still calls us
            return
        other = foreign_forward(self.module)
        if other is not None:
            raise PatchError(f"{self.path}: forward already replaced by {other}")
        name, _ = own_forward(self.module)
        self.before = {name: self.module.__dict__.get(name, MISSING)}
        setattr(self.module, name, types.MethodType(self.bound, self.module))

    def _remove(self):
        module = self.module
        name, value = own_forward(module)
        if is_bound(value, self.op, module):
            before = self.before.get(name, MISSING)
            if name == "_old_forward" and before is MISSING:  # the hook came after us
                before = types.MethodType(type(module).forward, module)
            if before is MISSING:
                delattr(module, name)
            else:
                setattr(module, name, before)
            return False
        return value is not MISSING and reaches(value, types.MethodType(self.bound, module))

    def intact(self):
        value = own_forward(self.module)[1]
        return is_bound(value, self.op, self.module) or (
            value is not MISSING and reaches(value, types.MethodType(self.bound, self.module))
        )

    def copy_to(self, module, memo):
        twin = super().copy_to(module, memo)
        rebind = lambda m: types.MethodType(m.__func__, module) if isinstance(m, types.MethodType) else m  # noqa: E731
        twin.before = {name: rebind(value) for name, value in self.before.items()}
        return twin


def call_original(module, op, *args, **kwargs):
    """What the module did before the site `op` was installed on it."""
    return module._tidegate.sites[op].base(module, *args, **kwargs)
