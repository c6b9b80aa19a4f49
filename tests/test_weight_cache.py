"""Copies of frozen experts (option moe_cache): used only for weights that are what they were."""

import copy
import io
import os

import pytest
import tiny_models
import torch
from compare import assert_bits, error

import tidegate
from tidegate.weight_cache import ATTRIBUTE, WeightCache, cache_of

pytestmark = pytest.mark.skipif(tidegate.isa() == "fallback", reason="patch leaves experts to the model")
IDS = tiny_models.tokens(2, 40)  # 160 pairs for 4 experts: enough rows that weights would be turned


def build(cached=True, dtype=torch.float32):
    model = tiny_models.build("qwen3_5_moe", dtype=dtype).requires_grad_(False)
    tidegate.patch(model, ops=("experts",), options={"moe_cache": cached})
    return model


def experts(model):
    return [module for module in model.modules() if hasattr(module, "gate_up_proj") and hasattr(module, "act_fn")]


def held(model):
    return sum(cache_of(module).bytes for module in experts(model))


def fresh(model):
    """What the model computes without copies."""
    with tidegate.patch(copy.deepcopy(model), ops=("experts",), replace=True) as handle:
        return tiny_models.logits(handle.model, IDS)


def test_off_unless_asked_for():
    model = build(cached=False)
    tiny_models.logits(model, IDS)
    assert not any(ATTRIBUTE in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_and_memory_in_the_report(dtype):
    model = build(dtype=dtype)
    want = tiny_models.logits(build(False, dtype), IDS)
    assert_bits("logits", tiny_models.logits(model, IDS[:1, :3]), tiny_models.logits(build(False, dtype), IDS[:1, :3]))
    assert held(model) == 0  # few rows: weights are used as they are
    assert_bits("logits", tiny_models.logits(model, IDS), want)
    if tidegate.isa() == "avx512_bf16" and dtype == torch.bfloat16:
        assert held(model) == 0  # its kernel never turns a weight
        return
    size = sum(p.numel() * p.element_size() for m in experts(model) for p in m.parameters())
    assert held(model) == size
    (row,) = tidegate.report(model).only(op="experts")
    assert row.reason == f"copies of frozen weights: {size / 2**20:.1f} MiB"
    before = [cache_of(m)._entries["down"].copy for m in experts(model)]
    assert_bits("logits", tiny_models.logits(model, IDS), want)
    assert all(cache_of(m)._entries["down"].copy is b for m, b in zip(experts(model), before, strict=True))
    tidegate.unpatch(model)
    assert not any(ATTRIBUTE in module.__dict__ for module in model.modules())


def in_place(module):
    module.gate_up_proj.mul_(1.5)


def through_data(module):
    module.down_proj.data.mul_(1.5)


def other_data(module):
    module.gate_up_proj.data = module.gate_up_proj.data * 1.5


def other_data_at_the_same_address(module):
    """Freed and taken again: the address says nothing."""
    new = module.gate_up_proj.data.flatten()[::1].clone() * 1.5
    shape = module.gate_up_proj.shape
    module.gate_up_proj.data = torch.empty(0)
    module.gate_up_proj.data = new.view(shape)


def other_parameter(module):
    module.down_proj = torch.nn.Parameter(module.down_proj * 1.5, requires_grad=False)


def loaded(module):
    module.load_state_dict({name: 1.5 * p for name, p in module.state_dict().items()})


def assigned(module):
    module.load_state_dict({name: 1.5 * p for name, p in module.state_dict().items()}, assign=True)


def optimizer_step(module):
    module.requires_grad_(True)
    for p in module.parameters():
        p.grad = torch.randn_like(p)
    torch.optim.AdamW(module.parameters(), lr=0.1, fused=True).step()
    module.requires_grad_(False)


CHANGES = [
    in_place,
    through_data,
    other_data,
    other_data_at_the_same_address,
    other_parameter,
    loaded,
    assigned,
    optimizer_step,
]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change):
    model = build()
    before = tiny_models.logits(model, IDS)
    with torch.no_grad():
        for module in experts(model):
            change(module)
    got = tiny_models.logits(model, IDS)
    assert error(got, before) > 1e-2
    assert_bits("logits", got, fresh(model))
    assert held(model) > 0


def test_memory_that_is_freed_and_taken_again():
    """Round after round at the same address, with the same version, shape and type."""
    model, plain = build(), build(cached=False)
    for i in range(50):
        for module, other in zip(experts(model), experts(plain), strict=True):
            new = torch.randn(module.down_proj.shape, generator=torch.Generator().manual_seed(i))
            module.down_proj.data = torch.empty(0)
            module.down_proj.data, other.down_proj.data = new, new
        assert_bits(f"round {i}", tiny_models.logits(model, IDS), tiny_models.logits(plain, IDS))
    assert held(model) > 0


def test_another_type():
    model = build()
    tiny_models.logits(model, IDS)
    model.to(torch.bfloat16)
    assert_bits("logits", tiny_models.logits(model, IDS), fresh(model))


def test_a_write_of_one_number_needs_invalidate():
    model = build()
    before = tiny_models.logits(model, IDS)
    for module in experts(model):
        module.gate_up_proj.data[:, 1, 1] += 5  # between two numbers of the sample
    assert_bits("logits", tiny_models.logits(model, IDS), before)  # documented: nobody can see it
    size = held(model)
    assert tidegate.invalidate(model) == size and held(model) == 0
    assert_bits("logits", tiny_models.logits(model, IDS), fresh(model))
    assert tidegate.invalidate(experts(model)[0]) == size // 4


def test_never_with_gradients():
    model = build()
    tiny_models.logits(model, IDS)
    size = held(model)
    x = torch.randn(160, 32, requires_grad=True)
    module, ids = experts(model)[0], torch.randint(0, 4, (160, 2))
    cache = cache_of(module)
    cache._entries["down"].copy.zero_()  # whoever uses it is seen
    module(x, ids, torch.rand(160, 2)).sum().backward()
    assert x.grad.abs().max() > 0
    assert held(model) == size
    module.requires_grad_(True)
    with torch.no_grad():
        assert module(x, ids, torch.rand(160, 2)).abs().max() > 0
    assert cache.bytes == 0  # a weight that may change is not kept


def test_copies_and_files_hold_no_copies():
    model = build()
    want = tiny_models.logits(model, IDS)
    twin = copy.deepcopy(model)
    assert held(twin) == 0
    assert_bits("logits", tiny_models.logits(twin, IDS), want)
    # Of the experts alone: beside the package kernels, a whole model cannot be written, patched or not.
    experts = [m for m in model.modules() if isinstance(m.__dict__.get(ATTRIBUTE), WeightCache)]
    file = io.BytesIO()
    torch.save(experts, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert len(loaded) == len(experts) > 0
    assert all(not isinstance(m.__dict__.get(ATTRIBUTE), WeightCache) for m in loaded)


def test_lora_merged_or_not_is_never_stale():
    peft = pytest.importorskip("peft")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = tiny_models.build("qwen3_5_moe")
    config = peft.LoraConfig(r=2, target_parameters=names, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    handle = tidegate.patch(model, ops=("experts",), options={"moe_cache": True})
    with torch.no_grad():
        results = [tiny_models.logits(model, IDS)]
        for action in (model.merge_adapter, model.unmerge_adapter):
            action()
            results.append(tiny_models.logits(model, IDS))
        with model.disable_adapter():
            results.append(tiny_models.logits(model, IDS))
    handle.undo()
    for i, action in ((0, None), (1, model.merge_adapter), (2, model.unmerge_adapter)):
        if action is not None:
            action()
        assert error(results[i], tiny_models.logits(model, IDS)) < 1e-5
    with model.disable_adapter():
        assert error(results[3], tiny_models.logits(model, IDS)) < 1e-5
    assert error(results[0], results[3]) > 1e-2


@pytest.mark.parametrize("order", ["before", "after"])
def test_fsdp_resharding(order, tmp_path):
    """Gathered weights come back into the same tensor with the same version."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = tiny_models.build("qwen3_5_moe").requires_grad_(False)
        if order == "before":
            tidegate.patch(model, ops=("experts",), options={"moe_cache": True})
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        if order == "after":
            tidegate.patch(model, ops=("experts",), options={"moe_cache": True})
        before = tiny_models.logits(model, IDS)
        with torch.no_grad():
            for module in experts(model):
                module.down_proj.to_local().mul_(1.5)
        changed = tiny_models.logits(model, IDS)
        assert error(changed, before) > 1e-2
        tidegate.unpatch(model)
        assert error(changed, tiny_models.logits(model, IDS)) < 1e-5
    finally:
        dist.destroy_process_group()


def test_the_switch_of_the_environment(monkeypatch):
    monkeypatch.setitem(os.environ, "TIDEGATE_MOE_CACHE", "1")
    model = tiny_models.build("qwen3_5_moe").requires_grad_(False)
    tidegate.patch(model, ops=("experts",))
    tiny_models.logits(model, IDS)
    assert held(model) > 0
