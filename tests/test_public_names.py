"""Every public name has a docstring and says the types of its arguments and results: the package is py.typed."""

import inspect
import pathlib
import types
from functools import cached_property

import pytest

import tidegate
from tidegate import ep, errors, moe, parallel, quant
from tidegate.check.table import Report
from tidegate.parallel.plan import Shard
from tidegate.patch import PatchReport

MODULES = (tidegate, ep, errors, parallel)
MORE = (  # what public functions return, and the experts function of Transformers
    Report,
    Shard,
    PatchReport,
    quant.QuantizedExperts,
    quant.QuantizedModel,
    moe.experts_forward,
    moe.register_experts,
)


def public():
    """(name, function, class or module), of classes also their public methods and properties."""
    named = {f"{m.__name__}.{n}": getattr(m, n) for m in MODULES for n in getattr(m, "__all__", vars(m))}
    named |= {f"{value.__module__}.{value.__name__}": value for value in MORE}
    for name, value in named.items():
        if name.rpartition(".")[2].startswith("_") or isinstance(value, types.ModuleType):
            continue
        yield name, value
        if isinstance(value, type):
            yield from members(name, value)


def members(name, cls):
    for attribute, value in vars(cls).items():
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, cached_property):
            value = value.func
        value = inspect.unwrap(getattr(value, "__func__", value))
        if inspect.isfunction(value) and (attribute == "__init__" or not attribute.startswith("_")):
            yield f"{name}.{attribute}", value


PUBLIC = dict(public())


def unsaid(function):
    """What a signature does not say."""
    signature = inspect.signature(function)
    names = [p.name for p in signature.parameters.values() if p.annotation is p.empty and p.name not in ("self", "cls")]
    return names + (["return"] if signature.return_annotation is signature.empty else [])


@pytest.mark.parametrize("name", PUBLIC)
def test_says_what_it_is(name):
    value = PUBLIC[name]
    assert name.endswith("__init__") or (value.__doc__ or "").strip(), "no docstring"
    if inspect.isfunction(value):
        assert not unsaid(value)


def test_finds_what_is_not_said():
    def vague(self, x: int, y, *args, **kwargs):
        pass

    assert unsaid(vague) == ["y", "args", "kwargs", "return"]
    assert len(PUBLIC) > 150 and "tidegate.parallel.SpPlan.own" in PUBLIC and "tidegate.ep.Buffer.dispatch" in PUBLIC


def test_the_marker_is_there():
    assert (pathlib.Path(tidegate.__file__).parent / "py.typed").exists()
