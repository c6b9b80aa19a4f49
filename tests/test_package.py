"""The package around the operators: report, choice of instruction set, a missing library, fork, concurrent callers."""

import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch
from compare import assert_all_bits

import tidegate

PACKAGE = pathlib.Path(tidegate.__file__).parent
ISAS = ["scalar", "avx2", "avx512", "avx512_bf16"]


def python(code, path=PACKAGE.parent, **environment):
    """Runs code in a fresh interpreter that finds the package under `path`; returns its output."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TIDEGATE_")}
    env |= {"PYTHONPATH": str(path), **environment}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_report():
    report = tidegate.report()
    assert report["torch"] == torch.__version__ and report["tidegate"] == tidegate.__version__
    assert report["native library"] == str(PACKAGE / "_tidegate.so")
    available = report["isa available"].split(", ")
    assert available == [isa for isa in ISAS if isa in available] and available[0] == "scalar"
    assert report["isa in use"] in available and report["isa in use"] == tidegate.isa()
    assert report["threads"].startswith(f"{torch.get_num_threads()} ")
    for key, value in report.items():
        assert f"{key} " in str(report) and str(value) in str(report)
    assert repr(report) == str(report) and len(str(report).splitlines()) == len(report)


def test_versions_agree():
    assert tidegate.__version__ in ("0+unknown", tidegate.report()["native version"])


def test_set_isa(isa):
    assert tidegate.isa() == isa == tidegate.report()["isa in use"]
    missing = [name for name in ISAS if name not in tidegate.report()["isa available"].split(", ")]
    for name in ["avx9", "", *missing]:
        with pytest.raises(ValueError, match=f"set_isa: expected one of scalar.*, got {name}$"):
            tidegate.set_isa(name)
    assert tidegate.isa() == isa


def test_environment_chooses_the_instruction_set():
    code = "import tidegate, torch; tidegate.ops.l2norm_fwd(torch.ones(4)); r = tidegate.report()"
    code += "; print(tidegate.isa(), '|', r['isa in use'], '|', r['TIDEGATE_ISA'])"
    assert python(code, TIDEGATE_ISA="scalar").strip() == "scalar | scalar | scalar"


WRONG_ISA = """
import tidegate, torch
print(tidegate.report()["isa in use"])
for call in (tidegate.isa, lambda: tidegate.ops.l2norm_fwd(torch.ones(4)), lambda: tidegate.patch(torch.nn.ReLU())):
    try:
        call()
    except ValueError as error:
        print(error)
"""


def test_environment_with_a_wrong_instruction_set():
    available = tidegate.report()["isa available"]
    for name in ["avx9", *[isa for isa in ISAS if isa not in available.split(", ")][:1]]:
        report, *errors = python(WRONG_ISA, TIDEGATE_ISA=name).splitlines()
        assert len(errors) == 3
        for text in (report.removeprefix("none: "), *errors):
            assert text.startswith(f"TIDEGATE_ISA: expected one of {available}") and text.endswith(f", got {name}")


WITHOUT_LIBRARY = """
import tidegate, torch
import tidegate.fla, tidegate.causal_conv1d
print(tidegate.report()["native library"])
x = torch.ones(2, 4, 4)
for call in (
    lambda: tidegate.ops.l2norm_fwd(x),
    lambda: tidegate.rms_norm(x, x[0, 0]),
    lambda: tidegate.fla.l2norm(x),
    lambda: tidegate.causal_conv1d.causal_conv1d_fn(x, x[0]),
    lambda: tidegate.chunk_gated_delta_rule(x[None], x[None], x[None], x, x),
    tidegate.chunk_size,
    tidegate.isa,
    lambda: tidegate.set_isa("scalar"),
):
    try:
        call()
    except RuntimeError as error:
        print(error)
"""


def test_missing_library(tmp_path):
    """What happens where the fallback is forbidden; test_fallback.py has the rest."""
    shutil.copytree(PACKAGE, tmp_path / "tidegate", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    report, *errors = python(WITHOUT_LIBRARY, tmp_path, TIDEGATE_REQUIRE_NATIVE="1").splitlines()
    library = tmp_path / "tidegate" / "_tidegate.so"
    assert report.startswith(f"not loaded: {library}: ") and "No such file" in report
    assert len(errors) == 8
    for text in errors:
        assert text.startswith(f"tidegate: the native library is not loaded: {library}: ")


def test_unknown_operator():
    with pytest.raises(AttributeError, match="tidegate.ops has no operator 'l3norm'"):
        _ = tidegate.ops.l3norm


def work(seed):
    """Forward and backward of several operators on a problem of its own."""
    generator = torch.Generator().manual_seed(seed)
    tokens = 50 + 37 * seed
    x = torch.randn(tokens, 256, generator=generator).requires_grad_()
    weight = torch.randn(256, 4, generator=generator).requires_grad_()
    y, _ = tidegate.ops.causal_conv1d_fwd(x, weight, activation="silu", layout="TND", head_num=4)
    n, rstd = tidegate.ops.l2norm_fwd(y)
    g, beta = tidegate.ops.gdn_gating_fwd(x[:, :4], x[:, 4:8], weight[:4, 0], layout="TND")
    z = tidegate.ops.rms_norm_gated_fwd(n, y, weight[:64, 0])[0]
    with torch.no_grad():
        o = tidegate.ops.chunk_gated_delta_rule_fwd(n[:1], n[1:2], y[2:], g.T[:2], beta.T[:2], layout="NTD")[0]
    loss = z.square().sum() + (g * beta).sum()
    loss.backward()
    return {"y": y.detach(), "z": z.detach(), "g": g.detach(), "o": o, "dx": x.grad, "dweight": weight.grad}


def test_concurrent_callers_get_serial_results():
    want = [work(seed) for seed in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            for got, expected in zip(pool.map(work, range(8)), want, strict=True):
                assert_all_bits(got, expected)


FORK = """
import os, sys, torch, tidegate
torch.set_num_threads(2)
x = torch.randn(4000, 256)
want = tidegate.ops.l2norm_fwd(x)[0]
child = os.fork()
if child == 0:
    torch.set_num_threads(1)  # as DataLoader workers do: torch's OpenMP pool does not survive a fork
    os._exit(0 if torch.equal(tidegate.ops.l2norm_fwd(x)[0], want) else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert torch.equal(tidegate.ops.l2norm_fwd(x)[0], want)
print("child", status)
"""


def test_fork_after_use():
    assert python(FORK).strip() == "child 0"
