"""Options and the environment: who wins, and that a typing mistake is an error."""

import re

import pytest

from tidegate import options
from tidegate.errors import OptionError


@pytest.mark.parametrize("name", options.OPTIONS)
@pytest.mark.parametrize("text, value", [("on", True), ("YES", True), ("0", False), (" False ", False)])
def test_every_switch_can_be_set(name, text, value):
    variable = options.BY_OPTION[name].name
    got = options.resolve({name: not value}, {variable: text})
    assert getattr(got, name) is value
    assert got.sources[name] == variable  # the environment wins and is named


@pytest.mark.parametrize(
    "environ, text",
    [
        ({"TIDEGATE_GDN": "flase"}, "TIDEGATE_GDN.*'flase'.*did you mean false"),
        ({"TIDEGATE_GDM": "1"}, "TIDEGATE_GDM.*did you mean TIDEGATE_GDN"),
        ({"TIDEGATE_NUM_THREAD": "1"}, "did you mean TIDEGATE_NUM_THREADS"),
        ({"TIDEGATE_REQUIRE_NATIVE": "1", "TIDEGATE_FORCE_FALLBACK": "on"}, "both on"),
    ],
)
def test_mistakes_in_the_environment(environ, text):
    with pytest.raises(OptionError, match=text):
        options.resolve(None, environ)


@pytest.mark.parametrize("given", [{"gdn_layr": True}, {"gdn": "off"}, {"strict": None}, 3, "gdn"])
def test_mistakes_in_arguments(given):
    with pytest.raises(OptionError):
        options.resolve(given, {})


def test_foreign_and_core_variables_pass():
    options.resolve(None, {"PATH": "x", "TIDEGATE_ISA": "avx2", "TIDEGATE_NUM_THREADS": "2", "TIDEGATE_NODE_ID": "a"})


def test_hierarchy():
    got = options.resolve({"gdn_layer": True}, {"TIDEGATE_FUSED_OPS": "off"})
    assert got.gdn_layer and not got.on("gdn_layer") and not got.on("gmm") and not got.on("rope")
    assert got.on("discovery")
    assert got.why_off("gdn_layer") == "fused_ops is off (TIDEGATE_FUSED_OPS)"
    got = options.resolve(None, {"TIDEGATE_PATCH": "0", "TIDEGATE_GDN": "1"})
    assert not any(got.on(name) for name in ("gdn", "rmsnorm", "router", "discovery"))
    assert options.resolve(None, {}).why_off("gdn") is None


def test_options_are_compared_without_their_sources():
    assert options.resolve({"gdn": False}, {}) == options.resolve(None, {"TIDEGATE_GDN": "off"})
    assert options.resolve(options.PatchOptions(gdn=False), {}).sources == {"gdn": "argument"}


def test_the_table_is_complete():
    assert {v.option for v in options.VARIABLES} >= set(options.OPTIONS)
    assert all(re.fullmatch("TIDEGATE_[A-Z0-9_]+", v.name) for v in options.VARIABLES)
