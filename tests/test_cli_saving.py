"""What `tidegate train` saves: whole at any time, after Ctrl-C and on a full disk, and enough memory for an adapter."""

import json
import os
import signal

import pytest

import tidegate
from tidegate.cli import adapters, memory, saving

transformers = pytest.importorskip("transformers")


@pytest.fixture
def arguments(folder, tmp_path):
    """A call of train with six steps; the result goes to tmp_path/out."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"the tide turns at {i}"}) + "\n" for i in range(6)))
    return ["train", folder, "--bytes", "--data", data, "--output", tmp_path / "out", "--batch-tokens", 20, "--packed"]


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def weight(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).lm_head.weight.detach()


def at_step(monkeypatch, number, action):
    """Calls action before the step of this number computes its loss."""
    real, calls = tidegate.pack, []

    def pack(batch):
        calls.append(batch)
        if len(calls) == number:
            action()
        return real(batch)

    monkeypatch.setattr(tidegate, "pack", pack)


@pytest.mark.parametrize("lora", [False, True])
def test_ctrl_c_saves_what_is_trained(run, arguments, folder, tmp_path, monkeypatch, lora):
    if lora:
        pytest.importorskip("peft")
    at_step(monkeypatch, 4, lambda: os.kill(os.getpid(), signal.SIGINT))
    code, out, err = run(*arguments, "--lr", "1e-2", *(["--lora"] if lora else []))
    assert code == 130 and "interrupted: what 3 steps trained is saved to" in err and "Traceback" not in err
    assert names(tmp_path) == ["data.jsonl", "out"]
    if lora:
        assert "adapter_model.safetensors" in names(tmp_path / "out")
    else:
        assert not weight(tmp_path / "out").equal(weight(folder))


def test_ctrl_c_before_the_first_step_saves_nothing(run, arguments, tmp_path, monkeypatch):
    at_step(monkeypatch, 1, lambda: os.kill(os.getpid(), signal.SIGINT))
    code, _, err = run(*arguments)
    assert code == 130 and "nothing saved" in err and names(tmp_path) == ["data.jsonl"]


def test_ctrl_c_waits_for_the_end_of_an_update():
    done = []
    with pytest.raises(KeyboardInterrupt), saving.uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        done.append(True)
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_waits_also_where_the_block_fails():
    with pytest.raises(KeyboardInterrupt), saving.uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        raise OSError


def test_ctrl_c_around_the_last_save_loses_nothing(run, arguments, tmp_path, monkeypatch):
    """Before a part is written, and again while Ctrl-C is answered."""
    real, calls = saving.save, []

    def save(*parts):
        os.kill(os.getpid(), signal.SIGINT)
        calls.append(parts)
        real(*parts)

    monkeypatch.setattr(saving, "save", save)
    code, _, err = run(*arguments)
    assert code == 130 and len(calls) == 1 and "steps trained is saved to" in err
    weight(tmp_path / "out")


def test_saves_on_the_way_and_goes_on_alike(run, arguments, tmp_path, monkeypatch):
    saved, real = [], saving.save
    monkeypatch.setattr(saving, "save", lambda *parts: (real(*parts), saved.append(weight(tmp_path / "out"))))
    assert run(*arguments, "--save-every", 2)[0] == 0
    assert len(saved) == 3 and not saved[0].equal(saved[1]) and not saved[1].equal(saved[2])
    arguments[arguments.index(tmp_path / "out")] = tmp_path / "once"
    assert run(*arguments)[0] == 0
    assert weight(tmp_path / "once").equal(saved[2])
    assert names(tmp_path) == ["data.jsonl", "once", "out"]


@pytest.mark.parametrize("first", [True, False])
def test_a_full_disk_leaves_the_last_save_whole(run, arguments, tmp_path, monkeypatch, first):
    real, calls = transformers.PreTrainedModel.save_pretrained, []

    def save_pretrained(self, path, **options):
        real(self, path, **options)
        calls.append(path)
        if first or len(calls) > 1:
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", save_pretrained)
    code, _, err = run(*arguments, "--save-every", 2)
    assert code == 3 and "No space left" in err and "make room" in err and "Traceback" not in err
    if first:
        assert "nothing is saved" in err and names(tmp_path) == ["data.jsonl"]
    else:
        assert "saved before is whole" in err and names(tmp_path) == ["data.jsonl", "out"]
        weight(tmp_path / "out")


def test_a_save_on_the_way_that_fails_does_not_end_the_training(run, arguments, tmp_path, monkeypatch):
    real, calls = saving.save, []

    def save(*parts):
        calls.append(parts)
        if len(calls) == 1:
            raise saving.Failure("no room", "make some")
        real(*parts)

    monkeypatch.setattr(saving, "save", save)
    code, _, err = run(*arguments, "--save-every", 2)
    assert code == 0 and "not saved after step 2: no room" in err and len(calls) == 3
    weight(tmp_path / "out")


def test_a_save_that_cannot_be_renamed_takes_the_first_one_back(tmp_path, monkeypatch):
    class Part:
        def __init__(self, text):
            self.text = text

        def save_pretrained(self, path):
            path.mkdir()
            (path / "text").write_text(self.text)

    out, real = tmp_path / "out", os.rename
    saving.save(out, Part("one"))
    monkeypatch.setattr(os, "rename", lambda a, b: real(a, b) if ".partial" not in a.name else os.stat("/nothing"))
    with pytest.raises(saving.Failure, match="cannot save"):
        saving.save(out, Part("two"))
    assert (out / "text").read_text() == "one" and names(tmp_path) == ["out"]


def test_what_another_run_left_is_not_touched(run, arguments, tmp_path):
    (tmp_path / "out.partial").mkdir()
    code, _, err = run(*arguments)
    assert code == 2 and "out.partial is left" in err and names(tmp_path) == ["data.jsonl", "out.partial"]


def test_packed_samples_need_the_patch(run, arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("TIDEGATE_PATCH", "0")
    code, _, err = run(*arguments)
    assert code == 2 and "--packed needs the patch" in err and "TIDEGATE_PATCH" in err
    assert names(tmp_path) == ["data.jsonl"]


def test_ids_need_no_tokenizer_and_16_bits_are_named(run, arguments, folder, tmp_path):
    data = tmp_path / "ids.jsonl"
    data.write_text('{"input_ids": [1, 2, 3, 4]}\n')
    arguments = [data if argument == tmp_path / "data.jsonl" else argument for argument in arguments]
    arguments.remove("--bytes")
    code, _, err = run(*arguments, "--dtype", "bfloat16")
    assert code == 0 and "AdamW loses small steps in 16 bits" in err
    data.write_text('{"input_ids": [1, 2, 3, 4]}\n{"text": "tide"}\n')
    arguments[arguments.index(tmp_path / "out")] = tmp_path / "other"
    code, _, err = run(*arguments)
    assert code == 2 and "has no tokenizer" in err and "--bytes" in err


def test_memory_counts_the_adapter(run, arguments, folder, monkeypatch):
    pytest.importorskip("peft")
    model = adapters.adapt(transformers.AutoModelForCausalLM.from_pretrained(folder), 16)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert adapters.count(folder, 16) == count
    needed = []
    monkeypatch.setattr(memory, "ensure", lambda number, *_: needed.append(number) or 1 / 0)
    for rank in (16, 32):
        with pytest.raises(ZeroDivisionError):
            run(*arguments, "--lora", "--rank", rank)
    assert needed[1] - needed[0] == 16 * count  # fp32: parameter, gradient, two moments
