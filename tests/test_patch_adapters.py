"""Adapters of peft on patched models: training, packed batches, and the way back."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import tiny_models as tiny  # noqa: E402
from packed_case import batch_of, packs, separate, together  # noqa: E402
from test_patch_features import dicts  # noqa: E402
from test_patch_models import T32, on_torch, stock  # noqa: E402

import tidegate  # noqa: E402


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "original"])
def test_lora(fused):
    """Adapters on the projections of patched layers train as on stock ones."""
    targets = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]
    losses = []
    for model in (stock("qwen3_5", layers=2), tiny.build("qwen3_5", layers=2)):
        torch.manual_seed(3)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, lora_alpha=8))
        if len(losses) == 1:
            handle = tidegate.patch(wrapped, options={"gdn_layer": fused})
            assert handle is tidegate.patch(model, options={"gdn_layer": fused})
            assert handle.report()[0].path == "model.layers.0.linear_attn"
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
        losses.append([])
        for i in range(3):
            optimizer.zero_grad()
            ids = tiny.tokens(2, 30, seed=i)
            loss = wrapped(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.detach())
    assert tiny.relative(torch.stack(losses[1]), torch.stack(losses[0])) < T32
    handle.undo()
    assert not tidegate.report(wrapped)


def test_lora_on_packed_batches():
    """Adapters, and a patch before or after them: a packed step has the loss and gradients of separate ones."""
    ids, batch = batch_of((9, 0, 31))
    for first in (True, False):
        model = tiny.build("qwen3_5", layers=2)
        config = peft.LoraConfig(r=4, target_modules=["in_proj_qkv", "out_proj", "q_proj"], init_lora_weights=False)
        if first:
            tidegate.patch(model)
        torch.manual_seed(3)
        wrapped = peft.get_peft_model(model, config)
        tidegate.patch(wrapped)
        assert packs(wrapped)
        got, want = together(wrapped, ids, **batch), separate(wrapped, (9, 0, 31))
        assert tiny.relative(got[0], want[0]) < T32 and abs(got[1] - want[1]) < T32 * want[1]
        assert got[2].keys() == want[2].keys() and all("lora" in name for name in got[2])
        assert all(tiny.relative(got[2][name], value) < T32 for name, value in want[2].items())


def test_undo_under_adapters_and_in_copies():
    """Every bit and every attribute is back, also where the model was wrapped or copied while it was patched."""
    ids, config = tiny.tokens(), dict(r=4, target_modules=["in_proj_qkv", "out_proj"], init_lora_weights=False)

    def wrapped(patched):
        model = tiny.build("qwen3_5", layers=2)
        handle = tidegate.patch(model) if patched else None
        torch.manual_seed(3)
        whole = peft.get_peft_model(model, peft.LoraConfig(**config))
        if patched:
            twin = copy.deepcopy(whole)
            handle.undo()
            assert tidegate.report(twin) and tidegate.unpatch(twin)
            assert dicts(twin) == dicts(whole)
        return dicts(whole), tiny.logits(on_torch(whole), ids)

    (names, want), (got_names, got) = wrapped(False), wrapped(True)
    assert got_names == names and torch.equal(got, want)
