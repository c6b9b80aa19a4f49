"""Every environment variable of the patch layer: what it switches, and that the report names it."""

import pytest

pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402
from test_patch_models import T32, pair  # noqa: E402

import tidegate  # noqa: E402
from tidegate.errors import NothingPatchedError, OptionError  # noqa: E402

SWITCHES = {  # variable -> the ops that are not installed when it is off
    "TIDEGATE_GDN": {"gdn_layer"},
    "TIDEGATE_RMSNORM": {"rmsnorm"},
    "TIDEGATE_GATED_RMSNORM": {"gated_rmsnorm"},
    "TIDEGATE_ROPE": {"rope"},
    "TIDEGATE_ATTENTION": {"attention"},
    "TIDEGATE_MOE": {"experts", "router", "sparse_moe"},
    "TIDEGATE_GMM": {"experts", "sparse_moe"},
    "TIDEGATE_ROUTER": {"router"},
    "TIDEGATE_SPARSE_MOE": {"sparse_moe"},
    "TIDEGATE_SWIGLU": {"swiglu"},
    # What has no place of its own yet, or none in this model.
    "TIDEGATE_LINEAR": set(),
    "TIDEGATE_DISCOVERY": set(),
}


def sparse_block():
    """Older releases have another block, which is served part by part."""
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock as Block

    from tidegate.patch import sparse_moe, swiglu

    return {"sparse_moe"} if swiglu.shape(Block.forward.__code__) == sparse_moe.FORM else set()


@pytest.fixture(scope="module")
def experts_model():
    """A model with a place for every op, and the ops that are installed when nothing is off."""
    model = tiny.build("qwen3_5_moe", layers=2)
    with tidegate.patch(model) as handle:
        ops = {site.op for site in handle.installed}
    native = {"experts", "router", "swiglu", *sparse_block()}
    wanted = {"gdn_layer", "gated_rmsnorm", "rmsnorm", "rope", "attention", "packed"}
    assert ops == wanted | (set() if tidegate.isa() == "fallback" else native)
    return model, ops


@pytest.mark.parametrize("name", SWITCHES)
def test_environment_switches(monkeypatch, experts_model, name):
    model, ops = experts_model
    monkeypatch.setenv(name, "off")
    with tidegate.patch(model) as handle:
        assert {site.op for site in handle.installed} == ops - SWITCHES[name]
        assert f"= False ({name})" in str(handle.report())
    monkeypatch.setenv(name, "on")
    with tidegate.patch(model, options={name.removeprefix("TIDEGATE_").lower(): False}) as handle:  # who wins
        assert {site.op for site in handle.installed} == ops and f"= True ({name})" in str(handle.report())


def test_switches_above_all(monkeypatch, experts_model):
    model, _ = experts_model
    monkeypatch.setenv("TIDEGATE_GDN", "on")
    monkeypatch.setenv("TIDEGATE_FUSED_OPS", "off")
    with pytest.raises(NothingPatchedError, match="fused_ops is off"):
        tidegate.patch(model)
    monkeypatch.setenv("TIDEGATE_STRICT", "off")
    with pytest.warns(UserWarning, match="found nothing to patch"):
        assert not tidegate.patch(model).installed
    monkeypatch.setenv("TIDEGATE_PATCH", "off")
    handle = tidegate.patch(model)
    assert not handle.sites and "TIDEGATE_PATCH" in str(handle.report())


def test_settings_in_the_environment(monkeypatch, experts_model):
    model, _ = experts_model
    monkeypatch.setenv("TIDEGATE_CHECK", "off")
    monkeypatch.setenv("TIDEGATE_PADDING_FREE", "on")
    with tidegate.patch(model) as handle:
        assert handle.report().only(op="gdn_layer")[0].checked == "unchecked: check is off"
        assert "padding_free=on" in handle.report().only(op="packed")[0].reason
    for name, value, text in (("TIDEGATE_GDN", "flase", "did you mean false"), ("TIDEGATE_GDM", "1", "TIDEGATE_GDN")):
        with monkeypatch.context() as patched, pytest.raises(OptionError, match=text):
            patched.setenv(name, value)
            tidegate.patch(model)


@pytest.mark.parametrize("name", ["LAYER", "CHUNK", "RECURRENT", "CONV"])
def test_environment_switches_inside_the_layer(monkeypatch, name):
    name = f"TIDEGATE_GDN_{name}"
    monkeypatch.setenv(name, "0")
    expected, patched = pair("qwen3_5", layers=2)
    rows = tidegate.report(patched).only(op="gdn_layer")
    assert rows[0].mechanism[0] in "RJ" and name in rows[0].reason
    if "fla" not in report_packages() or name == "TIDEGATE_GDN_LAYER":  # what is off is the model's, which may crash
        ids = tiny.tokens()
        assert tiny.relative(tiny.logits(patched, ids), tiny.logits(expected, ids)) < T32


def report_packages():
    return tidegate.report().keys()
