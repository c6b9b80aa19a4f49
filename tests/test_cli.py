"""The command `tidegate`: help, errors that say what to do, exit codes, and the programs on tiny models."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch

from tidegate import _interrupt, cli
from tidegate.cli import memory

transformers = pytest.importorskip("transformers")
NAMES = [module.NAME for module in cli.COMMANDS]


@pytest.mark.parametrize("name", NAMES)
def test_help_has_an_example_defaults_and_exit_codes(name, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert f"  tidegate {name}" in text.split("examples:")[1] and "exit codes:" in text


def test_no_command_and_unknown_ones(run, capsys):
    code, out, _ = run()
    assert code == 2 and all(name in out for name in NAMES)
    for wrong in (["frobnicate"], ["fuzz", "--seconds", "0"], ["check"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(wrong)
        assert stop.value.code == 2
    assert "number from 1 on" in capsys.readouterr().err


def test_help_does_not_wait_for_torch():
    code = "import sys, tidegate.cli.command, tidegate.cli.memory; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("how", ["-m", "script"])
def test_interrupted_while_torch_is_imported(tmp_path, how):
    """One line and exit code 130, as later on. The torch here says when it is imported, and takes its time."""
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    script = tmp_path / "tidegate"
    script.write_text("import sys\nfrom tidegate.cli import main\nsys.exit(main())\n")  # as pip installs it
    package = pathlib.Path(cli.__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(package)])}
    command = [sys.executable, *(["-m", "tidegate"] if how == "-m" else [str(script)]), "report"]
    process = subprocess.Popen(
        command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == "tidegate: interrupted\n" and process.returncode == 130


def test_ctrl_c_of_other_programs_is_theirs(tmp_path):
    code = "import signal, tidegate; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
    signal.signal(signal.SIGINT, _interrupt._end)
    try:
        assert cli.main(["--version"]) == 0
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # the command has it again
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_report(run, folder):
    code, out, _ = run("report")
    assert code == 0 and "isa in use" in out and "qwen3_5_moe" in out
    code, out, _ = run("report", "qwen3_5")
    assert code == 0 and "tried on a tiny random model" in out and " err " in out
    code, out, _ = run("report", folder, "--json")
    document = json.loads(out)
    assert code == 0 and document["torch"] == torch.__version__
    layers = [row for row in document["patch"] if row["op"] == "gdn_layer"]
    assert [row["status"] for row in layers] == ["installed"] * 3


def test_check_of_a_family_and_of_a_folder(run, folder):
    code, out, _ = run("check", "qwen3_5")
    assert code == 0 and "verdict: all equal" in out
    code, out, _ = run("check", folder, "--dtype", "float32")
    assert code == 0 and "Qwen3_5MoeForCausalLM, patched" in out


def test_check_that_fails_has_exit_code_1(run, monkeypatch):
    """Transformers alone lets packed samples see each other, which check finds."""
    code, out, _ = run("check", "qwen3_5", "--unpatched")
    assert code == 1 and "WRONG" in out


@pytest.mark.parametrize("name", ["check", "generate", "train"])
def test_a_missing_folder(run, name, tmp_path):
    more = {"check": [], "generate": ["--prompt", "a"], "train": ["--data", "x.jsonl"]}[name]
    code, _, err = run(name, tmp_path / "nothing", *more)
    assert code == 2 and "no such folder" in err and "hf download" in err
    (tmp_path / "file").write_text("")
    code, _, err = run(name, tmp_path / "file", *more)
    assert code == 2 and "expected a folder, got a file" in err
    if name != "check":
        code, _, err = run(name, "qwen3_5", *more)
        assert code == 2 and "names of families are for report and check" in err
    (tmp_path / "empty").mkdir()
    code, _, err = run(name, tmp_path / "empty", *more)
    assert code == 2 and "no config.json" in err


def test_an_instruction_set_that_is_not_there():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tidegate", "check", "qwen3_5"],
        env=os.environ | {"TIDEGATE_ISA": "avx3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("tidegate: TIDEGATE_ISA: expected one of scalar, avx2")


def test_data_without_samples(run, folder, tmp_path):
    (tmp_path / "data.jsonl").write_text("\n\n")
    code, _, err = run("train", folder, "--bytes", "--data", tmp_path / "data.jsonl", "--output", tmp_path / "out")
    assert code == 2 and "has no samples" in err and "one object a line" in err


def test_models_that_are_not_supported(run, tmp_path):
    transformers.LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path / "llama")
    code, _, err = run("check", tmp_path / "llama")
    assert code == 2 and "llama model: it has no linear-attention layers" in err and "qwen3_next" in err
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "of_tomorrow"}')
    code, _, err = run("check", tmp_path / "odd")
    assert code == 2 and "cannot read it" in err and "pip install -U transformers" in err


def test_too_little_memory(run, folder, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 1e6)
    code, _, err = run("generate", folder, "--prompt", "a", "--bytes")
    assert code == 3 and "needs about" in err and "--ignore-memory" in err
    code, _, _ = run("generate", folder, "--prompt", "a", "--bytes", "--tokens", 2, "--ignore-memory")
    assert code == 0


def test_memory_counts_parameters(folder):
    from tidegate.check.tiny import build

    model = build("qwen3_5_moe", vocab_size=256)
    count = sum(p.numel() for p in model.parameters())
    assert memory.count_parameters(folder) == count
    assert memory.estimate(count, "bfloat16") - memory.SLACK == 2 * count
    assert memory.estimate(count, "float32", count) - memory.SLACK == 16 * count
    assert memory.logits(4096, 248320) == 3 * 4 * 4096 * 248320


def test_generate_says_what_the_model_says(run, folder):
    arguments = ("generate", folder, "--bytes", "--prompt", "tide", "--tokens", 12, "--dtype", "float32")
    code, ours, err = run(*arguments)
    assert code == 0 and "prefill of 4 tokens" in err and "decode" in err
    code, theirs, err = run(*arguments, "--unpatched")
    assert code == 0 and ours == theirs and "Transformers alone" in err
    code, _, err = run("generate", folder, "--prompt", "tide")
    assert code == 2 and "--bytes" in err
    code, _, err = run(*arguments[:3], "--prompt", "")
    assert code == 2 and "at least one token" in err


def test_options_of_the_environment_and_a_reader_that_leaves(run, folder, monkeypatch):
    with monkeypatch.context() as changed:
        changed.setenv("TIDEGATE_GDN", "maybe")
        code, _, err = run("report", folder)
        assert code == 2 and "TIDEGATE_GDN" in err and "Traceback" not in err
    call = f"tidegate.cli.main(['generate', {str(folder)!r}, '--bytes', '--prompt', 'tide', '--tokens', '3'])"
    program = f"import sys, tidegate.cli; sys.exit({call})"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        err = process.stderr.read().decode()
        assert process.wait() == 0 and "Traceback" not in err and "BrokenPipe" not in err, err


@pytest.mark.parametrize("how", [("--packed",), (), ("--packed", "--lora")])
def test_train(run, folder, tmp_path, how):
    if "--lora" in how:
        pytest.importorskip("peft")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"the tide turns at {i} "}) + "\n" for i in range(12)))
    out = tmp_path / "out"
    arguments = ("train", folder, "--bytes", "--data", data, "--output", out, "--epochs", 8, "--lr", "1e-2")
    code, text, _ = run(*arguments, "--batch-tokens", 150, "--dtype", "float32", *how)
    assert code == 0 and "saved to" in text
    first, last = (float(x) for x in text.split("loss ")[-1].split(";")[0].split(" -> "))
    assert last < first - 0.1
    assert (out / ("adapter_config.json" if "--lora" in how else "config.json")).is_file()
    assert run(*arguments)[0] == 2  # the folder is not empty


def test_train_refuses_bad_data(run, folder, tmp_path):
    data = tmp_path / "data.jsonl"
    arguments = ("train", folder, "--bytes", "--data", data, "--output", tmp_path / "out")
    assert run(*arguments)[0] == 2
    data.write_text('{"text": "fine"}\n{"txt": "wrong"}\n')
    code, _, err = run(*arguments)
    assert (
        code == 2
        and f"{data}:2: TypeError: expected text, messages or input_ids, got " in err
        and '{"text": "..."}' in err
    )
    code, _, err = run(*arguments, "--packed", "--unpatched")
    assert code == 2 and "see each other" in err
    for line, text in {
        "[1, 2]": 'expected an object like {"text": ...}, got a list',
        '{"text": 5}': "text: expected a string",
        '{"input_ids": [1, 2, 3], "labels": [1, 2]}': "labels: expected 3 numbers",
        '{"input_ids": [1, 2.5]}': "input_ids: expected a list of integers",
        '{"input_ids": [1, 2], "labels": [1, -100]}': "no sample with a label",
        '{"input_ids": [1, 999999]}': "token id 999999: expected 0 to",
    }.items():
        data.write_text(line + "\n")
        code, _, err = run(*arguments)
        assert code == 2 and text in err, (line, err)
    data.write_bytes(b'{"text": "caf\xe9"}\n')
    code, _, err = run(*arguments)
    assert code == 2 and "not UTF-8" in err


def test_train_reads_what_json_allows(tmp_path):
    from tidegate.cli.train import read_lines

    data = tmp_path / "data.jsonl"
    data.write_text('\ufeff{"text": "a\u2028b\u0085c"}\n', encoding="utf-8")
    assert [json.loads(line) for line in read_lines(data) if line] == [{"text": "a\u2028b\u0085c"}]


def test_train_finds_out_early_where_it_cannot_write(run, folder, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "the tide turns"}\n')
    for output in (data / "sub", "/proc/tidegate"):
        code, _, err = run("train", folder, "--bytes", "--data", data, "--output", output)
        assert code == 3 and "--output" in err, err
    with pytest.raises(SystemExit) as stop:
        run("train", folder, "--data", data, "--threads", "0")
    assert stop.value.code == 2


def test_batches_hold_what_they_may():
    from tidegate.cli.train import batches

    samples = [{"input_ids": [1] * n, "labels": [1] * n} for n in (5, 1, 9, 30, 2, 2)]
    for padded in (False, True):
        found = list(batches(samples, 12, 0, padded))
        assert sorted(len(s["input_ids"]) for b in found for s in b) == [1, 2, 2, 5, 9, 30]
        for batch in found:
            sizes = [len(s["input_ids"]) for s in batch]
            assert len(batch) == 1 or (max(sizes) * len(sizes) if padded else sum(sizes)) <= 12
