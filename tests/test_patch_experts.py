"""Packed experts of patched models: the stock model's numbers, its config, and what is refused."""

import copy

import pytest
import tiny_models
import torch
from compare import assert_bits, error

import tidegate
from tidegate import moe
from tidegate.errors import NothingPatchedError, SelfTestError

pytestmark = pytest.mark.skipif(tidegate.isa() == "fallback", reason="patch leaves experts to the model")
FAMILIES = ("qwen3_5_moe", "qwen3_next")


def step(model, ids):
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    return out.logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family):
    stock, patched = tiny_models.build(family), tiny_models.build(family)
    handle = tidegate.patch(patched, ops=("experts",))
    assert [row.status for row in handle.report().only(op="experts")] == ["installed"]
    ids = tiny_models.tokens(2, 40)
    exact = tiny_models.build(family).double()
    exact.set_experts_implementation("eager")
    tidegate.patch(exact, ops=("gdn_layer",))  # in fp64 our operators run their definitions
    (truth, wanted), (logits, gradients), (got, found) = (step(model, ids) for model in (exact, stock, patched))
    assert error(got, logits) < 1e-5
    assert found.keys() == gradients.keys()
    for name, want in wanted.items():  # gradients of decays cancel: there the stock model's own error is the measure
        assert error(found[name], want) <= max(1e-5, 2 * error(gradients[name], want)), name


def test_our_function_runs(monkeypatch):
    calls = []
    real = moe.moe_experts
    monkeypatch.setattr(moe, "moe_experts", lambda *a, **k: calls.append(1) or real(*a, **k))
    model = tiny_models.build("qwen3_5_moe")
    ids = tiny_models.tokens(1, 9)
    with tidegate.patch(model, ops=("experts",)):
        calls.clear()  # the self-test's
        model(input_ids=ids)
        assert len(calls) == model.config.num_hidden_layers
    model(input_ids=ids)
    assert len(calls) == model.config.num_hidden_layers


def test_two_models_of_one_config():
    config = tiny_models.config_of("qwen3_5_moe")
    one, other = (tiny_models.build("qwen3_5_moe", config=config) for _ in range(2))
    before = config._experts_implementation
    handle = tidegate.patch(one)
    assert other.config is config and config._experts_implementation == before
    assert one.config is not config and one.config._experts_implementation == moe.NAME
    handle.undo()
    assert one.config is config
    assert all(m.config is config for m in one.modules() if "config" in m.__dict__)


def test_copies_are_patched_and_undoable():
    model = tiny_models.build("qwen3_5_moe")
    ids = tiny_models.tokens(1, 9)
    before = model(input_ids=ids).logits
    handle = tidegate.patch(model)
    twin = copy.deepcopy(model)
    handle.undo()
    assert twin.config._experts_implementation == moe.NAME
    tidegate.unpatch(twin)
    assert_bits("logits", twin(input_ids=ids).logits, before)
    assert_bits("logits", model(input_ids=ids).logits, before)


def test_other_experts_are_refused():
    model = tiny_models.build("qwen3_5_moe")
    for module in model.modules():
        if moe_like(module):
            module.act_fn = torch.nn.GELU()
    with pytest.raises(NothingPatchedError, match="act_fn: expected SiLU, got GELU"):
        tidegate.patch(model, ops=("experts",))


def test_the_self_test_sees_swapped_halves(monkeypatch):
    real = moe.moe_experts

    def swapped(x, ids, weights, gate_up, down, **options):
        return real(x, ids, weights, torch.cat(gate_up.chunk(2, 1)[::-1], 1), down, **options)

    monkeypatch.setattr(moe, "moe_experts", swapped)
    with pytest.raises(SelfTestError, match="differs by"):
        tidegate.patch(tiny_models.build("qwen3_5_moe"), ops=("experts",))


@pytest.mark.parametrize("frozen", [True, False])
def test_weights_are_not_copied(frozen):
    """The largest piece of memory of a step is an activation, or the gradient of a weight that wants one."""
    from torch.profiler import ProfilerActivity, profile

    model = tiny_models.build("qwen3_5_moe", layers=2, num_experts=256)  # a weight of all experts has 1 MB, x 4 kB
    experts = next(module for module in model.modules() if moe_like(module)).requires_grad_(not frozen)
    tidegate.patch(model, ops=("experts",))
    x, ids = torch.randn(32, 32, requires_grad=True), torch.randint(0, 256, (32, 2))
    weights = torch.rand(32, 2)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        experts(x, ids, weights).sum().backward()
    pieces = sorted((event.cpu_memory_usage for event in profiled.events()), reverse=True)
    activations = 64 * x.numel()  # bytes: some copies of x
    large = [piece for piece in pieces if piece > activations]
    assert x.grad is not None and (experts.down_proj.grad is None) == frozen
    if frozen:
        assert not large, pieces[:5]
    else:
        sizes = [4 * weight.numel() for weight in (experts.gate_up_proj, experts.down_proj)]
        assert max(large) <= sum(sizes) + activations, pieces[:5]  # both gradients, in one operator


def moe_like(module):
    return hasattr(module, "gate_up_proj") and hasattr(module, "act_fn")
