"""Unusual models, settings of the process and inputs: a patched model does what the stock one does, or says why not."""

import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402
from packed_case import batch_of  # noqa: E402
from test_patch_models import T32, stock  # noqa: E402
from test_patch_parts import INSTALLED, installed, small  # noqa: E402

import tidegate  # noqa: E402
from tidegate.errors import PackedInputError  # noqa: E402
from tidegate.patch import gdn_forward  # noqa: E402


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
    assert watcher.seen == [layer.norm, layer]


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


def test_layers_that_share_or_compute_their_weights():
    """Pruned and reparametrised convolutions, and one layer used twice."""
    models, ids = (stock("qwen3_5"), tiny.build("qwen3_5")), tiny.tokens()
    for model in models:
        layers = model.model.layers
        prune.l1_unstructured(layers[0].linear_attn.conv1d, "weight", 0.5)
        parametrizations.weight_norm(layers[2].linear_attn.conv1d)
        parametrizations.weight_norm(layers[2].linear_attn.in_proj_qkv)
        layers[1].linear_attn = layers[0].linear_attn
    handle = tidegate.patch(models[1])
    assert {row.status for row in handle.report().only(op="gdn_layer")} <= INSTALLED
    assert tiny.relative(*(tiny.logits(model, ids, use_cache=False) for model in models)) < T32


def test_quantised_activations_cannot_be_packed():
    """One scale for all tokens of a call: then a token's value depends on the others, in stock models too."""
    model = torch.ao.quantization.quantize_dynamic(small(), {nn.Linear}, dtype=torch.qint8)
    ids, batch = batch_of((24, 40))
    assert {row.status for row in tidegate.patch(model).report().only(op="gdn_layer")} <= INSTALLED
    tiny.logits(model, ids)
    with pytest.raises(PackedInputError, match="layers.0.linear_attn gives a token another value"):
        model(ids, **batch)


def test_attention_that_somebody_chose():
    """Eager attention gives its weights; ours would not, so it stays, and packed input is refused."""
    model, ids = small(), tiny.tokens()
    model.set_attn_implementation("eager")
    handle = tidegate.patch(model)
    assert handle.report().only(op="attention")[0].status == "refused"
    assert model(ids, output_attentions=True).attentions[-1].shape == (2, 4, 40, 40)
    ids, batch = batch_of((24, 40))
    with pytest.raises(PackedInputError, match="full attention runs 'eager'"):
        model(ids, **batch)


@pytest.mark.parametrize("patch_first", [True, False])
def test_weights_on_disk(tmp_path, patch_first):
    """Accelerate brings weights when their module is called; we read some of them without a call."""
    accelerate = pytest.importorskip("accelerate")
    model, ids = small(), tiny.tokens()
    if patch_first:
        tidegate.patch(model)
    accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    handle = tidegate.patch(model)
    assert {row.status for row in handle.report().only(op="gdn_layer")} <= INSTALLED
    plain = stock("qwen3_5", layers=2)
    assert tiny.relative(tiny.logits(model, ids, use_cache=False), tiny.logits(plain, ids)) < T32
    options = dict(max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    assert all(p.is_meta for p in model.parameters())  # and they are gone again


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


def test_modules_without_sizes_yet():
    """A lazy layer beside the model has a weight without a shape."""
    model = small()
    model.extra = nn.LazyLinear(4)
    handle = tidegate.patch(model)
    assert handle.installed and not any(site.path.startswith("extra") for site in handle.installed)
    handle.undo()
