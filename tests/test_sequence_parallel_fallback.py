"""Sequence parallelism without the native library: the same plan, the operators in plain torch."""

import pytest
import ranks as harness

pytest.importorskip("transformers")

import test_sequence_parallel  # noqa: E402
from sequence_case import SUPPORTED, build, needs_support  # noqa: E402

import tidegate  # noqa: E402
from tidegate.errors import SequenceParallelError  # noqa: E402
from tidegate.parallel.handle import _heads  # noqa: E402
from tidegate.patch.engine import existing_handle  # noqa: E402

NAMES = ("exact-heads", "qwen3_5-two-chain-auto-2-41", "qwen3_5-two-scan-auto-2-41", "qwen3_5-two-chain-ring-2-pack")


def cases():
    assert tidegate.isa() == "fallback"
    return test_sequence_parallel.cases()


@pytest.mark.slow
@needs_support
def test_plain_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("TIDEGATE_FORCE_FALLBACK", "1")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    failures = harness.run(cases, NAMES, 2, tmp_path, "spawn")
    assert not any(failures.values()), failures


def test_a_release_that_cannot_is_refused():
    model = build("qwen3_5")
    options = existing_handle(model).settings.options
    if SUPPORTED:
        assert _heads(model, options).HK
        return
    with pytest.raises(SequenceParallelError, match="keeps arguments from its linear attention"):
        _heads(model, options)
