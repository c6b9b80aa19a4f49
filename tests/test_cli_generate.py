"""`tidegate generate` and what it is given: adapters, damaged files, numbers out of range; and what it says it did."""

import json

import pytest
import torch

from tidegate import cli
from tidegate.cli import generate, models

transformers = pytest.importorskip("transformers")


@pytest.fixture
def adapter(folder, tmp_path):
    """A folder with an adapter of the tiny model that changes what it says."""
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "out_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", model.eval()


def arguments(folder, *more):
    return ["generate", folder, "--bytes", "--prompt", "tide", "--tokens", 6, "--dtype", "float32", *more]


def test_an_adapter_is_loaded_on_its_base(run, folder, adapter):
    path, model = adapter
    code, ours, err = run(*arguments(path))
    ids = torch.tensor([list(b"tide")])
    with torch.no_grad():
        expected = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False)[0]
    assert code == 0 and "tidegate" in err and "adapter" in err
    assert ours.rstrip("\n") == bytes(expected.tolist()).decode(errors="replace")
    assert ours != run(*arguments(folder))[1]


def test_an_adapter_without_its_base(run, folder, adapter, monkeypatch):
    path, _ = adapter
    code, _, err = run("check", path)
    assert code == 2 and "adapter, which only generate takes" in err
    settings = json.loads((path / "adapter_config.json").read_text())
    for base, text in (("nowhere/base", "no such folder"), (None, "names no base_model_name_or_path")):
        (path / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": base}))
        code, _, err = run(*arguments(path))
        assert code == 2 and text in err and (base or "names no") in err and "Traceback" not in err
    other = path.parent / "other"
    transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder, hidden_size=16), dtype=torch.float32
    ).save_pretrained(other)
    (path / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": str(other)}))
    code, _, err = run(*arguments(path))
    assert code == 2 and "does not fit its base model" in err
    find_spec = cli.command.importlib.util.find_spec
    monkeypatch.setattr(
        cli.command.importlib.util, "find_spec", lambda name, *a: None if name == "peft" else find_spec(name, *a)
    )
    code, _, err = run(*arguments(path))
    assert code == 3 and "pip install peft" in err


def test_only_check_and_report_offer_families(run, tmp_path):
    for name, more in (("generate", ["--prompt", "a"]), ("train", ["--data", "x"])):
        code, _, err = run(name, "qwen3_5", *more)
        assert code == 2 and "no such folder" in err and "family" not in err
    for name in ("check", "report"):
        assert "name a family: qwen3_5" in run(name, tmp_path / "nothing")[2]


OUT_OF_RANGE = [("--temperature", value) for value in ("-1", "nan", "inf", "x")]
OUT_OF_RANGE += [("--seed", value) for value in ("-1", "nan", "1.5", str(2**64))]


@pytest.mark.parametrize("option, value", OUT_OF_RANGE)
def test_numbers_out_of_range(folder, option, value, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([str(a) for a in arguments(folder, option, value)])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and f"argument {option}: invalid number from 0" in err and "Traceback" not in err


def test_the_ends_of_the_ranges():
    logits, generator = torch.tensor([0.0, 300.0, 299.0]), torch.Generator().manual_seed(2**64 - 1)
    assert cli.command.seed(str(2**64 - 1)) == 2**64 - 1
    for temperature in (0.0, 5e-324, 1e-30):
        assert generate.choose(logits, temperature, generator) == 1
    assert generate.choose(logits, 1e300, generator) in (0, 1, 2)


def test_damaged_files(run, folder, tmp_path):
    copy = tmp_path / "copy"
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(copy)
    (copy / "tokenizer.json").write_text("{ broken")
    (copy / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    code, _, err = run("generate", copy, "--prompt", "a")
    assert code == 2 and "tokenizer cannot be read" in err and "Traceback" not in err
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    for wrong, text in (
        (whole[:-100], f"expected {len(whole)} bytes, got {len(whole) - 100}"),
        (whole[: size // 2], "not a safetensors file"),
        (whole[:8] + b"x" + whole[9:], "header cannot be read"),
        (b"", "not a safetensors file"),
    ):
        weights.write_bytes(wrong)
        code, _, err = run(*arguments(copy))
        assert code == 2 and text in err and "again" in err and "Traceback" not in err, err


def test_weights_of_another_model(run, folder, tmp_path):
    copy = tmp_path / "copy"
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    code, _, err = run(*arguments(copy))
    assert code == 2 and "cannot be loaded" in err and "Traceback" not in err


def test_the_switch_that_is_off_is_named(run, folder, monkeypatch):
    monkeypatch.setenv("TIDEGATE_PATCH", "0")
    code, _, err = run(*arguments(folder))
    assert code == 0 and "Transformers alone (nothing is installed: enabled is off (TIDEGATE_PATCH))" in err
    monkeypatch.delenv("TIDEGATE_PATCH")
    monkeypatch.setenv("TIDEGATE_FUSED_OPS", "0")
    code, _, err = run(*arguments(folder))
    assert code == 2 and "cannot be patched" in err and "TIDEGATE_FUSED_OPS" in err


def test_the_last_byte_is_shown(run, folder, monkeypatch):
    """A character of two bytes that is cut off, after one that is whole."""
    monkeypatch.setattr(generate, "stream", lambda *_: ((byte, 0.1) for byte in "é".encode() + b"\xc3"))
    code, out, _ = run(*arguments(folder))
    assert code == 0 and out == "tideé\N{REPLACEMENT CHARACTER}\n"


def test_known_families_are_those_of_this_transformers(monkeypatch):
    monkeypatch.setattr(models, "families", lambda: ("qwen3_next", "of_tomorrow"))
    assert models.known() == "qwen3_next"
