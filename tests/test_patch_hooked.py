"""patch() without a model, for text models that have a forward of their own: hooks, wrappers, kernelize."""

import copy
import functools
import types

import pytest
import torch

pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402
from packed_case import batch_of, separate  # noqa: E402
from test_patch_models import T32, on_torch, stock  # noqa: E402

import tidegate  # noqa: E402
from tidegate.errors import PackedInputError  # noqa: E402
from tidegate.packed import support  # noqa: E402


def hooked(model):
    """As accelerate's hooks leave a module; without a dependency on it."""
    module = model.model
    module._hf_hook, module._old_forward = object(), module.forward
    run = lambda module, *args, **kwargs: module._old_forward(*args, **kwargs)  # noqa: E731
    module.forward = functools.update_wrapper(functools.partial(run, module), module._old_forward)
    return model


def test_a_model_hooked_under_a_patch_that_is_gone():
    """Its hook still calls our function, which must do nothing then."""
    ids, batch = batch_of((24, 40))
    call = dict(position_ids=batch["position_ids"], use_cache=False)
    model = tiny.build("qwen3_5")
    with tidegate.patch(padding_free=True):
        hooked(model)
    assert torch.equal(tiny.logits(model, ids), tiny.logits(stock("qwen3_5"), ids))
    assert torch.equal(tiny.logits(model, ids, **call), tiny.logits(stock("qwen3_5"), ids, **call))


def bound(model):
    """As kernelize leaves a module."""
    model.model.forward = types.MethodType(type(model.model).forward, model.model)
    return model


def wrapped(model):
    forward = model.model.forward
    model.model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    return model


def hooked_under_another_patch(model):
    with tidegate.patch(padding_free=True):
        return hooked(model)


@pytest.mark.parametrize("change", [hooked, bound, wrapped, hooked_under_another_patch])
def test_a_text_model_with_a_forward_of_its_own(change):
    """A call of it does not ask its class: it is found, served, and left as it was, with its own patch on it or not."""
    lengths, model = (24, 40), change(tiny.build("qwen3_5"))
    (ids, batch), attributes = batch_of(lengths), dict(vars(model.model))
    takes = support.hands_keywords_on(model.model.layers[0])
    with tidegate.patch() as handle:
        assert [r for r in handle.report().only(op="packed", status="installed") if r.path == "qwen3_5 text model"]
        for one in (model, copy.deepcopy(model)) if change is not wrapped else (model,):
            want = separate(one, lengths)[0]
            with pytest.raises(PackedInputError, match="restart at token 24"):
                one(ids, position_ids=batch["position_ids"], use_cache=False)
            for arguments in ({"cu_seq_lens_q": batch["cu_seq_lens_q"]}, batch):
                if takes:
                    assert tiny.relative(tiny.logits(one, ids, **arguments)[0], want) < T32
                else:
                    with pytest.raises(PackedInputError, match="keep the boundaries"):
                        one(ids, **arguments)
    assert dict(vars(model.model)) == attributes
    call = dict(position_ids=batch["position_ids"], use_cache=False)
    assert torch.equal(tiny.logits(on_torch(model), ids, **call), tiny.logits(stock("qwen3_5"), ids, **call))


@pytest.mark.parametrize("change", [hooked, bound])
@pytest.mark.parametrize("last", ["model", "process"])
def test_a_hooked_model_with_a_patch_of_its_own(change, last):
    (ids, batch), model = batch_of((24, 40)), change(tiny.build("qwen3_5"))
    attributes = dict(vars(model.model))
    own, process = tidegate.patch(model), tidegate.patch()
    assert tiny.logits(model, ids, **batch).isfinite().all()
    (process if last == "model" else own).undo()
    with pytest.raises(PackedInputError, match="restart at token 24"):
        model(ids, position_ids=batch["position_ids"])
    (own if last == "model" else process).undo()
    assert dict(vars(model.model)) == attributes


def test_a_hooked_model_that_loses_our_forward():
    (ids, batch), model = batch_of((24, 40)), wrapped(tiny.build("qwen3_5"))
    theirs = model.model.forward
    with tidegate.patch() as handle:
        model.model.forward = theirs
        assert [row.path for row in handle.report().only(status="lost")] == ["qwen3_5 text model"]
        assert tidegate.patch() is handle and not handle.report().only(status="lost")
        with pytest.raises(PackedInputError, match="restart at token 24"):
            model(ids, position_ids=batch["position_ids"])
    assert model.model.forward is theirs


def test_hooks_of_accelerate():
    accelerate = pytest.importorskip("accelerate")
    ids, batch = batch_of((24, 40))
    offloaded, dispatched, prepared = (tiny.build("qwen3_5") for _ in range(3))
    accelerate.cpu_offload(offloaded.model, execution_device=torch.device("cpu"))
    accelerate.dispatch_model(dispatched, device_map={"model": "cpu", "lm_head": "cpu"}, force_hooks=True)
    accelerate.state.AcceleratorState._reset_state()  # one a process, whatever an earlier test asked for
    accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(prepared.model)
    accelerate.state.AcceleratorState._reset_state()
    with tidegate.patch():
        for model in (offloaded, dispatched, prepared):
            with pytest.raises(PackedInputError, match="restart at token 24"):
                model(ids, position_ids=batch["position_ids"])
        accelerate.hooks.remove_hook_from_module(dispatched.model)
        with pytest.raises(PackedInputError, match="restart at token 24"):
            dispatched(ids, position_ids=batch["position_ids"])
