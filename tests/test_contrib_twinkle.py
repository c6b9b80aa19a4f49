"""twinkle's kernelize with our backend: the whole model by one entry, or function by function."""

import pytest
import torch
from packed_case import packs
from test_patch_models import on_torch, stock
from tiny_models import build, linear_layers, logits, relative, tokens

import tidegate

kernel = pytest.importorskip("twinkle.kernel", reason="twinkle-kit is not installed", exc_type=ImportError)
pytest.importorskip("transformers")
from tidegate.contrib import twinkle as bridge  # noqa: E402


def steps(model, ids, **kwargs):
    """Losses of three training steps."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        loss = model(ids, **{"labels": ids, **kwargs}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses)


def test_kernelize_is_patch_with_undo():
    model, untouched, ids = build("qwen3_5"), stock("qwen3_5"), tokens()
    want = logits(untouched, ids)
    kernel.kernelize(model, bridge.mapping())
    report = bridge.handle(model).report()
    assert str(report).count("gdn_layer") >= len(linear_layers(model))
    assert relative(logits(model, ids), want) <= 1e-5
    assert bridge.handle(untouched) is None and torch.equal(logits(untouched, ids), want)
    bridge.handle(model).undo()
    assert torch.equal(logits(on_torch(model), ids), want)


def test_training_steps_are_those_of_the_model_alone():
    ids = tokens()
    plain, ours = stock("qwen3_5"), build("qwen3_5")
    kernel.kernelize(ours, bridge.mapping())
    assert relative(steps(ours, ids), steps(plain, ids)) <= 1e-5


def test_padding_free_training_has_the_losses_of_padded_training():
    """Samples of one length: padding-free is one packed row, the other way is a batch without any padding."""
    ids = tokens(2, 40)
    rows, packed = build("qwen3_5"), build("qwen3_5")
    for model in (rows, packed):
        kernel.kernelize(model, bridge.mapping())
    assert packs(packed)
    batch = tidegate.pack(list(ids))
    assert relative(steps(packed, batch.pop("input_ids"), **batch), steps(rows, ids)) <= 1e-5


def test_nothing_to_patch_is_an_error():
    with pytest.raises(tidegate.errors.NothingPatchedError):
        kernel.kernelize(torch.nn.Sequential(torch.nn.Linear(2, 2)), bridge.mapping())


def test_marker_stops_the_packed_patch_of_twinkle():
    """Its processor patches classes unless the model says that it is done."""
    model = build("qwen3_5")
    before = {type(layer): type(layer).forward for layer in linear_layers(model)}
    kernel.kernelize(model, bridge.mapping())
    assert model._twinkle_gdn_padding_free_patched and "_twinkle_gdn_padding_free_patched" not in model.state_dict()
    assert all(cls.forward is forward for cls, forward in before.items())
    bridge.handle(model).undo()


def test_functions_one_by_one():
    """As twinkle installs them: for the whole process, so this test puts the originals back itself."""
    import importlib

    model, ids = build("qwen3_5"), tokens()
    want = logits(stock("qwen3_5"), ids)
    if "chunk_gated_delta_rule" in linear_layers(model)[0].__dict__:  # releases whose layers keep the functions
        with pytest.raises(tidegate.errors.NothingPatchedError, match="by a global name: use mapping"):
            bridge.function_mapping(model)
        return
    mapping = bridge.function_mapping(model)
    assert {choice.backends for choice in mapping.values()} == {("cpu",)} and len(mapping) == 4
    places = [path.rpartition(".") for path in mapping]
    spaces = {path: vars(importlib.import_module(path)) for path, _, _ in places}
    originals = {(path, name): spaces[path][name] for path, _, name in places}
    calls = []
    try:
        kernel.kernelize(model, mapping)
        for (path, name), original in originals.items():
            ours = spaces[path][name]
            assert ours is not original

            def counted(*args, ours=ours, name=name, **kwargs):
                calls.append(name)
                return ours(*args, **kwargs)

            spaces[path][name] = counted
        assert relative(logits(model, ids), want) <= 1e-5
        assert calls.count("torch_chunk_gated_delta_rule") == len(linear_layers(model))
    finally:
        for (path, name), original in originals.items():
            spaces[path][name] = original


def test_cpu_platform():
    from twinkle.utils.platforms import Platform

    before = Platform.device_prefix()
    back = bridge.cpu_platform()
    assert Platform.device_prefix() == "cpu" and Platform.get_local_device() == "cpu"
    assert Platform.device_backend() == "gloo" and Platform.device_prefix("GPU") == "cuda"
    back()
    assert Platform.device_prefix() == before
