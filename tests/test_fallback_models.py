"""Patched models without the native library: what they compute on plain torch, and where that is forbidden."""

import os
import pathlib

import pytest
from test_fallback import FORCED, PACKAGE, TESTS, output, package_without_library, run

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
SITE = str(pathlib.Path(transformers.__file__).parents[1])


MODELS = """
import sys, torch, tidegate, tiny_models as tiny
import warnings
warnings.simplefilter("ignore")
from tidegate.patch.selftest import stock_forward

family = sys.argv[1]
stock, ids = tiny.build(family), tiny.tokens(2, 70)
for layer in tiny.linear_layers(stock):
    layer.forward = stock_forward(layer).__get__(layer)
patched = tiny.build(family)
tidegate.patch(patched)
assert tiny.relative(tiny.logits(patched, ids), tiny.logits(stock, ids)) <= 1e-5
exact = tiny.build(family).double()
if hasattr(exact, "set_experts_implementation"):
    exact.set_experts_implementation("eager")
tidegate.patch(exact)
(loss, got), (_, want), (truth_loss, truth) = (tiny.gradients(model, ids) for model in (patched, stock, exact))
assert abs(loss - truth_loss) <= 1e-5 * abs(truth_loss) and got.keys() == want.keys()
for name, gradient in truth.items():
    # Some are sums that nearly vanish and have few digits in any fp32 model: as good as the stock model will do.
    assert tiny.relative(got[name], gradient) <= max(1e-5, 2 * tiny.relative(want[name], gradient)), name
options = dict(max_new_tokens=8, do_sample=False)
assert torch.equal(patched.generate(ids[:, :20], **options), stock.generate(ids[:, :20], **options))
assert tidegate.report()["fallback"].startswith("plain torch")
print("model done")
"""


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_patched_models_on_plain_torch(family):
    """Logits, gradients and generation of a patched model without the native library are those of the stock model."""
    path = os.pathsep.join([str(PACKAGE.parent), SITE])
    assert output("-c", MODELS, family, path=path, **FORCED) == "model done\n"


def test_patch_raises_where_native_is_required(tmp_path):
    library = package_without_library(tmp_path)
    code = "import tidegate, tiny_models as tiny; tidegate.patch(tiny.build('qwen3_5'))"
    path = os.pathsep.join([str(tmp_path), SITE])
    done = run("-c", code, path=path, TIDEGATE_REQUIRE_NATIVE="1")
    assert done.returncode == 1
    assert f"RuntimeError: tidegate: the native library is not loaded: {library}: " in done.stderr


PACKED = "(test_packed_is_separate and (qwen3_5 or qwen3_next) and not moe) or test_sources_give_the_same_bits"


def test_packed_models_on_plain_torch():
    """The tests of packed models, in a process that has only plain torch."""
    path = os.pathsep.join([str(PACKAGE.parent), SITE])
    tests = str(TESTS / "test_packed_model.py")
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", tests, "-k", PACKED, path=path, **FORCED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
