"""Unusual ways to use a patched model: parts and wholes, threads, processes without us, odd settings and inputs."""

import copy
import os
import pathlib
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402
from test_patch_models import T32, stock  # noqa: E402

import tidegate  # noqa: E402
from tidegate.errors import NothingPatchedError, PatchConflictError  # noqa: E402
from tidegate.patch import gdn_forward  # noqa: E402

INSTALLED = {"installed", "fallback"}


def small(**options):
    return tiny.build("qwen3_5", layers=2, **options)


def installed(model):
    return {(row.path, row.op) for row in tidegate.report(model) if row.status in INSTALLED}


def state(model):
    """Everything that a patch may touch."""
    return [{k: id(v) for k, v in module.__dict__.items()} for module in model.modules()]


# Parts and wholes


def test_a_part_first_then_the_whole():
    model, other = small(), small()
    before = state(model)
    part = tidegate.patch(model.model.layers[0])
    whole = tidegate.patch(model)
    tidegate.patch(other)
    assert installed(model) == installed(other) and whole is not part
    assert tidegate.patch(model) is whole and tidegate.patch(model.model.layers[0]) is whole
    part.undo()  # has nothing left to undo
    assert installed(model) == installed(other)
    whole.undo()
    assert state(model) == before


def test_two_parts_are_undone_with_the_whole():
    model = small()
    before, norms = state(model), [layer.input_layernorm for layer in model.model.layers]
    for norm in norms:
        tidegate.patch(norm)
    assert len(tidegate.report(model)) == 2
    with pytest.raises(PatchConflictError, match="rope: True -> False"):
        tidegate.patch(model, options={"rope": False})
    assert tidegate.unpatch(model) and state(model) == before
    handles = [tidegate.patch(norm) for norm in norms]
    tidegate.patch(model, options={"rope": False}, replace=True).undo()
    assert state(model) == before and not any(handle.installed for handle in handles)


def test_a_patched_layer_in_another_model():
    """A copy of a patched part does not pass for the patch of its new owner."""
    model, other = small(), small()
    tidegate.patch(model)
    other.model.layers[0] = copy.deepcopy(model.model.layers[0])
    handle = tidegate.patch(other)
    assert installed(other) == installed(model)
    handle.undo()
    assert not tidegate.report(other) and "forward" not in other.model.layers[0].linear_attn.__dict__


def test_a_replacement_that_fails_leaves_the_first_patch():
    model = small()
    handle = tidegate.patch(model)
    before = installed(model)
    with pytest.raises(NothingPatchedError):
        tidegate.patch(model, ops="experts", replace=True)
    assert installed(model) == before and tidegate.patch(model) is handle


def test_strictness_is_no_other_patch():
    """A trainer calls kernelize_model on what the user has patched."""
    model = small()
    handle = tidegate.patch(model)
    assert tidegate.kernelize_model(model, mode="train") is tidegate.kernelize_model(model, mode="train")
    assert tidegate.patch(model) is handle and str(handle.report()).count("mode: train") == 1


def test_two_families_for_the_process():
    first, second = (tiny.build(family, layers=2) for family in ("qwen3_5", "qwen3_next"))
    with tidegate.patch(first, scope="process") as handle:
        assert tidegate.patch(second, scope="process") is handle
        assert {"qwen3_5", "qwen3_next"} == {site.path.split(".")[2] for site in handle.sites if "." in site.path}
    assert not handle.installed


def test_undo_with_a_changed_config_and_two_names():
    """Experts and attention both have a name in the config; the user has changed something else meanwhile."""
    model = tiny.build("qwen3_5_moe", layers=2)
    names = ("_attn_implementation", "_experts_implementation")
    before = [getattr(model.config, name) for name in names]
    handle = tidegate.patch(model)
    model.config.use_cache = False
    handle.undo()
    for module in model.modules():
        if "config" in module.__dict__:
            assert [getattr(module.config, name) for name in names] == before and module.config.use_cache is False


# Threads and processes


def test_models_in_threads():
    """Each thread patches, runs and undoes a model of its own; they have one class and one config."""
    config, ids = tiny.config_of("qwen3_5", layers=2), tiny.tokens()
    models = [tiny.build("qwen3_5", config=config) for _ in range(4)]
    expected, results, errors = tiny.logits(stock("qwen3_5", layers=2), ids), [], []

    def work(model):
        try:
            for _ in range(3):
                with tidegate.patch(model):
                    results.append(tiny.logits(model, ids))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(results) == 12 and all(tiny.relative(r, expected) < T32 for r in results)
    assert all(model.config is config for model in models) and not any(tidegate.report(m) for m in models)


LOAD = """
import sys
sys.modules["tidegate"] = None  # cannot be imported
import torch
model = torch.load(sys.argv[1], weights_only=False)
print(model.config._attn_implementation, model.config._experts_implementation)
ids = torch.load(sys.argv[2])
try:
    torch.save(model(ids).logits, sys.argv[2])
except RuntimeError as error:
    assert "driver" in str(error), error  # a package for GPUs is installed
"""


def test_a_saved_model_needs_no_tidegate(tmp_path):
    model, ids = tiny.build("qwen3_5_moe", layers=2), tiny.tokens()
    names, expected = (model.config._attn_implementation, model.config._experts_implementation), stock_logits(ids)
    try:
        pickle.dumps(model)
    except Exception:  # with the kernels package
        pytest.skip("this Transformers cannot save whole models")
    tidegate.patch(model)
    torch.save(model, tmp_path / "model.pt")
    torch.save(ids, tmp_path / "ids.pt")
    arguments = [sys.executable, "-c", LOAD, str(tmp_path / "model.pt"), str(tmp_path / "ids.pt")]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(pathlib.Path(transformers.__file__).parents[1])]))
    done = subprocess.run(arguments, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(names)
    found = torch.load(tmp_path / "ids.pt")
    if found.shape != ids.shape:  # it could be run
        assert torch.equal(found, expected)
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert not tidegate.report(loaded) and tidegate.patch(loaded).installed
    assert model.config._attn_implementation == "tidegate_packed"  # saving changes nothing here


def stock_logits(ids):
    return tiny.logits(stock("qwen3_5_moe", layers=2), ids)


WITHOUT = """
import sys
for name in ("transformers", "peft", "accelerate", "safetensors", "kernels", "fla"):
    sys.modules[name] = None
import torch, tidegate
class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(16)), 1e-6
    def forward(self, x):
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * n.to(x.dtype)
model, x = torch.nn.Sequential(Norm()), torch.randn(3, 16)
expected = model(x)
with tidegate.patch(model) as handle:
    assert handle.report()[0].status == "installed", handle.report()
    assert torch.allclose(model(x), expected)
tidegate.register(), tidegate.unregister(), tidegate.report()
for call in (tidegate.patch, lambda: tidegate.patch(torch.nn.Linear(2, 2))):
    try:
        call()
    except tidegate.errors.NothingPatchedError as error:
        print("refused")
print(sorted(tidegate.pack([[1, 2], [3]])))
"""


def test_without_any_other_package():
    env = dict(os.environ, PYTHONPATH=str(pathlib.Path(tidegate.__file__).parents[1]))
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused\nrefused\n['cu_seq_lens_k'")


# Settings of the process, and modules with unusual content


def test_what_the_caller_has_set_does_not_matter():
    """Autocast, default type and device, inference mode, anomaly detection: the self-test sees none of them."""
    reference = small()
    tidegate.patch(reference)
    for context in (
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
        torch.inference_mode,
        lambda: torch.autograd.set_detect_anomaly(True),
    ):
        model = small()
        with context():
            handle = tidegate.patch(model)
        assert installed(model) == installed(reference)
        assert [row.checked for row in handle.report()] == [row.checked for row in tidegate.report(reference)]
    model = small()
    torch.set_default_dtype(torch.bfloat16)
    try:
        tidegate.patch(model)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert installed(model) == installed(reference)


def test_hooks_are_not_copied():
    """A hook may belong to an object that cannot be copied, or must not be."""

    class Watcher:
        def __init__(self):
            self.lock, self.seen = threading.Lock(), []

        def __call__(self, module, *_):
            self.seen.append(module)

    model, watcher = small(), Watcher()
    layer = tiny.linear_layers(model)[0]
    layer.register_forward_hook(watcher)
    layer.norm.register_forward_pre_hook(watcher)
    layer.in_proj_z.register_full_backward_hook(watcher)
    layer._register_state_dict_hook(watcher)
    assert tidegate.patch(model).installed and watcher.seen == []
    tiny.logits(model, tiny.tokens())
    assert watcher.seen == [layer]


class Strange(nn.Module):
    """Looks like a layer of an unknown family, and cannot be called like one."""

    def __init__(self):
        super().__init__()
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        self.conv1d = nn.Conv1d(8, 8, 4, groups=8)
        self.chunk_gated_delta_rule = self.causal_conv1d_fn = None
        self.hidden_size = 8

    def forward(self, hidden_states, cache_params=None, attention_mask=None):
        raise KeyError("something of its own")


def test_a_self_test_that_cannot_run_is_a_refusal():
    model = small()
    model.extra = Strange()
    row = tidegate.patch(model).report().only(path="extra")[0]
    assert row.status == "refused" and row.reason.startswith("self-test: cannot be called: KeyError")


@pytest.mark.parametrize("wide", ["A_log dt_bias", "norm.weight", "layernorm.weight q_norm.weight k_norm.weight"])
def test_types_that_differ_inside_a_layer(wide):
    """bf16 with some vectors in fp32, as quantised and partly trained models have."""
    models = stock("qwen3_5", layers=2, dtype=torch.bfloat16), small(dtype=torch.bfloat16)
    truth = stock("qwen3_5", layers=2, dtype=torch.bfloat16).float()
    for model in models:
        for name, parameter in model.named_parameters():
            if name.endswith(tuple(wide.split())):
                parameter.data = parameter.data.float()
    handle, ids = tidegate.patch(models[1]), tiny.tokens(2, 70)
    assert handle.report().only(op="gdn_layer")[0].status in INSTALLED
    exact = tiny.logits(truth, ids)
    errors = [(tiny.logits(model, ids).float() - exact).square().mean() for model in models]
    assert errors[1] <= 4 * errors[0]
    options = dict(max_new_tokens=4, do_sample=False)
    assert models[1].generate(ids, **options).shape == models[0].generate(ids, **options).shape


# Inputs


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "original"])
def test_autocast(fused):
    model = small()
    tidegate.patch(model, options={"gdn_layer": fused})
    ids = tiny.tokens(2, 70)
    with torch.autocast("cpu", torch.bfloat16):
        expected, exact = tiny.logits(stock("qwen3_5", layers=2), ids), None
        got = tiny.logits(model, ids)
        loss, gradients = tiny.gradients(model, ids)
        assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 73)
    exact = tiny.logits(stock("qwen3_5", layers=2), ids)
    errors = [(logits.float() - exact).square().mean() for logits in (got, expected)]
    assert got.dtype == expected.dtype and errors[0] <= 4 * errors[1] + 1e-12
    assert loss.isfinite() and all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients.values())


@pytest.mark.parametrize("shape", [(3, 1), (1, 1), (1, 2)])
def test_small_batches(shape):
    model, ids = small(), torch.ones(shape, dtype=torch.long)
    tidegate.patch(model)
    out = model(ids, use_cache=False)
    assert out.logits.shape == (*shape, tiny.VOCABULARY)
    out.logits.sum().backward()
    assert tiny.relative(out.logits, tiny.logits(stock("qwen3_5", layers=2), ids)) < T32


@pytest.mark.parametrize("shape", [(2, 0, 32), (0, 5, 32)])
def test_nothing_to_compute(shape):
    """Full attention of the model cannot do it; our layers can, with a mask and with gradients."""
    model = small()
    tidegate.patch(model)
    layer, x = tiny.linear_layers(model)[0], torch.ones(shape, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == shape
    assert layer(x, attention_mask=torch.ones(shape[0], 5)).shape == shape


def test_nan_stays_in_its_row():
    """Other rows keep every bit; in a layer of ours so do the tokens before it, which torch's attention cannot do."""
    model, ids = small(), tiny.tokens(3, 70)
    tidegate.patch(model)
    x = model.get_input_embeddings()(ids).detach()
    runs = lambda: (model(inputs_embeds=x).logits, tiny.linear_layers(model)[0](x))  # noqa: E731
    expected = runs()
    x[1, 30], x[2, 69] = float("nan"), float("inf")
    got = runs()
    assert all(torch.equal(one[0], other[0]) for one, other in zip(got, expected, strict=True))
    for row, place in ((1, 30), (2, 69)):
        assert torch.equal(got[1][row, :place], expected[1][row, :place])
        assert not got[0][row, place:].isfinite().any()


# Compiling, devices


def test_compile_first_then_patch(monkeypatch):
    """The graph that was compiled before is not used afterwards, in neither direction."""
    torch._dynamo.reset()
    model, ids, calls = small(), tiny.tokens(), []
    if "fla" in tidegate.report():
        pytest.skip("the original cannot run beside FLA without a GPU")
    compiled = torch.compile(model, backend="eager")
    expected, real = tiny.logits(compiled, ids), gdn_forward.prefill
    monkeypatch.setattr(gdn_forward, "prefill", lambda *args: calls.append(0) or real(*args))
    with tidegate.patch(compiled):
        calls.clear()
        assert tiny.relative(tiny.logits(compiled, ids), expected) < T32 and calls
    calls.clear()
    assert torch.equal(tiny.logits(compiled, ids), expected) and not calls


def test_meta_then_real():
    """Patched while it has no memory, filled afterwards, as from_pretrained and FSDP do."""
    source = small()
    with torch.device("meta"):
        model = type(source)(source.config).eval()
    handle, ids = tidegate.patch(model), tiny.tokens()
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    expected = tiny.logits(stock("qwen3_5", layers=2), ids)
    assert tiny.relative(tiny.logits(model, ids), expected) < T32 and handle.report()[0].checked == "unchecked: meta"
    other = small()
    tidegate.patch(other)
    other.load_state_dict(source.state_dict(), assign=True)
    assert tiny.relative(tiny.logits(other, ids), expected) < T32
    assert other.double()(ids).logits.dtype == torch.float64


def test_saved_and_loaded(tmp_path):
    """save_pretrained of a patched model is that of the stock one, file by file; what is loaded can be patched."""
    model, plain, ids = small(), small(), tiny.tokens()
    tidegate.patch(model)
    for one, name in ((model, "patched"), (plain, "stock")):
        one.save_pretrained(tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "stock").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "patched").iterdir())
    for name in files:
        assert (tmp_path / "stock" / name).read_bytes() == (tmp_path / "patched" / name).read_bytes(), name
    loaded = type(model).from_pretrained(tmp_path / "patched").eval()
    tidegate.patch(loaded)
    assert torch.equal(tiny.logits(loaded, ids), tiny.logits(model, ids))
