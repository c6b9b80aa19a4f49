"""What a stranger relies on: tables that show the results, links that exist, types that match, a quick import."""

import ast
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import tidegate

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md")])
PACKAGE = pathlib.Path(tidegate.__file__).parent


def test_tables_show_the_stored_results():
    done = subprocess.run([sys.executable, ROOT / "bench/tables.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_make_targets_in_the_docs_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        for name in re.findall(r"`make ([a-z-]+)", page.read_text()):
            assert name in targets, (page.name, name)


def test_readme_example_runs():
    text = (ROOT / "README.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "cu_seqlens=cu" in block)
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102


def test_public_api_is_documented():
    for name in tidegate.__all__:
        value = getattr(tidegate, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            assert value.__doc__, name


def stubs():
    """Functions of the stub: name -> (parameter names, those with a default)."""
    found = {}
    for node in ast.parse((PACKAGE / "__init__.pyi").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name != "__getattr__":
            a = node.args
            plain = [p.arg for p in [*a.posonlyargs, *a.args]]
            optional = plain[len(plain) - len(a.defaults) :]
            optional += [p.arg for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is not None]
            found[node.name] = ([*plain, *(p.arg for p in a.kwonlyargs)], optional)
    return found


def test_types_are_those_of_the_functions():
    assert (PACKAGE / "py.typed").is_file()
    assert len(stubs()) > 20
    for name, (names, optional) in stubs().items():
        parameters = inspect.signature(getattr(tidegate, name)).parameters
        real = [p for p in parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        assert [p.name for p in real] == names, name
        assert [p.name for p in real if p.default is not p.empty] == optional, name


def test_import_is_quick():
    """What tidegate adds to torch: below 0.3 s. CPU time, best of three: other tests run beside this one."""
    code = "import torch, time; t = time.process_time(); import tidegate; print(time.process_time() - t)"
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout) for _ in range(3)
    ]
    assert min(times) < 0.3, times
