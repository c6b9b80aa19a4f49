"""Parts and wholes, threads, processes without us: whose patch it is, and what is left of it."""

import copy
import os
import pathlib
import pickle
import subprocess
import sys
import threading

import pytest
import torch

transformers = pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402
from test_patch_models import T32, stock  # noqa: E402

import tidegate  # noqa: E402
from tidegate.errors import NothingPatchedError, PatchConflictError  # noqa: E402

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
