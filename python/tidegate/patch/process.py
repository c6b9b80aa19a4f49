"""patch() for the whole process: the functions that the modeling files of Transformers call, replaced in those files.

Every model of a family is served, whenever it was made. The forwards of its layers stay, only the operators in them are
ours. That of its text model looks at the input first, so that packed samples are kept apart or refused; hooked.py takes
care of models whose forward someone had replaced before.
"""

import functools
import gc
import importlib
import importlib.util
import sys

from tidegate.errors import NothingPatchedError, PatchConflictError
from tidegate.packed.sites import PACKED, text_forward
from tidegate.packed.support import stock_refusal
from tidegate.patch import gdn_ops
from tidegate.patch.code import attribute_names
from tidegate.patch.gdn_families import FAMILIES, family_of
from tidegate.patch.gdn_original import AttributeSite, attributes_of
from tidegate.patch.handle import PatchHandle
from tidegate.patch.hooked import hooked_models
from tidegate.patch.resolve import named_modules
from tidegate.patch.site import MISSING, Site, foreign_forward, reaches, record_of

# How older modeling files, whose layers copy the functions when they are made, call what others name torch_...
OLDER = {
    "torch_chunk_gated_delta_rule": "chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule": "fused_recurrent_gated_delta_rule",
}
_handle = None


class GlobalsSite(Site):
    """Global functions of a modeling file. `module` is the file's Python module."""

    def __init__(self, path, module, functions):
        super().__init__(path, "gdn_layer", module, "H:globals", reason=", ".join(functions))
        self.functions, self.before = functions, {}

    def _install(self):
        for name, function in self.functions.items():
            if self.module.__dict__.get(name) is not function:
                self.before[name] = self.module.__dict__.get(name, MISSING)
                setattr(self.module, name, function)

    def _remove(self):
        for name, value in self.before.items():
            if self.module.__dict__.get(name) is self.functions[name]:  # else someone else's, to be left alone
                delattr(self.module, name) if value is MISSING else setattr(self.module, name, value)
        self.before = {}
        return False

    def intact(self):
        return all(self.module.__dict__.get(name) is function for name, function in self.functions.items())


class TextModelSite(Site):
    """The forward of a class of text models. `module` is the class."""

    def __init__(self, path, cls, options):
        super().__init__(path, PACKED, cls, "H:class")
        original = self.original = cls.__dict__["forward"]
        refusal = functools.partial(stock_refusal, options=options)
        self.looking_at = functools.partial(text_forward, options.padding_free, refusal)
        looking = self.looking_at(original)

        @functools.wraps(original)
        def forward(text_model, *args, **kwargs):
            record = record_of(text_model)
            own = None if record is None else record.sites.get(PACKED)
            looked = own is not None and own.active  # it is patched itself, which is more than we can do for it here
            return (looking if self.installed and not looked else original)(text_model, *args, **kwargs)

        self.function = forward

    def _install(self):
        if not self.intact():
            self.module.forward = self.function

    def _remove(self):
        if self.module.__dict__["forward"] is not self.function:
            return self.intact()
        self.module.forward = self.original
        return False

    def intact(self):
        return reaches(self.module.__dict__["forward"], self.function)


def process_handle():
    """The handle of the patch of the process, or None."""
    return _handle if _handle is not None and _handle.installed else None


def _file(family):
    """The modeling file of a family as a module, or None if this Transformers does not have it."""
    name = f"transformers.models.{family}.modeling_{family}"
    if name not in sys.modules and importlib.util.find_spec("transformers") is None:
        return None
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _text_models(file):
    """The classes of a modeling file whose instances own the embeddings and the layers of a text model."""
    classes = [value for value in vars(file).values() if isinstance(value, type) and "forward" in value.__dict__]
    return [cls for cls in classes if {"embed_tokens", "layers"} <= attribute_names(cls.__init__)]


def _sites(family, options):
    file = _file(family)
    if file is None:
        return []
    functions = gdn_ops.replacements(options)
    models = [TextModelSite(f"{file.__name__}.{cls.__name__}", cls, options) for cls in _text_models(file)]
    models += [site for parent in models for site in hooked_models(family, parent)]
    if all(name in file.__dict__ for name in OLDER.values()):  # layers copy what they call when they are made
        renamed = {OLDER.get(name, name): function for name, function in functions.items()}
        renamed = {name: function for name, function in renamed.items() if name in file.__dict__}
        made = [
            value for value in gc.get_objects() if type(value).__module__ == file.__name__ and hasattr(value, "A_log")
        ]
        sites = [
            AttributeSite(f"{family} layer {layer.layer_idx}", "gdn_layer", layer, "J:attributes", attributes)
            for layer in made
            if record_of(layer) is None
            and foreign_forward(layer) is None
            and (attributes := attributes_of(layer, functions))
        ]
        return [GlobalsSite(file.__name__, file, renamed), *sites, *models]
    here = {name: function for name, function in functions.items() if name in file.__dict__}
    return [GlobalsSite(file.__name__, file, here), *models] if here else []


def patch_process(root, settings, replace):
    """The handle of the process; there is one. With a model: only the families in it, and those of calls before."""
    global _handle
    options, families = settings.options, FAMILIES
    if root is not None:
        families = tuple(dict.fromkeys(f for _, module in named_modules(root) if (f := family_of(module)) is not None))
    if _handle is not None and _handle.installed:
        changes = "; ".join(_handle.settings.differences(settings))
        if changes and not replace:
            raise PatchConflictError(f"the process is already patched with other settings ({changes})")
        if changes:
            _handle.undo()
        else:
            _handle.repair()
            families = [family for family in families if family not in _handle.families]
            if not families:
                return _handle
    if not options.on("gdn"):
        return PatchHandle(None, settings, notes=[f"nothing is installed: {options.why_off('gdn')}"])
    sites = [site for family in families for site in _sites(family, options)]
    if not sites and options.strict:
        raise NothingPatchedError(f"no modeling file of {', '.join(FAMILIES)} found: is Transformers installed?")
    if _handle is None or not _handle.installed:
        _handle = PatchHandle(None, settings)
        _handle.families = set()
    _handle.sites += sites
    _handle.install()
    _handle.families.update(families)
    return _handle
