"""patch() without a model, and what else is shared by all models of a process."""

import functools
import inspect
import pathlib
import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402
from packed_case import assert_equal_runs, batch_of, exact, separate, should_pack, together  # noqa: E402
from test_patch_models import T32, stock  # noqa: E402

import tidegate  # noqa: E402
from tidegate.errors import PackedInputError, PatchConflictError  # noqa: E402
from tidegate.packed import support  # noqa: E402


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_models_before_and_after(family, monkeypatch):
    from tidegate.patch import gdn_ops

    calls, rule = [], gdn_ops._chunk
    monkeypatch.setattr(gdn_ops, "_chunk", lambda *args, **kwargs: calls.append(0) or rule(*args, **kwargs))
    ids, expected = tiny.tokens(), tiny.logits(stock(family), tiny.tokens())
    before = tiny.build(family)
    with tidegate.patch() as handle:
        assert handle.installed and handle is tidegate.patch() and "H:globals" in str(handle.report())
        assert "H:globals" in str(tidegate.report())
        with pytest.raises(PatchConflictError):
            tidegate.patch(options={"gdn_conv": False})
        for model in (before, tiny.build(family)):
            calls.clear()
            assert tiny.relative(tiny.logits(model, ids), expected) < T32 and len(calls) == 3
    calls.clear()
    after = stock(family)
    tiny.logits(after, ids)
    assert calls == [] and not handle.installed and "patch()" not in tidegate.report()


def forms_of(batch):
    """Calls with a packed batch that the stock model gets wrong: by name, whether it may be run, and the arguments."""
    positions, ones = batch["position_ids"], torch.ones_like(batch["position_ids"])
    yield "all", True, batch
    yield "defaults", True, {"cu_seq_lens_q": batch["cu_seq_lens_q"]}
    yield "ids", True, {"seq_idx": batch["seq_idx"], "attention_mask": ones}
    yield "positions", True, {"position_ids": positions, "padding_free": True}
    yield "positions alone", False, {"position_ids": positions}
    yield "positions with a mask", False, {"position_ids": positions, "attention_mask": ones, "use_cache": False}
    yield "cache", False, {"seq_idx": batch["seq_idx"], "use_cache": True}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_pack_is_right_or_refused(family):
    """In models made before and after, of every release; and nothing of it stays in the classes."""
    before, lengths, runs = tiny.build(family), (24, 1, 39), []
    cls, (ids, batch) = type(before.model), batch_of(lengths)
    attributes, signature = dict(vars(cls)), inspect.signature(cls.forward)
    takes = should_pack(family) and support.hands_keywords_on(before.model.layers[0])
    with tidegate.patch() as handle:
        assert inspect.signature(cls.forward) == signature and handle.report().only(op="packed", status="installed")
        for model in (before, tiny.build(family)):
            want = separate(model, lengths)
            for name, allowed, arguments in forms_of(batch):
                if allowed and takes:
                    assert tiny.relative(tiny.logits(model, ids, **arguments)[0], want[0]) < T32, name
                else:
                    with pytest.raises(PackedInputError):
                        model(ids, **arguments)
            if takes:
                runs.append((together(model, ids, **batch), want))
            tiny.logits(model, ids)
            tiny.logits(model, ids, position_ids=torch.arange(64)[None])  # one sequence may fill a cache
    assert dict(vars(cls)) == attributes and cls.forward is attributes["forward"]
    for got, want in runs:
        assert_equal_runs(got, want, truth=lambda: exact(family, lengths))


def test_three_rows_of_positions():
    """They have no row for the text, which is where Transformers' masks see that positions restart."""
    model = tiny.build("qwen3_5", layer_types=["full_attention"] * 4)
    ids, batch = batch_of((24, 40))
    with tidegate.patch():
        want = separate(model, (24, 40))[0]
        rows = batch["position_ids"].expand(3, 1, -1)
        assert tiny.relative(tiny.logits(model, ids, position_ids=rows, padding_free=True)[0], want) < T32


def test_attention_that_does_not_see_boundaries():
    model, (ids, batch) = tiny.build("qwen3_5"), batch_of((24, 40))
    model.config._attn_implementation = "flash_attention_2"
    with tidegate.patch(), pytest.raises(PackedInputError, match="full attention runs 'flash_attention_2'"):
        model(ids, **batch)


def test_layers_that_someone_else_runs():
    model, (ids, batch) = tiny.build("qwen3_5"), batch_of((24, 40))
    layer = tiny.linear_layers(model)[1]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    with tidegate.patch(), pytest.raises(PackedInputError, match="layers.1.linear_attn does not|keep the boundaries"):
        model(ids, **batch)


@pytest.mark.slow
def test_compiled():
    """A graph made before sees the patch; one made under it holds the checks, and what a pack needs."""
    torch._dynamo.reset()
    model, (ids, batch) = tiny.build("qwen3_5", layers=2), batch_of((24, 40))
    positions = torch.arange(64)[None]
    takes = support.hands_keywords_on(model.model.layers[0])
    compiled = torch.compile(model, fullgraph=takes, backend="aot_eager")  # older models branch on values themselves
    call = dict(use_cache=False, position_ids=positions)
    want = tiny.logits(compiled, ids, **call)
    with tidegate.patch():
        assert tiny.relative(tiny.logits(compiled, ids, **call), want) < T32
        with pytest.raises(PackedInputError, match="restart at token 24"):
            tiny.logits(compiled, ids, **call | {"position_ids": batch["position_ids"]})
        if takes:
            assert torch.equal(tiny.logits(compiled, ids, **batch), tiny.logits(model, ids, **batch))
        else:
            with pytest.raises((PackedInputError, torch._dynamo.exc.Unsupported), match="keep the boundaries"):
                tiny.logits(compiled, ids, **batch)
    assert torch.equal(tiny.logits(compiled, ids, **call), want)


def test_a_model_with_a_patch_of_its_own():
    """It keeps samples apart in every release, whichever patch comes or goes first."""
    ids, batch = batch_of((24, 40))
    first = tiny.build("qwen3_5")
    tidegate.patch(first)
    want = tiny.logits(first, ids, **batch)
    with tidegate.patch():
        second = tiny.build("qwen3_5")
        handle = tidegate.patch(second)
        assert all(torch.equal(tiny.logits(model, ids, **batch), want) for model in (first, second))
    assert all(torch.equal(tiny.logits(model, ids, **batch), want) for model in (first, second))
    handle.undo()
    assert tiny.logits(second, ids).isfinite().all()


def test_a_forward_that_someone_wraps(monkeypatch):
    model, (ids, batch) = tiny.build("qwen3_5"), batch_of((24, 40))
    cls, calls = type(model.model), []
    handle = tidegate.patch()
    ours = cls.forward

    @functools.wraps(ours)
    def theirs(*args, **kwargs):
        calls.append(0)
        return ours(*args, **kwargs)

    monkeypatch.setattr(cls, "forward", theirs)
    assert tidegate.patch() is handle and cls.forward is theirs and not handle.report().only(status="lost")
    with pytest.raises(PackedInputError):
        model(ids, position_ids=batch["position_ids"])
    with pytest.warns(UserWarning, match="calling the original"):
        handle.undo()
    calls.clear()
    tiny.logits(model, ids, position_ids=batch["position_ids"], use_cache=False)  # the stock model's answer
    assert calls == [0]


def test_unpatch_without_a_model():
    forward = type(tiny.build("qwen3_5").model).forward
    tidegate.patch()
    assert tidegate.unpatch() and type(tiny.build("qwen3_5").model).forward is forward
    assert not tidegate.unpatch()


def test_the_scope_of_a_model_is_its_family():
    model = tiny.build("qwen3_5")
    with tidegate.patch(model, scope="process") as handle:
        file = "transformers.models.qwen3_5.modeling_qwen3_5"
        assert {site.path for site in handle.sites if "." in site.path} == {file, f"{file}.Qwen3_5TextModel"}


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
