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


def dicts(model):
    return [set(module.__dict__) for module in model.modules()]


def traceable(model):
    """Skips where the model around our layers branches on values of tensors."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if tiny.accepts(tiny.linear_layers(model)[0], "cache_position"):
        pytest.skip("models of this Transformers cannot be one graph")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_fullgraph(backend):
    """One graph for all lengths; patching otherwise afterwards is seen."""
    expected, patched = pair("qwen3_5", layers=2)
    traceable(expected)
    step = torch.compile(lambda ids: patched(ids, use_cache=False).logits, fullgraph=True, backend=backend)
    counter = torch._dynamo.utils.counters["stats"]
    lengths = (20, 33, 40, 65, 70) if backend == "aot_eager" else (33,)  # of five at most one compiles again
    with torch.no_grad():
        for length in lengths:
            ids = tiny.tokens(2, length)
            assert tiny.relative(step(ids), tiny.logits(expected, ids)) < T32
    graphs = counter["unique_graphs"]
    assert graphs <= 2  # the first length, then any
    if backend == "aot_eager":  # another patch is another graph; the engine's tests do the same with undo
        tidegate.patch(patched, options={"gdn_layer": False}, replace=True)
        with torch.no_grad():
            assert tiny.relative(step(ids), tiny.logits(expected, ids)) < T32
        assert counter["unique_graphs"] > graphs


def test_compiled_training_step():
    patched, ids = tiny.build("qwen3_5", layers=2), tiny.tokens(2, 40)
    traceable(patched)
    tidegate.patch(patched)
    loss, wanted = tiny.gradients(patched, ids, use_cache=False)
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    again, _ = tiny.gradients(compiled, ids, use_cache=False)
    wrong = {n: tiny.relative(p.grad, wanted[n]) for n, p in patched.named_parameters()}
    assert abs(loss - again) < T32 * loss and not {n: e for n, e in wrong.items() if e > T32}


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


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "original"])
def test_lora(fused):
    """Adapters on the projections of patched layers train as on stock ones."""
    peft = pytest.importorskip("peft")
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
    peft = pytest.importorskip("peft")
    from packed_case import batch_of, packs, separate, together

    ids, batch = batch_of((9, 0, 31))
    for first in (True, False):
        model = tiny.build("qwen3_5", layers=2)
        config = peft.LoraConfig(r=4, target_modules=["in_proj_qkv", "out_proj", "q_proj"], init_lora_weights=False)
        if first:
            tidegate.patch(model)
        torch.manual_seed(3)
        wrapped = peft.get_peft_model(model, config)
        tidegate.patch(wrapped)
        if not packs(wrapped):
            pytest.skip("this release cannot be packed")
        got, want = together(wrapped, ids, **batch), separate(wrapped, (9, 0, 31))
        assert tiny.relative(got[0], want[0]) < T32 and abs(got[1] - want[1]) < T32 * want[1]
        assert got[2].keys() == want[2].keys() and all("lora" in name for name in got[2])
        assert all(tiny.relative(got[2][name], value) < T32 for name, value in want[2].items())


def test_undo_under_adapters_and_in_copies():
    """Every bit and every attribute is back, also where the model was wrapped or copied while it was patched."""
    peft = pytest.importorskip("peft")
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


def test_wrappers_give_one_report():
    import types

    model = tiny.build("qwen3_5", layers=2)
    rows = list(tidegate.patch(model).report())
    tidegate.unpatch(model)
    for wrap in (lambda m: m, lambda m: types.SimpleNamespace(model=m), lambda m: torch.compile(m, backend="eager")):
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


SWITCHES = {  # variable -> the ops that are not installed when it is off
    "TIDEGATE_GDN": {"gdn_layer"},
    "TIDEGATE_RMSNORM": {"rmsnorm"},
    "TIDEGATE_GATED_RMSNORM": {"gated_rmsnorm"},
    "TIDEGATE_ROPE": {"rope"},
    "TIDEGATE_ATTENTION": {"attention"},
    "TIDEGATE_MOE": {"experts"},
    "TIDEGATE_GMM": {"experts"},
    # What has no place of its own yet, or none in this model.
    "TIDEGATE_SWIGLU": set(),
    "TIDEGATE_ROUTER": set(),
    "TIDEGATE_SPARSE_MOE": set(),
    "TIDEGATE_LINEAR": set(),
    "TIDEGATE_DISCOVERY": set(),
}


@pytest.fixture(scope="module")
def experts_model():
    """A model with a place for every op, and the ops that are installed when nothing is off."""
    model = tiny.build("qwen3_5_moe", layers=2)
    with tidegate.patch(model) as handle:
        ops = {site.op for site in handle.installed}
    wanted = {"gdn_layer", "gated_rmsnorm", "rmsnorm", "rope", "attention", "packed", "experts"}
    assert ops == wanted - ({"experts"} if tidegate.isa() == "fallback" else set())
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
