"""All options: one table of their environment names, and the typed object that the patch layer takes.

The environment beats an argument, an argument beats the default, and a switch that is off beats everything below it. A
name or a value that nobody knows is an error: a typing mistake must not leave the default in force.
"""

import dataclasses
import difflib
import os
from typing import NamedTuple

from tidegate.errors import OptionError

PREFIX = "TIDEGATE_"
WORDS = {word: value for value, words in ((True, "1 true on yes"), (False, "0 false off no")) for word in words.split()}


class Variable(NamedTuple):
    """An environment variable: the option it sets, how it is read, and the switch above it."""

    name: str
    option: str
    kind: str  # switch, tristate (on, off or unset) or text (read by whoever uses it)
    above: str | None = None


def _switches(above, options):
    return [Variable(PREFIX + option.upper(), option, "switch", above) for option in options.split()]


VARIABLES = (
    Variable("TIDEGATE_PATCH", "enabled", "switch"),
    *_switches("enabled", "fused_ops discovery"),
    *_switches("fused_ops", "gdn rmsnorm gated_rmsnorm rope swiglu attention linear moe"),
    *_switches("gdn", "gdn_layer"),
    Variable("TIDEGATE_GDN_CHUNK", "gdn_chunk", "switch", "gdn"),
    Variable("TIDEGATE_GDN_RECURRENT", "gdn_recurrent", "switch", "gdn"),
    Variable("TIDEGATE_GDN_CONV", "gdn_conv", "switch", "gdn"),
    *_switches("moe", "router sparse_moe gmm moe_cache"),
    Variable("TIDEGATE_GATED_RMSNORM_FP32", "gated_rmsnorm_fp32", "switch"),
    Variable("TIDEGATE_PADDING_FREE", "padding_free", "tristate"),
    *_switches(None, "strict check require_native force_fallback"),
    Variable("TIDEGATE_NODE_ID", "node_id", "text"),
    Variable("TIDEGATE_ISA", "isa", "text"),
    Variable("TIDEGATE_NUM_THREADS", "num_threads", "text"),
)
BY_NAME = {variable.name: variable for variable in VARIABLES}
BY_OPTION = {variable.option: variable for variable in VARIABLES}


@dataclasses.dataclass(frozen=True)
class PatchOptions:
    """What tidegate.patch may install. `on(option)` also asks the switches above it; `sources` says who set what."""

    enabled: bool = True
    fused_ops: bool = True
    gdn: bool = True
    gdn_layer: bool = True  # off: the model's own layer code around our operators
    gdn_chunk: bool = True
    gdn_recurrent: bool = True
    gdn_conv: bool = True
    rmsnorm: bool = True
    gated_rmsnorm: bool = True
    gated_rmsnorm_fp32: bool = False  # one rounding instead of Transformers' three
    rope: bool = True
    swiglu: bool = True
    attention: bool = True
    linear: bool = True  # taken only where torch is slower
    moe: bool = True
    router: bool = True
    sparse_moe: bool = True
    gmm: bool = True
    moe_cache: bool = False  # doubles the memory of the experts, so it is asked for
    discovery: bool = True
    padding_free: bool | None = None
    strict: bool = True
    check: bool = True
    sources: dict = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            allowed = (True, False, None) if field.name == "padding_free" else (True, False)
            if field.name != "sources" and not any(value is word for word in allowed):
                raise OptionError(f"option {field.name}: expected one of {allowed}, got {value!r}")

    def on(self, option: str | None) -> bool:
        """Whether an option and all switches above it are on."""
        while option is not None:
            if not getattr(self, option):
                return False
            option = BY_OPTION[option].above
        return True

    def why_off(self, option: str | None) -> str | None:
        """The switch that keeps an option off, and who set it; None if it is on."""
        found = None
        while option is not None:
            if not getattr(self, option):
                found = option  # the topmost one decides
            option = BY_OPTION[option].above
        return found and f"{found} is off ({self.sources.get(found, 'default')})"


OPTIONS = tuple(field.name for field in dataclasses.fields(PatchOptions) if field.name != "sources")


def nearest(name, known):
    """A hint for a mistyped name: "; did you mean ...?", or "" if nothing is close. Equally close: the longer start."""

    def score(word):
        return difflib.SequenceMatcher(None, name, word).ratio(), len(os.path.commonprefix([name, word]))

    best = max(known, key=score)
    return f"; did you mean {best}?" if score(best)[0] >= 0.6 else ""


def parse_switch(name, text):
    """True or False from the text of an environment variable."""
    value = WORDS.get(text.strip().lower())
    if value is None:
        hint = nearest(text.strip().lower(), WORDS)
        raise OptionError(f"{name}: expected 1/true/on/yes or 0/false/off/no, got {text!r}{hint}")
    return value


def check_environment(environ=None):
    """Raises OptionError for a variable with our prefix that nobody reads."""
    for name in environ if environ is not None else os.environ:
        if name.startswith(PREFIX) and name not in BY_NAME:
            raise OptionError(f"unknown environment variable {name}{nearest(name, BY_NAME)}")


def environment(option, environ=None):
    """What the environment says about one option: True or False (switches), a str (text), or None if it is not set."""
    variable = BY_OPTION[option]
    text = (environ if environ is not None else os.environ).get(variable.name, "")
    if not text.strip():
        return None
    return text if variable.kind == "text" else parse_switch(variable.name, text)


def flag(option, environ=None):
    """A switch of the environment alone, for code that runs at import: off if it is not set."""
    return bool(environment(option, environ))


def check_native_flags(environ=None):
    """TIDEGATE_REQUIRE_NATIVE and TIDEGATE_FORCE_FALLBACK contradict each other."""
    if flag("require_native", environ) and flag("force_fallback", environ):
        raise OptionError("TIDEGATE_REQUIRE_NATIVE and TIDEGATE_FORCE_FALLBACK are both on: unset one of them")


def resolve(options=None, environ=None, **arguments):
    """The options in force, from a PatchOptions, a dict or None, and single options (None: not given)."""
    check_environment(environ)
    check_native_flags(environ)
    if options is None or isinstance(options, dict):
        values = dict(options or {})
    elif isinstance(options, PatchOptions):
        defaults = PatchOptions()
        values = {name: getattr(options, name) for name in OPTIONS if getattr(options, name) != getattr(defaults, name)}
    else:
        raise OptionError(f"options: expected PatchOptions or dict, got {type(options).__name__}")
    for name in values:
        if name not in OPTIONS:
            raise OptionError(f"unknown option {name!r}{nearest(name, OPTIONS)}")
    values |= {name: value for name, value in arguments.items() if value is not None}
    sources = dict.fromkeys(values, "argument")
    for name in OPTIONS:
        value = environment(name, environ)
        if value is not None:
            values[name], sources[name] = value, BY_OPTION[name].name
    return PatchOptions(**values, sources=sources)
