"""Trainer and accelerate run patched models without further ado."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import tiny_models as tiny  # noqa: E402
from test_patch_models import T32, stock  # noqa: E402

import tidegate  # noqa: E402


def samples():
    return [{"input_ids": row, "labels": row} for row in tiny.tokens(8, 24)]


@pytest.mark.parametrize("when", ["before", "inside"])
def test_trainer(tmp_path, when):
    """Losses of a few steps equal those of the stock model; the saved model has the stock names."""
    losses = []
    for patched in (False, True):
        model = tiny.build("qwen3_5", layers=2) if patched else stock("qwen3_5", layers=2)
        if patched and when == "before":
            tidegate.kernelize_model(model, use_fallback=False)
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=samples())
        if patched and when == "inside":
            assert tidegate.patch(trainer).installed  # an object that holds the model
        trainer.train()
        losses.append(torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))
    assert len(losses[0]) == 3 and tiny.relative(losses[1], losses[0]) < 1e-4  # logged with four digits
    names = list(model.state_dict())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert list(loaded.state_dict()) == names and not tidegate.report(loaded)


def test_accelerate():
    from accelerate import Accelerator

    losses = []
    for patched in (False, True):
        model = tiny.build("qwen3_5", layers=2) if patched else stock("qwen3_5", layers=2)
        accelerator = Accelerator(cpu=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        if patched:
            assert tidegate.patch(model).installed
        losses.append([])
        for step in range(3):
            with accelerator.accumulate(model):
                ids = tiny.tokens(2, 24, seed=step)
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses[-1].append(loss.detach())
    assert tiny.relative(torch.stack(losses[1]), torch.stack(losses[0])) < T32
