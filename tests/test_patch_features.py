"""Patched models under torch.compile, checkpointing, hooks, saving, adapters and trainers."""

import copy
import io

import pytest
import torch

transformers = pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402
from test_patch_models import T32, on_torch, pair, stock  # noqa: E402

import tidegate  # noqa: E402
from tidegate.errors import NothingPatchedError, OptionError, PatchConflictError, PatchError  # noqa: E402
from tidegate.patch import Site  # noqa: E402


def dicts(model):
    return [set(module.__dict__) for module in model.modules()]


def traceable(model):
    """Skips where the model around our layers branches on values of tensors."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if tiny.accepts(tiny.linear_layers(model)[0], "cache_position"):
        pytest.skip("models of this Transformers cannot be one graph")


@pytest.mark.slow
def test_compiled_training_for_all_lengths():
    """One graph, of five lengths at most one compiles again; gradients are those of eager mode."""
    expected, patched = pair("qwen3_5", layers=2)
    traceable(expected)
    step = torch.compile(lambda ids: patched(ids, use_cache=False).logits, fullgraph=True, backend="aot_eager")
    for length in (20, 33, 40, 65, 70):
        ids = tiny.tokens(2, length)
        out = step(ids)
        assert tiny.relative(out, tiny.logits(expected, ids)) < T32
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # the first length, then any
    parameters, weights = list(patched.parameters()), torch.randn_like(out)
    got, wanted = (
        torch.autograd.grad((y * weights).sum(), parameters) for y in (out, patched(ids, use_cache=False).logits)
    )
    assert all(tiny.relative(one, other) < T32 for one, other in zip(got, wanted, strict=True))


@pytest.mark.slow
def test_compiled_by_inductor():
    expected, patched = pair("qwen3_5", layers=2)
    traceable(expected)
    ids = tiny.tokens(2, 33)
    with torch.no_grad():
        out = torch.compile(patched, fullgraph=True)(ids, use_cache=False).logits
    assert tiny.relative(out, tiny.logits(expected, ids)) < T32


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_bit(reentrant):
    _, patched = pair("qwen3_5", layers=2)
    ids = tiny.tokens(2, 70)
    patched.train()
    loss, plain = tiny.gradients(patched, ids, use_cache=False)
    patched.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again, checkpointed = tiny.gradients(patched, ids, use_cache=False)
    assert torch.equal(loss, again) and all(torch.equal(plain[n], checkpointed[n]) for n in plain)


def test_undo_leaves_nothing():
    model = tiny.build("qwen3_5_moe")
    before, values = dicts(model), copy.deepcopy(model.config.to_dict())
    parameters = {name: id(p) for name, p in model.named_parameters()}
    handle = tidegate.patch(model)
    model.train()
    model.eval()
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    handle.undo()
    assert dicts(model) == before and model.config.to_dict() == values
    ids = tiny.tokens()
    assert torch.equal(tiny.logits(on_torch(model), ids), tiny.logits(stock("qwen3_5_moe"), ids))


def test_a_failure_at_any_place_leaves_nothing(monkeypatch):
    """Sites of every kind, in a real model: the exception arrives, and nothing of the patch stays."""
    model = tiny.build("qwen3_5_moe", layers=2)
    before, values = dicts(model), copy.deepcopy(model.config.to_dict())
    with tidegate.patch(model, check="off") as handle:
        count, kinds = len(handle.installed), {type(site) for site in handle.installed}
    assert len(kinds) > 1
    real, left = Site.install, []

    def install(site, *args):
        left.pop()
        real(site, *args)
        if not left:
            raise MemoryError("planted")

    monkeypatch.setattr(Site, "install", install)
    for place in range(1, count + 1):
        left[:] = [0] * place
        with pytest.raises(MemoryError, match="planted"):
            tidegate.patch(model, check="off")
        assert dicts(model) == before and model.config.to_dict() == values and tidegate.report(model) == []
    ids = tiny.tokens()
    assert torch.equal(tiny.logits(on_torch(model), ids), tiny.logits(stock("qwen3_5_moe", layers=2), ids))


@pytest.mark.parametrize("hook_first", [True, False])
def test_accelerate_hooks(hook_first):
    hooks = pytest.importorskip("accelerate.hooks")
    _, reference = pair("qwen3_5", layers=2)
    model, ids, seen = tiny.build("qwen3_5", layers=2), tiny.tokens(), []
    layer = tiny.linear_layers(model)[0]

    class Counting(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(module)
            return args, kwargs

    if hook_first:
        hooks.add_hook_to_module(layer, Counting())
    handle = tidegate.patch(model)
    if not hook_first:
        hooks.add_hook_to_module(layer, Counting())
    hooks.add_hook_to_module(layer.conv1d, Counting())
    assert torch.equal(tiny.logits(model, ids), tiny.logits(reference, ids)) and seen == [layer, layer.conv1d]
    assert not handle.report().only(status="lost")
    handle.undo()
    assert hasattr(layer, "_hf_hook") and not tidegate.report(model)
    hooks.remove_hook_from_module(layer)
    assert layer.forward.__func__ is type(layer).forward


def test_saved_models_load_unpatched():
    patched, file = tiny.build("qwen3_5", layers=2), io.BytesIO()
    try:
        torch.save(patched, io.BytesIO())
    except AttributeError:  # with the kernels package
        pytest.skip("this Transformers cannot save whole models")
    tidegate.patch(patched)
    torch.save(patched, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert not tidegate.report(loaded) and all("_tidegate" not in str(k) for k in loaded.state_dict())
    assert tidegate.patch(loaded).installed


def test_wrappers_give_one_report():
    import types

    model = tiny.build("qwen3_5", layers=2)
    rows = list(tidegate.patch(model).report())
    tidegate.unpatch(model)
    ways = [lambda m: m, lambda m: types.SimpleNamespace(model=m), lambda m: torch.compile(m, backend="eager")]
    for wrap in (*ways, torch.nn.DataParallel):
        wrapped = wrap(model)
        assert list(tidegate.patch(wrapped).report()) == rows == list(tidegate.report(wrapped))
        assert tidegate.unpatch(wrapped)


def test_a_model_without_any_place():
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    with pytest.raises(NothingPatchedError, match="GPT2Attention"):
        tidegate.patch(model)
    with pytest.warns(UserWarning, match="found nothing") as seen:
        tidegate.patch(model, strict=False)
    assert len([w for w in seen if "tidegate" in str(w.message)]) == 1


def test_fp32_mode_of_the_gated_norm(monkeypatch):
    monkeypatch.setenv("TIDEGATE_GATED_RMSNORM_FP32", "1")
    _, patched = pair("qwen3_5", layers=2, dtype=torch.bfloat16)
    assert tidegate.report(patched).only(op="gated_rmsnorm")[0].reason == "rounding fp32"


def test_wrong_use():
    _, model = pair("qwen3_5", layers=2)
    with pytest.raises(PatchConflictError, match="rope: True -> False.*replace=True"):
        tidegate.patch(model, options={"rope": False})
    with pytest.raises(OptionError, match="did you mean gdn_layer"):
        tidegate.patch(model, ops=["gdn_layr"])
    with pytest.raises(TypeError, match="got str"):
        tidegate.patch("Qwen/Qwen3.5-0.8B")
    with pytest.raises(PatchError, match="got cuda"):
        tidegate.kernelize_model(model, device="cuda", use_fallback=False)
    layer = tiny.linear_layers(model)[0]
    with pytest.raises(ValueError, match="expected none with more than one row, got 2 rows|one row|rows"):
        layer(torch.randn(2, 8, 32), cu_seq_lens_q=torch.tensor([0, 8]))


def test_a_model_on_another_device(monkeypatch):
    from tidegate.patch import resolve

    monkeypatch.setattr(resolve, "foreign_device", lambda module: torch.device("cuda:0"))
    with pytest.raises(NothingPatchedError, match="cuda:0: move the model to the CPU"):
        tidegate.patch(tiny.build("qwen3_5", layers=2))


def test_meta_parameters_are_patched_unchecked():
    with torch.device("meta"):
        model = getattr(transformers, "Qwen3_5ForCausalLM")(tiny.config_of("qwen3_5", 2))  # noqa: B009
    rows = tidegate.patch(model).report().only(op="gdn_layer")
    assert rows[0].status in ("installed", "fallback") and rows[0].checked == "unchecked: meta"
