"""`tidegate bench` and `tidegate fuzz`: wrong calls, and results that were measured before."""

import json
import pathlib
import types

import pytest

from tidegate import cli
from tidegate.cli import fuzz

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "bench/results/zen3-2-cores.json"


@pytest.mark.parametrize(
    "wrong, text",
    [
        (["--items", "L2,NOSUCH"], "--items: expected names from C1, "),
        (["--engines", "nosuch"], "--engines: expected names from tidegate, "),
        (["--conditions", "nosuch"], "--conditions: expected names from as shipped, "),
        (["--limits", "nosuch"], "--limits: expected the program tidegate_limits, got "),
        (["--json", "/proc/nothing/x.json"], "/proc/nothing"),
    ],
)
def test_bench_answers_wrong_calls_in_a_line(capfd, wrong, text):
    code = cli.main(["bench", "--items", "L2", *wrong])
    err = capfd.readouterr().err
    assert code == 2 and text in err and len(err.splitlines()) == 1


def test_bench_shows_what_was_measured(run, tmp_path):
    document = json.loads(RESULTS.read_text())
    code, out, _ = run("bench", "--from", RESULTS, "--markdown", tmp_path / "new" / "tables.md")
    tables = (tmp_path / "new" / "tables.md").read_text()
    assert code == 0 and "vllm_cpu" in out and "vllm_cpu" in tables
    assert all(f"{name}: " in out and f"**{name}: " in tables for name in document["options"]["items"])


def test_bench_refuses_what_it_cannot_show(run, tmp_path):
    other = tmp_path / "other.json"
    for text in ("{", "[]", '{"conditions": {"memory kept": {"items": {"of_tomorrow": {}}}}}'):
        other.write_text(text)
        code, out, err = run("bench", "--from", other, "--markdown", tmp_path / "tables.md")
        assert code == 2 and "not what --json writes" in err and not out
    assert not (tmp_path / "tables.md").exists()
    code, _, err = run("bench", "--from", tmp_path / "nothing")
    assert code == 2 and "no such file" in err
    code, _, err = run("bench", "--from", RESULTS, "--growth")
    assert code == 2 and "nothing is measured" in err


def test_fuzz_wants_problems_in_its_file(run, tmp_path):
    """Answered before the program is looked for, which refuses it too (fuzz.empty in tests/fuzz)."""
    lines = tmp_path / "lines.txt"
    for text in ("", "# nothing but a remark\n\n"):
        lines.write_text(text)
        code, _, err = run("fuzz", "--file", lines)
        assert code == 2 and "at least one problem, got none" in err
    code, _, err = run("fuzz", "--file", tmp_path / "nothing")
    assert code == 2 and "no such file" in err


def test_fuzz_takes_the_instruction_set_of_the_environment(monkeypatch):
    commands = []
    monkeypatch.setattr(fuzz, "program", lambda: "tidegate_fuzz")
    done = types.SimpleNamespace(returncode=0)
    monkeypatch.setattr(fuzz.subprocess, "run", lambda command, check: commands.append(command) or done)
    monkeypatch.setenv("TIDEGATE_ISA", "avx2")
    for given in ([], ["--isa", "scalar"]):
        assert cli.main(["fuzz", "--count", "1", *given]) == 0
    monkeypatch.delenv("TIDEGATE_ISA")
    assert cli.main(["fuzz", "--count", "1"]) == 0
    of_environment, given, neither = commands
    assert of_environment[-2:] == ["--isa", "avx2"] and given[-2:] == ["--isa", "scalar"] and "--isa" not in neither
