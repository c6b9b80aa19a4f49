"""What every release of Transformers must do with a patched model, flash-linear-attention importable or not: a forward,
a training step and generation on the CPU, without a crash and without a word about missing kernels."""

import logging
import os
import pathlib
import subprocess
import sys
import warnings

import pytest
import torch

pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402

import tidegate  # noqa: E402

FALLBACK = ("fast path", "falling back", "fallback", "flash-linear-attention", "causal-conv1d", "triton")


class Messages(logging.Handler):
    """What is logged and warned in a block."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        self.caught = warnings.catch_warnings(record=True)
        self.warned = self.caught.__enter__()
        warnings.simplefilter("always")
        for name in ("transformers", "fla"):
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(self, *error):
        for name in ("transformers", "fla"):
            logging.getLogger(name).removeHandler(self)
        self.lines += [str(warning.message) for warning in self.warned]
        self.caught.__exit__(*error)

    def about_fallback(self):
        return [line for line in self.lines if any(word in line.lower() for word in FALLBACK)]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_forward_training_and_generation(family):
    model, ids = tiny.build(family), tiny.tokens(2, 12)
    handle = tidegate.patch(model)
    with Messages() as messages:
        assert tiny.logits(model, ids).isfinite().all()
        model.train()
        loss, gradients = tiny.gradients(model, ids)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        optimizer.step()
        model.eval()
        out = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients.values())
    assert out.shape == (2, 20)
    assert not messages.about_fallback()
    assert tidegate.report()["fallback"] == "no"
    # Nothing was replaced behind our back, and the layers are really ours.
    assert sum("gdn_layer" in line for line in str(handle.report()).splitlines()) >= len(tiny.linear_layers(model))


NO_TRITON = """
import sys
sys.path.insert(0, sys.argv[1])
import fla, triton, tidegate, tiny_models as tiny

def launched(*args, **kwargs):
    raise AssertionError("a Triton kernel was launched")

for kind in (triton.runtime.jit.JITFunction, triton.runtime.autotuner.Autotuner):
    kind.run = launched
tidegate.register()
model, ids = tiny.build("qwen3_5", layers=2), tiny.tokens(2, 12)
handle = tidegate.patch(model)
assert handle.report()[0].status == "fallback"
tiny.gradients(model, ids)
model.generate(ids, max_new_tokens=3, do_sample=False)
"""


def test_no_triton_without_the_native_library():
    pytest.importorskip("fla")
    env = dict(os.environ, TIDEGATE_FORCE_FALLBACK="1")
    call = [sys.executable, "-W", "ignore", "-c", NO_TRITON, str(pathlib.Path(__file__).parent)]
    done = subprocess.run(call, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_package_for_gpus_does_not_matter():
    """Some releases choose flash-linear-attention by its being importable and crash without a GPU; ours do not."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    pytest.importorskip("fla")
    model, ids = tiny.build("qwen3_5"), tiny.tokens(1, 12)
    try:
        tiny.logits(model, ids)
        crashes = None
    except Exception as error:
        crashes = str(error)
    assert crashes is None or "driver" in crashes, crashes
    tidegate.patch(model)
    assert tiny.logits(model, ids).isfinite().all()
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 15)
