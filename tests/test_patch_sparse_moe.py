"""Sparse blocks of patched models: one call for routed and shared experts, and when the block runs as it is."""

import copy
import functools

import pytest
import tiny_models
import torch
from compare import error

import tidegate
from tidegate.patch import sparse_moe

pytestmark = pytest.mark.skipif(tidegate.isa() == "fallback", reason="patch leaves experts to the model")
FAMILIES = ("qwen3_5_moe", "qwen3_next")
OPS = ("router", "experts", "sparse_moe")


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.fixture
def joined(monkeypatch):
    """Calls of the experts that had a shared expert with them."""
    calls = []

    class Spy:
        def __getattr__(self, name):
            return getattr(tidegate.ops, name)

        def moe_experts_fwd(self, *args, **kwargs):
            calls.append(args)
            return tidegate.ops.moe_experts_fwd(*args, **kwargs)

    monkeypatch.setattr(sparse_moe, "ops", Spy())
    return calls


def built(family="qwen3_5_moe", **options):
    model = tiny_models.build(family, **options)
    handle = tidegate.patch(model, ops=OPS)
    rows = handle.report().only(op="sparse_moe")
    if any(row.status == "refused" for row in rows):
        assert all("its forward is not that of" in str(row) for row in rows)
        pytest.skip("this release has another block")
    return model, handle, len(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family, joined):
    stock = tiny_models.build(family)
    model, handle, blocks = built(family)
    assert blocks == model.config.num_hidden_layers
    for ids in (tiny_models.tokens(2, 40), tiny_models.tokens(1, 1)):
        joined.clear()
        assert error(logits(model, ids), logits(stock, ids)) < 1e-5
        assert len(joined) == blocks
    joined.clear()
    handle.undo()
    assert torch.equal(logits(model, ids), logits(stock, ids)) and not joined


def test_16_bits_are_no_further_from_the_truth(joined):
    exact = tiny_models.build("qwen3_5_moe").double()
    exact.set_experts_implementation("eager")
    stock = tiny_models.build("qwen3_5_moe").bfloat16()
    model = copy.deepcopy(stock)
    block, own = model.model.layers[0].mlp, stock.model.layers[0].mlp
    x = torch.randn(1, 50, model.config.hidden_size).bfloat16()
    built_handle = tidegate.patch(model, ops=OPS)
    if not built_handle.report().only(op="sparse_moe", status="installed"):
        pytest.skip("this release has another block")
    with torch.no_grad():
        truth = exact.model.layers[0].mlp(x.double())
        assert error(block(x), truth) <= 1.05 * error(own(x), truth)
    assert joined


def test_gradients_take_the_block_as_it_is(joined):
    model, _, _ = built()
    ids = tiny_models.tokens(1, 9)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert not joined
    assert model.model.layers[0].mlp.shared_expert.up_proj.weight.grad is not None
    with torch.inference_mode():
        model(input_ids=ids)
    assert joined


@pytest.mark.parametrize(
    "part", ["experts", "shared_expert", "shared_expert.up_proj", "shared_expert.act_fn", "shared_expert_gate"]
)
def test_hooks_run(joined, part):
    model, _, blocks = built()
    ids, seen = tiny_models.tokens(1, 9), []
    block = model.model.layers[0].mlp
    expected = logits(model, ids)
    hook = block.get_submodule(part).register_forward_hook(lambda *args: seen.append(1))
    joined.clear()
    assert error(logits(model, ids), expected) < 1e-5
    assert len(seen) == 1 and len(joined) == blocks - 1
    hook.remove()
    logits(model, ids)
    assert len(seen) == 1 and len(joined) == 2 * blocks - 1


def test_hooks_of_the_router_run_in_the_call(joined):
    model, _, blocks = built()
    seen = []
    model.model.layers[0].mlp.gate.register_forward_hook(lambda *args: seen.append(1))
    logits(model, tiny_models.tokens(1, 9))
    assert len(seen) == 1 and len(joined) == blocks


class Other(torch.nn.Module):
    """What an MLP consists of, and another computation."""

    def __init__(self, mlp):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = (
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
            mlp.act_fn,
        )

    def forward(self, x):
        return 0.1 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Nothing(torch.nn.SiLU):
    def forward(self, x):
        return torch.zeros_like(x)


def _wrapped(block):
    inner = block.shared_expert.forward
    block.shared_expert.forward = functools.wraps(inner)(lambda x: 0 * inner(x))


def _strided(block):
    w = block.shared_expert.up_proj.weight.data
    block.shared_expert.up_proj.weight = torch.nn.Parameter(torch.stack([w, w], -1).flatten(-2)[:, ::2])


def _subclass(part):
    base = type(part)
    part.__class__ = type("Sub", (base,), {"forward": lambda self, *args: 0 * base.forward(self, *args)})


CHANGES = {
    "adapter": lambda b: setattr(b.shared_expert, "up_proj", torch.nn.Sequential(b.shared_expert.up_proj)),
    "wrapper": _wrapped,
    "another MLP": lambda b: setattr(b, "shared_expert", Other(b.shared_expert)),
    "class of the MLP": lambda b: _subclass(b.shared_expert),
    "class of the experts": lambda b: _subclass(b.experts),
    "activation of the MLP": lambda b: setattr(b.shared_expert, "act_fn", Nothing()),
    "strides": _strided,
    "bias": lambda b: setattr(
        b.shared_expert.up_proj, "bias", torch.nn.Parameter(torch.ones(b.experts.down_proj.shape[-1]))
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_later_is_seen(joined, change):
    model, _, blocks = built()
    stock, ids = tiny_models.build("qwen3_5_moe"), tiny_models.tokens(1, 9)
    for either in (model, stock):
        CHANGES[change](either.model.layers[0].mlp)
    joined.clear()
    assert error(logits(model, ids), logits(stock, ids)) < 1e-5
    assert len(joined) == blocks - 1


def test_another_activation_of_the_experts_is_an_error(joined):
    model, _, _ = built()
    model.model.layers[0].mlp.experts.act_fn = torch.nn.GELU()
    with pytest.raises(ValueError, match="act_fn: expected SiLU, got GELU"):
        logits(model, tiny_models.tokens(1, 9))


def test_a_class_that_changes_later_is_seen(joined, monkeypatch):
    model, _, _ = built()
    kind = type(model.model.layers[0].mlp.experts)
    real, calls = kind.forward, []
    monkeypatch.setattr(kind, "forward", lambda self, *args: calls.append(1) or real(self, *args))
    joined.clear()
    logits(model, tiny_models.tokens(1, 9))
    assert calls and not joined


def test_forward_mode_and_other_shapes_are_the_blocks_own(joined):
    model, _, _ = built()
    block = model.model.layers[0].mlp
    with torch.no_grad():
        with pytest.raises(ValueError, match="unpack"):
            block(torch.randn(3, model.config.hidden_size))
        with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
            x = torch.randn(1, 3, model.config.hidden_size)
            block(torch.autograd.forward_ad.make_dual(x, x))
    assert not joined


def test_quantised_experts(joined):
    model, _, _ = built()
    ids = tiny_models.tokens(1, 9)
    expected = logits(model, ids)
    tidegate.quantize_experts(model)
    joined.clear()
    assert error(logits(model, ids), expected) < 0.2 and not joined


def test_recorded_routing(joined):
    model, _, blocks = built()
    ids = tiny_models.tokens(1, 9)
    recorder = tidegate.RouterRecorder(model)
    with recorder.recording():
        expected = logits(model, ids)
    with recorder.replaying():
        assert torch.equal(logits(model, ids), expected)
    assert len(joined) == 2 * blocks


def test_copies_and_autocast(joined):
    model, _, blocks = built()
    ids = tiny_models.tokens(1, 9)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin, ids), logits(model, ids)) and len(joined) == 2 * blocks
    joined.clear()
    with torch.autocast("cpu", torch.bfloat16):
        logits(model, ids)
    assert not joined


def test_report_says_what_is_missing():
    model = tiny_models.build("qwen3_5_moe")
    with tidegate.patch(model, options={"gmm": False}) as handle:
        rows = handle.report().only(op="sparse_moe")
        assert rows and all(row.status == "refused" for row in rows)
    handle = tidegate.patch(model, ops=("sparse_moe", "router"))
    rows = handle.report().only(op="sparse_moe", status="installed")
    assert all("waits for the op experts" in str(row) for row in rows)
