"""Routers of patched models: the stock model's numbers, ids of any batch, record and replay."""

import copy

import pytest
import tiny_models
import torch
from compare import assert_bits, error

import tidegate
from tidegate import RouterRecorder
from tidegate.errors import NothingPatchedError, ReplayError, SelfTestError
from tidegate.patch import router

pytestmark = pytest.mark.skipif(tidegate.isa() == "fallback", reason="patch leaves routers to the model")
FAMILIES = ("qwen3_5_moe", "qwen3_next")


def routers(model):
    return [module for module in model.modules() if router.is_router(module)]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family):
    stock, patched = tiny_models.build(family), tiny_models.build(family)
    handle = tidegate.patch(patched, ops=("router",))
    assert [row.status for row in handle.report().only(op="router")] == ["installed"] * 4
    ids = tiny_models.tokens(2, 40)
    assert error(tiny_models.logits(patched, ids), tiny_models.logits(stock, ids)) < 1e-5
    loss, gradients = tiny_models.gradients(stock, ids)
    got, found = tiny_models.gradients(patched, ids)
    assert abs(got - loss) < 1e-5 * loss
    for name in (n for n in gradients if "mlp" in n):
        assert error(found[name], gradients[name]) < 1e-5, name
    handle.undo()
    assert_bits("logits", tiny_models.logits(patched, ids), tiny_models.logits(stock, ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_of_the_originals_kind(family, dtype):
    """Also without renormalisation, and where a release returns probabilities in place of logits."""
    model = tiny_models.build(family, dtype=dtype)
    module = routers(model)[0]
    module.norm_topk_prob = getattr(module, "norm_topk_prob", True)
    if family == "qwen3_next":
        module.norm_topk_prob = False
    x = torch.randn(33, 32).to(dtype)
    want = module(x)
    tidegate.patch(model, ops=("router",))
    got = module(x)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
    assert error(got[0].float(), want[0].float()) < (1e-5 if dtype == torch.float32 else 1e-2)
    same = (got[2] == want[2]).all(1)
    assert same.float().mean() > 0.8  # bf16: equal or nearly equal logits
    assert error(got[1][same].float(), want[1][same].float()) < (1e-5 if dtype == torch.float32 else 1e-2)


def test_ids_are_those_of_any_batch_and_thread_count():
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_models.build("qwen3_5_moe", dtype=dtype, num_experts=64, num_experts_per_tok=8, hidden_size=64)
        tidegate.patch(model, ops=("router",))
        module, x = routers(model)[0], torch.randn(64, 64).to(dtype)
        logits, weights, ids = module(x)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        assert torch.equal(module(x)[2], ids)
        torch.set_num_threads(threads)
        for t in range(64):
            one = module(x[t : t + 1])
            assert torch.equal(one[2][0], ids[t])
            assert_bits("weights", one[1][0], weights[t])
            assert_bits("logits", one[0][0], logits[t])


def test_a_router_that_does_something_else_is_refused(monkeypatch):
    cls = type(routers(tiny_models.build("qwen3_5_moe"))[0])
    original = cls.forward

    def scaled(self, hidden_states):
        logits, weights, ids = original(self, hidden_states)
        return logits, 2 * weights, ids

    monkeypatch.setattr(cls, "forward", scaled)
    with pytest.raises(SelfTestError, match="weights differ"):
        tidegate.patch(tiny_models.build("qwen3_5_moe"), ops=("router",))
    monkeypatch.setattr(router, "KNOWN", ())
    with pytest.raises(NothingPatchedError, match="weights differ"):
        tidegate.patch(tiny_models.build("qwen3_5_moe"), ops=("router",))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_come_later(family, monkeypatch):
    """Routers on the meta device are installed unchecked; those that nobody knows must be tested."""
    stock = tiny_models.build(family)
    with torch.device("meta"):
        model, unknown = (type(stock)(stock.config).eval() for _ in range(2))
    handle = tidegate.patch(model)
    rows = handle.report().only(op="router")
    assert {(row.status, row.checked) for row in rows} == {("installed", "unchecked: meta")} and len(rows) == 4
    model.to_empty(device="cpu")
    model.load_state_dict(stock.state_dict())
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    x = torch.randn(7, 32)
    for got, want in zip(routers(model)[0](x), routers(stock)[0](x), strict=True):
        assert got.dtype == want.dtype and error(got.float(), want.float()) < 1e-5
    ids = tiny_models.tokens(2, 40)
    assert error(tiny_models.logits(model, ids), tiny_models.logits(stock, ids)) < 1e-5
    monkeypatch.setattr(router, "KNOWN", ())
    rows = tidegate.patch(unknown).report().only(op="router")
    assert {row.status for row in rows} == {"refused"} and "must be tested" in rows[0].reason


def test_nan_is_an_error_that_names_the_token():
    model = tiny_models.build("qwen3_5_moe")
    tidegate.patch(model, ops=("router",))
    x = torch.randn(5, 32)
    x[3, 0] = float("nan")
    with pytest.raises(ValueError, match=r"logits\[3\]"):
        routers(model)[0](x)


def test_compiled():
    model = tiny_models.build("qwen3_5_moe")
    tidegate.patch(model, ops=("router",))
    module, x = routers(model)[0], torch.randn(6, 32)
    want = module(x)
    got = torch.compile(module, fullgraph=True)(x)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def model():
    model = tiny_models.build("qwen3_5_moe")
    tidegate.patch(model, ops=("router",))
    return model


def test_replay_chooses_again_what_was_recorded(model):
    recorder, ids = RouterRecorder(model), tiny_models.tokens(2, 20)
    with recorder.recording():
        want = tiny_models.logits(model, ids)
        tiny_models.logits(model, ids[:, :7])
    assert {len(list_) for list_ in recorder.choices.values()} == {2}
    state = copy.deepcopy(recorder.state_dict())
    with torch.no_grad():  # what training does between rollout and loss
        for module in routers(model):
            module.weight.add_(0.3 * torch.randn_like(module.weight))
    free = tiny_models.logits(model, ids)
    other = RouterRecorder(model)
    other.load_state_dict(state)
    with other.replaying():
        replayed = tiny_models.logits(model, ids)
        tiny_models.logits(model, ids[:, :7])
    assert error(replayed, free) > 1e-3  # other experts than the changed routers would choose
    with torch.no_grad():
        for module in routers(model):
            module.weight.zero_()  # all logits equal: replay alone decides who is chosen
    with other.replaying():
        tiny_models.logits(model, ids)
        tiny_models.logits(model, ids[:, :7])
    fresh = RouterRecorder(model)
    with fresh.recording():
        tiny_models.logits(model, ids)
    assert all((list_[0].ids == torch.tensor([0, 1])).all() for list_ in fresh.choices.values())
    assert want.shape == replayed.shape


def test_same_weights_replay_bitwise_with_checkpointing(model):
    recorder, ids = RouterRecorder(model), tiny_models.tokens(1, 20)
    with recorder.recording():
        loss, want = tiny_models.gradients(model, ids)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again = RouterRecorder(model)
    with again.recording():
        assert tiny_models.gradients(model, ids)[0] == loss
    assert {len(list_) for list_ in again.choices.values()} == {1}  # layers computed twice are recorded once
    with again.replaying():
        replayed, found = tiny_models.gradients(model, ids)
    assert replayed == loss
    for name in (n for n in want if "mlp" in n):
        assert error(found[name], want[name]) < 1e-6, name


def _checkpointed(model, on):
    model.train()
    if on:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("mode", ["replaying", "recording"])
def test_several_calls_before_a_backward_with_checkpointing(model, mode, inside):
    """Each layer that is computed again takes the experts of its own forward, also when the context is left by then."""
    recorder, rows = RouterRecorder(model), [tiny_models.tokens(1, n, seed=n) for n in (20, 20, 13)]
    with recorder.recording():
        for ids in rows:
            tiny_models.logits(model, ids)
    if mode == "replaying":
        with torch.no_grad():
            for i, module in enumerate(routers(model)):  # they would choose others now
                module.weight.copy_(torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(i)))

    def gradients(checkpointed):
        _checkpointed(model, checkpointed)
        model.zero_grad()
        with getattr(recorder, mode)():
            loss = sum(model(input_ids=ids, labels=ids, use_cache=False).loss for ids in rows)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    want, got = gradients(False), gradients(True)
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def test_equal_logits_with_other_experts_cannot_be_told_apart(model):
    recorder, rows = RouterRecorder(model), [tiny_models.tokens(1, 9, seed=n) for n in (1, 2)]
    with recorder.recording():
        for ids in rows:
            tiny_models.logits(model, ids)
    with torch.no_grad():
        for module in routers(model):
            module.weight.zero_()
    _checkpointed(model, True)
    older = torch.ones((), requires_grad=True).clone()
    with pytest.raises(ReplayError, match="tell them apart"), recorder.replaying():
        sum(model(input_ids=ids, labels=ids, use_cache=False).loss for ids in rows).backward()
    # What is left of that backward in torch's queue crashes the interpreter at its end. An older graph comes last in
    # that queue, so it takes the rest out first.
    older.backward()


def test_replay_that_does_not_fit(model):
    recorder, ids = RouterRecorder(model), tiny_models.tokens(1, 9)
    with recorder.recording():
        tiny_models.logits(model, ids)
    with pytest.raises(ReplayError, match=r"expected \[9, 2\] as recorded, got 8 tokens and 2 slots"):
        with recorder.replaying():
            tiny_models.logits(model, ids[:, :8])
    with pytest.raises(ReplayError, match="expected 1 calls as recorded, got 0"):
        with recorder.replaying():
            pass
    with pytest.raises(ReplayError, match="expected 1 calls as recorded, got one more"):
        with recorder.replaying():
            tiny_models.logits(model, ids)
            tiny_models.logits(model, ids)
    path = next(iter(recorder.choices))
    first = recorder.choices[path][0].ids
    first[0, 0] = 3 - first[0, 0]
    with pytest.raises(ReplayError, match="got changed ones"):
        with recorder.replaying():
            tiny_models.logits(model, ids)
    state = recorder.state_dict()
    next(iter(state.values()))[0][0, 0] = 4
    recorder.load_state_dict(state)
    with pytest.raises(ValueError, match=r"replay_ids\[0,0\]: expected -1 or 0..3, got 4"):
        with recorder.replaying():
            tiny_models.logits(model, ids)
    for wrong, got in ((5, "int"), ({**state, path: 5}, "int"), ({**state, path: [first.float()]}, r"\['float32 \[")):
        with pytest.raises(ReplayError, match=got):
            recorder.load_state_dict(wrong)
    with recorder.recording(), pytest.raises(ReplayError, match="one recorder at a time"):
        with RouterRecorder(model).recording():
            pass
    with pytest.raises(ValueError, match="expected routers under tidegate.patch"):
        RouterRecorder(tiny_models.build("qwen3_5_moe"))
