"""Packed input in training: compiled graphs, checkpointing, collators, Trainer; and the config of a patched model."""

import copy

import pytest
import tiny_models
import torch
from packed_case import assert_equal_runs, batch_of, gradients, packable, patched, samples, separate, together

import tidegate
from tidegate.errors import PackedInputError
from tidegate.packed import attention

pytest.importorskip("transformers")
LENGTHS = (24, 40)


@pytest.mark.slow
@pytest.mark.parametrize("backend, limit", [("aot_eager", 0.0), ("inductor", 1e-5)])
def test_compiled(backend, limit):
    ids, batch = batch_of(LENGTHS)
    torch._dynamo.reset()
    model = packable("qwen3_5", layers=2)  # one of each kind: compiling is slow
    if tiny_models.accepts(tiny_models.linear_layers(model)[0], "cache_position"):
        pytest.skip("models of this Transformers look at values and cannot be one graph")
    want = together(model, ids, **batch)
    got = together(torch.compile(model, fullgraph=True, backend=backend), ids, **batch)
    got = got[0], got[1], {name.removeprefix("_orig_mod."): value for name, value in got[2].items()}
    assert_equal_runs(got, want, limit)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    model = packable("qwen3_5").train()
    ids, batch = batch_of(LENGTHS)
    want = together(model, ids, **batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    got = together(model, ids, **batch)
    assert_equal_runs(got, want, 0.0)


def test_flattening_collator():
    """The packed loss is the mean of the separate losses, weighted by tokens."""
    import transformers

    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collate([{"input_ids": row.tolist()} for row in samples(LENGTHS)])
    model = packable("qwen3_5")
    assert_equal_runs(together(model, batch.pop("input_ids"), **batch), separate(model, LENGTHS))


def test_trainer(tmp_path):
    """tidegate.pack as the collator of a Trainer: the loss of the first step is that of separate runs."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = packable("qwen3_5")
    want = separate(model, LENGTHS)[1]
    model.zero_grad()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        max_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        learning_rate=1e-3,
        save_strategy="no",
        disable_tqdm=True,
    )
    data = [{"input_ids": row.tolist()} for row in samples(LENGTHS)]
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, data_collator=tidegate.pack)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(float(want), rel=1e-4)  # the log rounds
    assert losses[1] < losses[0]


def test_one_config_two_models():
    config = tiny_models.config_of("qwen3_5")
    first, second = (tiny_models.build("qwen3_5", config=config) for _ in range(2))
    before = first.config._attn_implementation
    ids = tiny_models.tokens()
    want = tiny_models.logits(second, ids)
    handle = tidegate.patch(first)
    assert second.config is config and config._attn_implementation == before
    assert first.config._attn_implementation == first.model.config._attn_implementation == "tidegate_packed"
    assert torch.equal(tiny_models.logits(second, ids), want)
    assert "tidegate" not in first.config.to_json_string()
    handle.undo()
    assert first.config is config and all(
        module.config is config for module in first.modules() if "config" in module.__dict__
    )


def test_undo_keeps_what_the_user_changed():
    model, handle = patched("qwen3_5")
    model.config.use_cache = False
    handle.undo()
    assert model.config.use_cache is False and model.config._attn_implementation == "sdpa"


def test_another_name_is_reported_as_lost():
    model, handle = patched("qwen3_5")
    model.set_attn_implementation("eager")
    assert [row.status for row in handle.report().only(op="attention")] == ["lost"]
    assert tidegate.patch(model) is handle
    assert [row.status for row in handle.report().only(op="attention")] == ["installed"]
    model.set_attn_implementation("eager")
    handle.undo()
    assert model.config._attn_implementation == "eager"


def test_a_copy_is_packed_and_can_be_undone():
    model = packable("qwen3_5")
    ids, batch = batch_of(LENGTHS)
    want = tiny_models.logits(model, ids, **batch)
    twin = copy.deepcopy(model)
    assert twin.config is not model.config and twin.config is twin.model.config
    assert torch.equal(tiny_models.logits(twin, ids, **batch), want)
    tidegate.unpatch(twin)
    assert twin.config._attn_implementation == twin.model.config._attn_implementation == "sdpa"
    assert torch.equal(tiny_models.logits(model, ids, **batch), want)
    stock = tiny_models.build("qwen3_5")
    assert torch.equal(tiny_models.logits(twin, ids), tiny_models.logits(stock, ids))


def test_by_name_without_a_patch():
    """The name alone changes nothing: positions that restart are seen as before, and boundaries are honoured."""
    attention.register()
    model = tiny_models.build("qwen3_5", layer_types=["full_attention"] * 4)
    ids, batch = batch_of(LENGTHS)
    positions = dict(position_ids=batch["position_ids"], use_cache=False)
    want = tiny_models.logits(model, ids, **positions)
    model.set_attn_implementation("tidegate")
    assert torch.equal(tiny_models.logits(model, ids, **positions), want)
    cu = batch["cu_seq_lens_q"]
    got = tiny_models.logits(model, ids, cu_seq_lens_q=cu, use_cache=False)
    assert tiny_models.relative(got, want) <= 1e-5
    with pytest.raises(PackedInputError, match="tidegate.patch the model"):
        model(ids, cu_seq_lens_q=cu, **positions)


def test_padding_is_kept():
    """Left padding through our attention and mask function."""
    model, handle = patched("qwen3_5", ops="attention")
    ids = tiny_models.tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    got = tiny_models.logits(model, ids, attention_mask=mask)
    handle.undo()
    assert torch.equal(got, tiny_models.logits(model, ids, attention_mask=mask))


def test_generation_is_not_disturbed():
    model, handle = patched("qwen3_5", ops="attention")
    ids = tiny_models.tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = dict(attention_mask=mask, max_new_tokens=8, do_sample=False)
    got = model.generate(ids, **options)
    handle.undo()
    assert torch.equal(got, model.generate(ids, **options))


def test_gradients_of_a_step_without_packing():
    model, handle = patched("qwen3_5", ops="attention")
    ids = tiny_models.tokens(2, 12)
    model(ids, labels=ids).loss.backward()
    got = gradients(model)
    handle.undo()
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    assert all(torch.equal(got[name], value) for name, value in gradients(model).items())
