"""Loads the native library and hands its operators out with Python's exception types.

`torch.ops.tidegate.<name>` raises every failed check as RuntimeError (torch 2.10: ValueError), because torch knows no
other way for an operator of the stable ABI. `tidegate.ops.<name>` is the same operator with the same arguments; there
the text arrives as ValueError, or as TypeError when it is about a dtype.
"""

import importlib.metadata
import pathlib
import re
import warnings

import torch

from tidegate import options
from tidegate.errors import TidegateFallbackWarning

try:
    __version__ = importlib.metadata.version("tidegate")
except importlib.metadata.PackageNotFoundError:  # a source tree on the path
    __version__ = "0+unknown"

library_path = pathlib.Path(__file__).parent / "_tidegate.so"
load_error = None

fallback = None  # why the operators run in plain torch; None: they do not
REINSTALL = "reinstall tidegate for this torch and CPU (pip install --force-reinstall --no-deps tidegate)"


def _use_fallback(cause, remedy):
    global fallback
    from tidegate import fallback as plain

    fallback = cause
    plain.install(__version__)
    warnings.warn(plain.warning(cause, remedy), TidegateFallbackWarning, stacklevel=2)


options.check_native_flags()
if options.flag("force_fallback"):
    load_error = "TIDEGATE_FORCE_FALLBACK is set"
    _use_fallback(load_error, "unset TIDEGATE_FORCE_FALLBACK")
else:
    try:
        torch.ops.load_library(str(library_path))
    except (OSError, RuntimeError) as error:
        load_error = f"{library_path}: {error.__cause__ or error}"
        if not options.flag("require_native"):
            _use_fallback(f"the native library is not loaded: {load_error}", REINSTALL)
if load_error is None or fallback is not None:
    try:
        import tidegate._autograd  # noqa: F401  (imports the fake kernels too)
    except AttributeError as error:
        # Its operators are registered by now and cannot be defined again, so there is no way around it.
        raise ImportError(f"{library_path} is of another version of tidegate ({error}): {REINSTALL}") from error
    import tidegate._autograd_moe  # noqa: F401


def require():
    """Raises if there are no operators: the native library is not there and TIDEGATE_REQUIRE_NATIVE is set."""
    if load_error is not None and fallback is None:
        raise RuntimeError(
            f"tidegate: the native library is not loaded: {load_error}. TIDEGATE_REQUIRE_NATIVE forbids the "
            f"fallback in plain torch: unset it, or {REINSTALL}"
        )


NATIVE_ERRORS = (RuntimeError, ValueError)


def _translate(error, op=""):
    """The exception to raise instead of one that comes from a check of ours or of torch's call, or None."""
    # Torch appends its own trace in some builds; a check's text is one line "<op>: <tensor>: expected ..., got ...".
    line = str(error).split("\n", 1)[0]
    if ": expected " in line and ", got " in line:
        return (TypeError if ": expected dtype " in line else ValueError)(line)
    wrong = re.search(r"Expected a value of type '(.*)' for argument '(.*)' but instead found type '(.*)'", line)
    if wrong:
        expected, argument, got = wrong.groups()
        return TypeError(f"{op}: {argument}: expected type {expected}, got type {got}")
    if isinstance(error, NotImplementedError) and "no tensor arguments" in line:
        return ValueError(f"{op}: expected at least one tensor, got none")
    return None


def translated(error):
    """The exception to raise for one that an operator may have thrown: ours if there is one, else the same."""
    return isinstance(error, NATIVE_ERRORS) and _translate(error) or error


class _Operator:
    def __init__(self, name, overload="default"):
        self._name = name
        self._call = getattr(getattr(torch.ops.tidegate, name), overload)
        self._eager = tidegate._autograd.direct.get(self._call, self._call)
        if overload == "default" and "out" in getattr(torch.ops.tidegate, name).overloads():
            self.out = _Operator(name, "out")  # the form that writes into tensors given by keyword

    def __call__(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return self._call(*args, **kwargs)
        try:
            return self._eager(*args, **kwargs)
        except NATIVE_ERRORS as error:
            translated = _translate(error, self._name)
            if translated is None:
                raise
            raise translated from None


class _Operators:
    """Attribute access to every operator: tidegate.ops.l2norm_fwd(x)."""

    def __getattr__(self, name):
        require()
        try:
            operator = _Operator(name)
        except AttributeError:
            raise AttributeError(f"tidegate.ops has no operator {name!r}") from None
        setattr(self, name, operator)
        return operator


ops = _Operators()
if load_error is None or fallback is not None:  # made now: torch.compile cannot trace the making of one
    for _name in tidegate._autograd.names:
        getattr(ops, _name)


def _about():
    require()
    version, active, available = torch.ops.tidegate.about().split(";")
    return version, active, available.split(",")


def isa() -> str:
    """The instruction set in use: scalar, avx2, avx512 or avx512_bf16; or fallback, if there is no native library."""
    try:
        return _about()[1]
    except NATIVE_ERRORS as error:
        raise _translate(error) or error from None


def set_isa(name: str) -> None:
    """Uses another instruction set from now on (for tests and benchmarks). One that this CPU lacks is a ValueError."""
    require()
    try:
        torch.ops.tidegate.set_isa(name)
    except NATIVE_ERRORS as error:
        raise _translate(error) or error from None
