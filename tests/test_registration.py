"""tidegate.register(): names in other packages' registries that change nothing until they are selected."""

import pytest
import torch

pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402
from test_patch_models import stock  # noqa: E402

import tidegate  # noqa: E402


@pytest.fixture(autouse=True)
def registered():
    yield tidegate.register()
    tidegate.unregister()


def test_report_names_every_registry(registered):
    registries = {"flash-linear-attention", "kernels", "attention of Transformers", "experts of Transformers"}
    assert set(registered) == registries
    assert tidegate.register() is registered and len(str(registered).splitlines()) == len(registries)


def test_registering_changes_no_model():
    tidegate.unregister()
    model, ids = tiny.build("qwen3_5"), tiny.tokens()
    try:
        want = tiny.logits(model, ids)
    except RuntimeError as error:  # a package for GPUs is installed
        pytest.skip(str(error))
    tidegate.register()
    assert torch.equal(tiny.logits(model, ids), want) and torch.equal(tiny.logits(tiny.build("qwen3_5"), ids), want)


def select(model, name):
    if any(hasattr(module, "has_gate") for module in model.modules()):
        model.set_experts_implementation(name)
    else:  # in Transformers 5.2 the method knows three names only
        model.config._experts_implementation = name


def test_experts_by_name(monkeypatch):
    """A model that is not patched runs our experts once their name is selected, and no longer when another is."""
    from tidegate import moe

    calls, real = [], moe.moe_experts
    monkeypatch.setattr(moe, "moe_experts", lambda *args, **kwargs: calls.append(0) or real(*args, **kwargs))
    model, ids = stock("qwen3_5_moe", layers=2), tiny.tokens()
    want = tiny.logits(model, ids)
    select(model, "tidegate")
    assert tiny.relative(tiny.logits(model, ids), want) <= 1e-5 and len(calls) == 2
    assert "tidegate" not in model.config.to_json_string()
    select(model, "eager")
    assert tiny.relative(tiny.logits(model, ids), want) <= 1e-5 and len(calls) == 2


def test_kernels_select_our_layer(registered):
    pytest.importorskip("kernels")
    model, ids = tiny.build("qwen3_5"), tiny.tokens()
    layers = tiny.linear_layers(model)
    if getattr(type(layers[0]), "kernel_layer_name", None) is None or not hasattr(model, "set_use_kernels"):
        pytest.skip("this Transformers has no name for the layer")
    patched = tiny.build("qwen3_5")
    tidegate.patch(patched, ops="gdn_layer")
    try:
        model.set_use_kernels(True)
    except (ImportError, ValueError) as error:
        pytest.skip(f"this Transformers wants another release of kernels: {error}")
    assert all("layer_class" in layer.forward.__qualname__ for layer in layers)
    assert tiny.relative(tiny.logits(model, ids), tiny.logits(patched, ids)) <= 1e-5
