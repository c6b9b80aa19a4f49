"""patch() without a model, and what else is shared by all models of a process."""

import pathlib
import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402
from test_patch_models import T32, stock  # noqa: E402

import tidegate  # noqa: E402
from tidegate.errors import PackedInputError, PatchConflictError  # noqa: E402


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_models_before_and_after(family, monkeypatch):
    from tidegate.patch import gdn_ops

    calls, rule = [], gdn_ops._chunk
    monkeypatch.setattr(gdn_ops, "_chunk", lambda *args, **kwargs: calls.append(0) or rule(*args, **kwargs))
    ids, expected = tiny.tokens(), tiny.logits(stock(family), tiny.tokens())
    before = tiny.build(family)
    with tidegate.patch() as handle:
        assert handle.installed and handle is tidegate.patch() and "H:globals" in str(handle.report())
        with pytest.raises(PatchConflictError):
            tidegate.patch(options={"gdn_conv": False})
        for model in (before, tiny.build(family)):
            calls.clear()
            assert tiny.relative(tiny.logits(model, ids), expected) < T32 and len(calls) == 3
    calls.clear()
    after = stock(family)
    tiny.logits(after, ids)
    assert calls == [] and not handle.installed


# Layers before 5.9 keep the boundaries of a pack from the functions that patch() replaces (docs/packed.md).
HANDED_ON = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 9)


@pytest.mark.skipif(not HANDED_ON, reason="this release hands no boundaries to linear attention")
def test_a_pack_that_would_fill_a_cache_is_refused():
    """Full attention of a model that only has our functions does not keep samples apart once there is a cache."""
    with tidegate.patch():
        model = tiny.build("qwen3_5")
        batch = tidegate.pack([{"input_ids": tiny.tokens(1, n)[0].tolist()} for n in (9, 14)])
        with torch.no_grad(), pytest.raises((PackedInputError, ValueError), match="cache|cu_seq"):
            model(**batch)
        model(input_ids=batch["input_ids"])  # one sequence may fill it


def test_the_scope_of_a_model_is_its_family():
    model = tiny.build("qwen3_5")
    with tidegate.patch(model, scope="process") as handle:
        assert {site.path for site in handle.sites if "." in site.path} == {
            "transformers.models.qwen3_5.modeling_qwen3_5"
        }


def test_two_models_of_one_configuration():
    """Not a bit and not an attribute of the other model changes; experts and attention have names in the config."""
    config = tiny.config_of("qwen3_5_moe", layers=2)
    a, b = tiny.build("qwen3_5_moe", config=config), stock("qwen3_5_moe", config=config)
    ids, attributes = tiny.tokens(), lambda: [{k: id(v) for k, v in m.__dict__.items()} for m in b.modules()]
    before, values, want = attributes(), config.to_dict(), tiny.logits(b, ids)
    names = config._attn_implementation, config._experts_implementation
    tidegate.patch(a)
    assert attributes() == before and config.to_dict() == values
    assert (config._attn_implementation, config._experts_implementation) == names
    assert tidegate.report(b) == [] and len(tidegate.report(a).only(op="gdn_layer")) == 1
    assert torch.equal(tiny.logits(b, ids), want) and tiny.relative(tiny.logits(a, ids), want) < T32


def test_kernels_that_reset_forwards():
    """`kernels` resets forwards of instances: seen as lost, repaired, and survived where it was on before."""
    pytest.importorskip("kernels")
    model = tiny.build("qwen3_5")
    if not getattr(type(tiny.linear_layers(model)[0]), "kernel_layer_name", None):
        pytest.skip("this Transformers has no kernel layers, or another version of kernels is installed")
    ids, expected = tiny.tokens(), tiny.logits(stock("qwen3_5"), tiny.tokens())
    handle = tidegate.patch(model)
    try:
        model.set_use_kernels(True)
    except (ValueError, ImportError) as error:
        pytest.skip(f"kernels cannot be used here: {error}")
    assert len(handle.report().only(op="gdn_layer", status="lost")) == 3
    assert tidegate.patch(model) is handle and not handle.report().only(status="lost")
    handle.undo()
    handle = tidegate.patch(model)  # now with use_kernels on
    for mode in (True, False, True):
        model.train(mode)
        assert not handle.report().only(status="lost")
    model.eval()
    assert tiny.relative(tiny.logits(model, ids), expected) < T32
    other = tiny.build("qwen3_5")
    other.set_use_kernels(True)  # our class is in the registry; this model is not patched and must not notice
    assert tidegate.report(other) == []
    handle.undo()
    assert not handle.installed and "_tidegate" not in tiny.linear_layers(model)[0].__dict__


RUN = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, tidegate, tiny_models as tiny
model, ids = tiny.build("qwen3_5", layers=2), tiny.tokens()
if "--unpatched" not in sys.argv:
    tidegate.patch(model)
tiny.gradients(model, ids)
assert model.generate(ids, max_new_tokens=8, do_sample=False).shape == (2, 48)
"""


def run(*arguments):
    here = str(pathlib.Path(__file__).parent)
    return subprocess.run([sys.executable, "-c", RUN, here, *arguments], capture_output=True, text=True, timeout=300)


def test_no_crash_and_no_advice():
    """A fresh process: a patched model runs with any packages, and is not told to install others."""
    result = run()
    assert result.returncode == 0 and "falling back to its reference" not in result.stderr, result.stderr[-2000:]


def test_flash_linear_attention_without_a_gpu():
    """What the patch cures: newer releases take FLA for granted where it is installed."""
    pytest.importorskip("fla")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    newer = "chunk_gated_delta_rule" not in tiny.linear_layers(tiny.build("qwen3_5", layers=2))[0].__dict__
    assert (run("--unpatched").returncode != 0) == newer
