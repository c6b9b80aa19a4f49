"""The original code of a forward with other globals: what it calls is replaced for one instance, not for the module."""

import functools
import types


def parts(function):
    """A function and what its decorators wrap. Some decorators have no __wrapped__, so closures are looked at too."""
    seen, queue = set(), [function]
    while queue:
        value = queue.pop(0)
        if not isinstance(value, types.FunctionType) or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        queue.append(getattr(value, "__wrapped__", None))
        for cell in value.__closure__ or ():
            try:
                queue.append(cell.cell_contents)
            except ValueError:  # an empty cell
                continue


def that_names(function, names):
    """The function beneath the decorators of `function` whose code uses all these global names, or None."""
    for part in parts(function):
        if set(names) <= set(part.__code__.co_names) and all(name in part.__globals__ for name in names):
            return part
    return None


def global_names(function):
    """All names of globals that a function or what it wraps uses."""
    return {name for part in parts(function) for name in part.__code__.co_names if name in part.__globals__}


def attribute_names(function):
    """All names that a function or what it wraps uses, attributes included."""
    return {name for part in parts(function) for name in part.__code__.co_names}


def argument_names(function):
    """All names of arguments of a function and of what it wraps: a decorator may hide the real ones."""
    codes = [part.__code__ for part in parts(function)]
    return {name for code in codes for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}


def innermost(function):
    """The function beneath all decorators: of a function that prefers some package, the one in plain torch."""
    if not isinstance(function, types.FunctionType):  # `kernels` makes a module whose forward calls the function
        forward = getattr(type(function), "forward", None)
        function = next((part for part in parts(forward) if hasattr(part, "__wrapped__")), function)
    while isinstance(getattr(function, "__wrapped__", None), types.FunctionType):
        function = function.__wrapped__
    return function


@functools.cache
def _with_globals(function, replacements):
    names = [name for name, _ in replacements]
    assert set(names) <= set(function.__code__.co_names), names  # else the replacement would do nothing, silently
    twin = types.FunctionType(
        function.__code__,
        {**function.__globals__, **dict(replacements)},
        "forward",
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__module__ = function.__module__
    return twin


def with_globals(function, replacements):
    """A function with the code of another one and some of its globals replaced."""
    return _with_globals(function, tuple(sorted(replacements.items(), key=lambda item: item[0])))
