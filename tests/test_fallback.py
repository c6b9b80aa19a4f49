"""Without the native library: the same functions, results, gradients and refusals, one warning, no other kernels."""

import functools
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys

import fallback_case as case
import fallback_rows
import pytest
import torch
from compare import assert_close, error

import tidegate
from tidegate import fallback
from tidegate.fallback.schemas import SCHEMAS

PACKAGE = pathlib.Path(tidegate.__file__).parent
TESTS = pathlib.Path(__file__).parent


def run(*arguments, path=PACKAGE.parent, **environment):
    """A fresh interpreter that finds the package under `path`; without a variable it has no TIDEGATE_*."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TIDEGATE_")}
    env["PYTHONPATH"] = os.pathsep.join([str(path), str(TESTS)])
    return subprocess.run(
        [sys.executable, *arguments], env=env | environment, capture_output=True, text=True, timeout=300
    )


def output(*arguments, **options):
    done = run(*arguments, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


FORCED = {"TIDEGATE_FORCE_FALLBACK": "1", "PYTHONWARNINGS": "ignore"}


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """Results of fallback_case.py in plain torch."""
    path = tmp_path_factory.mktemp("fallback") / "case.pt"
    output(str(TESTS / "fallback_case.py"), str(path), **FORCED)
    return torch.load(path)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Results and text of fallback_rows.py in plain torch."""
    path = tmp_path_factory.mktemp("fallback") / "rows.pt"
    text = output(str(TESTS / "fallback_rows.py"), str(path), **FORCED)
    return torch.load(path), text


@pytest.fixture(scope="module")
def native():
    return case.compute()


@functools.cache
def conv_truth(i, kind, activation, bias):
    return case.conv_truth(case.conv_problem(case.splits()[i], bias, case.DTYPES[kind]), activation)


@functools.cache
def rule_truth(i, kind):
    return case.rule_truth(case.rule_problem(case.splits()[i], case.DTYPES[kind]))


def largest(x, y):
    """Relative largest difference."""
    if x.numel() == 0:
        return 0.0
    return ((x.double() - y.double()).abs().max() / y.double().abs().max().clamp(min=1e-30)).item()


def test_schemas_are_those_of_the_native_library():
    listed = {str(torch._C.parse_schema("tidegate::" + schema)) for schema in SCHEMAS}
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("tidegate::")]
    known = {str(torch._C._get_schema(*(name.split(".") + [""])[:2])) for name in names}
    assert listed == known


def test_every_public_operator_has_a_kernel():
    missing = {name for name in tidegate._autograd.names if name not in fallback.KERNELS}
    stages = ("chunk_", "solve_tril", "recompute_w_u", "prepare_wy")
    assert all(name.startswith(stages) for name in missing), missing


@pytest.mark.parametrize("i", range(3))
def test_packed_agrees_with_native_and_truth_in_fp32(i, computed, native):
    for key in [key for key in native if key[1] == i and "fp32" in key]:
        for name, value in native[key].items():
            assert largest(computed[key][name], value) <= 1e-5, (key, name)
        if key[0] == "rule with options":
            continue
        truth = rule_truth(i, "fp32") if key[0] == "rule" else conv_truth(i, *key[2:])
        for name, value in truth.items():
            assert_close(f"{key} {name}", computed[key][name], value, 1e-5)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("i", range(3))
def test_16_bit_results_are_as_good_as_rounding(i, kind, computed, native):
    """Errors against fp64 at most twice those of the rounded truth, largest and rms; sums stay wide."""
    dtype = case.DTYPES[kind]
    for key in [key for key in native if key[1] == i and kind in key and key[0] != "rule with options"]:
        truth = rule_truth(i, kind) if key[0] == "rule" else conv_truth(i, *key[2:])
        for name, value in truth.items():
            got = computed[key][name]
            assert got.dtype == native[key][name].dtype
            if value.numel() == 0:
                continue
            rounded = value.to(got.dtype)
            slack = 1e-5 if got.dtype == torch.float32 else 1e-6
            assert error(got, value) <= 2 * error(rounded, value) + slack, (key, name)
            assert largest(got, value) <= 2 * largest(rounded, value) + slack, (key, name)
    key = ("rule with options", i, kind)
    for name, value in native[key].items():
        assert largest(computed[key][name], value) <= 4 * torch.finfo(dtype).eps, (key, name)


@pytest.mark.parametrize("i", range(3))
def test_packed_equals_separate(i, computed):
    for kind, packed in (("conv", ("conv", i, "fp32", "silu", True)), ("rule", ("rule", i, "fp32"))):
        for name, value in computed[f"separate {kind}", i].items():
            assert largest(computed[packed][name], value) <= 1e-5, (kind, name)


def test_every_operator_agrees_with_native(rows):
    for name, calls in rows[0].items():
        for call, want in zip(calls, fallback_rows.results(name), strict=True):
            for got, value in zip(call, want, strict=True):
                assert (got.dtype, got.shape) == (value.dtype, value.shape), name
                limit = 2 * torch.finfo(value.dtype).eps if value.dtype in (torch.bfloat16, torch.float16) else 1e-5
                limit = 1 / 127 if value.dtype == torch.int8 else limit  # at a tie the last bit of silu decides
                assert largest(got, value) <= limit, name
                strides = ([s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (got, value))
                assert value.numel() == 0 or next(strides) == next(strides), name


def test_experts_accumulate_and_stay_apart(capsys):
    script = str(TESTS / "fallback_experts.py")
    assert output(script, **FORCED) == "experts done\n"
    runpy.run_path(script)
    assert capsys.readouterr().out == "experts done\n"


def test_wrong_input_is_refused_as_by_the_native_library(rows):
    assert rows[1] == "rows done\n"


EDGES = """
import torch, tidegate
from delta_rule_case import make, cut, run
torch.manual_seed(0)
p = make([40, 70, 3], HK=1, G=2, K=16, V=16)
want = run(p)["o"]
bad = {**p, "v": p["v"].clone()}
bad["v"][1, 50] = float("nan")                       # token 10 of the second sequence, second head
got = run(bad)["o"]
touched = got.isnan().any(-1)
assert touched[1, 50:110].all() and int(touched.sum()) == 60
rest = ~touched
assert torch.allclose(got[rest], want[rest], atol=1e-5)
reset = {**bad, "g": p["g"].clone()}
reset["g"][:, 60] = float("-inf")                    # nothing before token 20 of that sequence counts
got = run(reset)["o"]
assert not got[:, 60:].isnan().any()
alone = {k: v[:, 60:110] for k, v in reset.items() if k in ("q", "k", "v", "beta")}
alone |= {"g": p["g"][:, 60:110].clone(), "h0": None, "cu": [0, 50]}
assert torch.allclose(got[:, 60:110], run(alone)["o"], atol=1e-5)
inputs = [reset[n].clone().requires_grad_() for n in ("q", "k", "v", "g", "beta")]
o = tidegate.ops.chunk_gated_delta_rule_fwd(*inputs, cu_seqlens=torch.tensor(p["cu"]), layout="NTD")[0]
o[:, 60:].sum().backward()
assert not any(x.grad[:, 60:].isnan().any() for x in inputs) and not inputs[3].grad[:, 60].any()
x, w = torch.randn(9, 4), torch.randn(4, 4)
x[2] = float("nan")
y = tidegate.ops.causal_conv1d_fwd(x, w, cu_seqlens=torch.tensor([0, 4, 9]), layout="TND")[0]
assert not y[4:].isnan().any() and y[2:4].isnan().all()
with torch.autocast("cpu", torch.bfloat16):
    assert torch.equal(run(p)["o"], want)
try:
    tidegate.ops.solve_tril(torch.ones(2, 5, 3, 16))
except NotImplementedError as error:
    assert str(error).startswith("solve_tril: this operator needs the native library"), error
    print("edges done")
"""


COMPILED = """
import torch, tidegate
from tidegate.fla import causal_conv1d
def layer(x, w, g, beta, cu):
    y, _ = causal_conv1d(x, w, activation="silu", cu_seqlens=cu)
    q, k, v = y.unflatten(-1, (3, 2, 8)).unbind(2)
    o, _ = tidegate.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=cu)
    return tidegate.rms_norm(o, w[:8, 0])
def train(call):
    torch.manual_seed(0)
    inputs = torch.randn(1, 90, 48), torch.randn(48, 4), -torch.rand(1, 90, 2), torch.rand(1, 90, 2)
    leaves = [t.requires_grad_() for t in inputs]
    call(*leaves, torch.tensor([0, 20, 90])).square().sum().backward()
    return [t.grad for t in leaves]
for got, want in zip(train(torch.compile(layer, fullgraph=True, backend="aot_eager")), train(layer)):
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)
print("compiled")
"""


def test_compiles_in_one_graph():
    assert output("-c", COMPILED, **FORCED) == "compiled\n"


WARNED = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import tidegate, torch, tidegate.fla, tidegate.causal_conv1d
    for _ in range(2):
        tidegate.fla.l2norm(torch.ones(4))
        tidegate.rms_norm(torch.ones(2, 4), torch.ones(4))
        tidegate.report()
(warning,) = caught
assert warning.category is tidegate.errors.TidegateFallbackWarning
print(warning.message)
print(tidegate.report())
"""


def package_without_library(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "tidegate", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path / "tidegate" / "_tidegate.so"


def test_one_warning_with_cause_extent_and_remedy(tmp_path):
    library = package_without_library(tmp_path)
    for content in (None, b"no library"):
        if content is not None:
            library.write_bytes(content)
        text = output("-c", WARNED, path=tmp_path)
        assert f"not loaded: {library}: " in text and "Affected: all operators (causal_conv1d, " in text
        assert "slower" in text and "Remedy: reinstall tidegate" in text and "fla" not in text.split("Remedy")[1][:80]
        assert re.search(f"\nfallback +plain torch: the native library is not loaded: {library}", text)
    text = output("-c", WARNED, TIDEGATE_FORCE_FALLBACK="on")
    assert "TIDEGATE_FORCE_FALLBACK is set" in text and "Remedy: unset TIDEGATE_FORCE_FALLBACK" in text


FLAGS = """
import os
for fallback in ("1", "flase", "off"):  # an import that fails can be tried again
    os.environ.update(TIDEGATE_REQUIRE_NATIVE="1", TIDEGATE_FORCE_FALLBACK=fallback)
    try:
        import tidegate
        print(tidegate.report()["fallback"])
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_native_can_be_required(tmp_path):
    library = package_without_library(tmp_path)
    code = (
        "import tidegate, torch; print(tidegate.report()['fallback'])\ntidegate.rms_norm(torch.ones(4), torch.ones(4))"
    )
    done = run("-W", "error", "-c", code, path=tmp_path, TIDEGATE_REQUIRE_NATIVE="1")
    assert done.stdout == "no\n" and done.returncode == 1
    assert f"RuntimeError: tidegate: the native library is not loaded: {library}: " in done.stderr
    assert "TIDEGATE_REQUIRE_NATIVE forbids" in done.stderr
    both, typo, native = output("-c", FLAGS).splitlines()
    assert both.startswith("OptionError: TIDEGATE_REQUIRE_NATIVE and TIDEGATE_FORCE_FALLBACK are both on")
    assert typo.startswith("OptionError: TIDEGATE_FORCE_FALLBACK: expected 1/true/on/yes")
    assert native == "no"


def test_edges_beside_other_kernels(tmp_path):
    """NaN, resets, autocast, single stages. Other kernels are not even imported: a package of that name that cannot be
    imported changes nothing."""
    for name in ("fla", "causal_conv1d", "triton"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise AssertionError('imported')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.path.insert(0, {str(TESTS)!r})\n{EDGES}"
    assert output("-c", code, **FORCED) == "edges done\n"
