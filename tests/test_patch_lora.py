"""LoRA on the experts of patched models: PEFT's numbers without merged weights."""

import copy

import pytest
import tiny_models
import torch
from compare import assert_bits, error

import tidegate
from tidegate import moe
from tidegate.patch import lora

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.skipif(tidegate.isa() == "fallback", reason="patch leaves experts to the model")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FAMILIES = ("qwen3_5_moe", "qwen3_next")


def build(family="qwen3_5_moe", dtype=torch.float32, parameters=EXPERTS, modules=("q_proj",), **options):
    """A tiny model with LoRA whose B is not zero."""
    model = tiny_models.build(family, dtype=dtype)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_parameters=parameters, target_modules=list(modules), init_lora_weights=False
    )
    torch.manual_seed(3)
    model = peft.get_peft_model(model, config, **options)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def step(model, ids):
    model.zero_grad()
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    return out.logits.detach(), out.loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    """Numbers in the largest tensor that an operator makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        views = any(a.alias_info is not None for a in (*func._schema.returns, *func._schema.arguments))
        for t in () if views else torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.numel())
        return out


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parameters", [EXPERTS, EXPERTS[:1], EXPERTS[1:]])
def test_logits_loss_and_gradients(family, parameters):
    stock, patched = (build(family, parameters=parameters) for _ in range(2))
    handle = tidegate.patch(patched, ops=("experts",))
    rows = handle.report().only(op="experts")
    assert [row.mechanism for row in rows] == ["B:registry"] + ["I:lora"] * 4
    assert {row.status for row in rows} == {"installed"}
    ids = tiny_models.tokens(2, 40)
    logits, loss, gradients = step(stock, ids)
    got, got_loss, found = step(patched, ids)
    assert error(got, logits) < 1e-5 and abs(got_loss - loss) < 1e-5 * abs(loss)
    assert found.keys() == gradients.keys() and any("experts" in name for name in found)
    for name, want in gradients.items():
        assert error(found[name], want) < 1e-5, name
    handle.undo()
    again = step(patched, ids)
    assert_bits("logits", again[0], logits)


def test_merged_weights_are_never_formed():
    """The weights of all experts are larger than anything else in this model, and nothing of that size is made."""
    changes = dict(hidden_size=64, moe_intermediate_size=64, num_experts=16)
    model = tiny_models.build("qwen3_5_moe", **changes)
    config = peft.LoraConfig(r=2, target_parameters=EXPERTS, target_modules=["q_proj"])
    model = peft.get_peft_model(model, config)
    ids, weights = tiny_models.tokens(1, 9), 16 * 64 * 64
    with Sizes() as seen:
        step(model, ids)
    assert seen.largest >= 2 * weights  # PEFT alone
    with tidegate.patch(model, ops=("experts",)), Sizes() as seen:
        step(model, ids)
    assert seen.largest < weights


def test_several_adapters_disabled_and_merged():
    ids = tiny_models.tokens(1, 12)
    stock, patched = build(), build()
    for model in (stock, patched):
        torch.manual_seed(7)
        config = peft.LoraConfig(
            r=2, lora_alpha=2, target_parameters=EXPERTS, target_modules=["q_proj"], init_lora_weights=False
        )
        model.add_adapter("other", config)
        for name, parameter in model.named_parameters():
            if ".other." in name:
                torch.nn.init.normal_(parameter, std=0.2)
    tidegate.patch(patched, ops=("experts",))
    seen = {}
    for adapters in (["default"], ["other"], ["default", "other"]):
        for model in (stock, patched):
            model.base_model.set_adapter(adapters)
        want = tiny_models.logits(stock, ids)
        assert error(tiny_models.logits(patched, ids), want) < 1e-5, adapters
        seen[tuple(adapters)] = want
    assert error(seen["default",], seen["other",]) > 1e-2 < error(seen["default", "other"], seen["other",])
    with stock.disable_adapter(), patched.disable_adapter():
        plain = tiny_models.logits(stock, ids)
        assert error(tiny_models.logits(patched, ids), plain) < 1e-5
    for model in (stock, patched):
        model.base_model.set_adapter(["default"])
        model.merge_adapter()
    want = tiny_models.logits(stock, ids)
    assert error(tiny_models.logits(patched, ids), want) < 1e-5
    assert error(want, plain) > 1e-2
    patched.unmerge_adapter()
    assert error(tiny_models.logits(patched, ids), seen["default",]) < 1e-5


def test_patched_before_peft_wraps_it():
    """PEFT then merges, and the merged weight of the moment is what is used."""
    model = tiny_models.build("qwen3_5_moe")
    tidegate.patch(model, ops=("experts",))
    config = peft.LoraConfig(r=4, lora_alpha=6, target_parameters=EXPERTS, target_modules=["q_proj"])
    model = peft.get_peft_model(model, config)
    ids = tiny_models.tokens(1, 12)
    before = tiny_models.logits(model, ids)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name and "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.2)
    changed = tiny_models.logits(model, ids)
    assert error(changed, before) > 1e-2
    handle = tidegate.patch(model, ops=("experts",), replace=True)  # equal settings, but the model is another now
    layers = sum(type(module).__name__ == "Qwen3_5MoeSparseMoeBlock" for module in model.modules())
    assert len(handle.report().only(op="experts", status="installed", mechanism="I:lora")) == layers > 0
    tidegate.unpatch(model)
    assert error(tiny_models.logits(model, ids), changed) < 1e-5


def test_bf16_and_copies():
    model = build(dtype=torch.bfloat16)
    tidegate.patch(model, ops=("experts",))
    ids = tiny_models.tokens(1, 12)
    want = tiny_models.logits(model, ids)
    twin = copy.deepcopy(model)
    assert_bits("logits", tiny_models.logits(twin, ids), want)
    tidegate.unpatch(twin)
    assert error(tiny_models.logits(twin, ids), want) < 0.05


def test_hooks_inside_are_respected():
    """Somebody who watches the experts module still sees its calls: PEFT then merges."""
    model = build()
    tidegate.patch(model, ops=("experts",))
    ids = tiny_models.tokens(1, 12)
    want = tiny_models.logits(model, ids)
    seen = []
    for module in model.modules():
        if hasattr(module, "gate_up_proj") and hasattr(module, "act_fn"):
            module.register_forward_hook(lambda *_: seen.append(1))
    assert error(tiny_models.logits(model, ids), want) < 1e-5
    assert len(seen) == 4


def test_transposed_storage():
    """[E,K,N] weights: PEFT's addition is transposed as well."""

    class Experts(torch.nn.Module):
        is_transposed = True

        def __init__(self):
            super().__init__()
            self.gate_up_proj = torch.nn.Parameter(torch.randn(3, 8, 10) / 4, requires_grad=False)
            self.down_proj = torch.nn.Parameter(torch.randn(3, 5, 8) / 4, requires_grad=False)
            self.act_fn, self.num_experts = torch.nn.SiLU(), 3

        def forward(self, x, ids, weights):
            return moe.experts_forward(self, x, ids, weights)

    model = torch.nn.ModuleDict({"experts": Experts()})
    names = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=2, target_parameters=names, target_modules=[], init_lora_weights=False)
    wrapper = peft.get_peft_model(model, config).base_model.model["experts"]
    experts, additions = lora.additions(wrapper)
    call = torch.randn(7, 8), torch.randint(0, 3, (7, 2)), torch.rand(7, 2)
    assert error(moe.experts_forward(experts, *call, **additions), wrapper(*call)) < 1e-6
