"""tidegate.check_isolation: does a sample of a packed batch change another one?"""

from collections.abc import Sequence
from typing import Any

import torch

from tidegate.check import parts, run
from tidegate.check.table import Report
from tidegate.errors import IsolationError, PackedInputError
from tidegate.packed import pack

METADATA = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
NO_CACHE = {"use_cache": False}


class Packed:
    """Samples as one packed row, and the way to call the model with it."""

    def __init__(self, model, lengths, inputs=None, arguments=None):
        self.model, self.inputs, self.note = model, inputs, ""
        self.arguments = NO_CACHE if arguments is None else arguments
        self.samples = [run.random_ids(model, length) for length in lengths]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        self.spans = [(end - length, end) for length, end in zip(lengths, ends, strict=True)]
        self.batch = pack(self.samples)
        self.ids = self.batch["input_ids"][0]

    def metadata(self):
        return {name: self.batch[name] for name in self.inputs} | self.arguments

    def choose_inputs(self):
        """Without a choice of the user: all there is, or position_ids alone if the model does not take the rest."""
        if self.inputs is not None:
            return
        self.inputs = METADATA
        try:
            run.logits_of(self.model, self.ids, **self.metadata())
        except PackedInputError:
            raise
        except Exception as error:  # noqa: BLE001  (a foreign backend: whatever it says)
            first = str(error).strip().split("\n")[0]
            self.inputs = ("position_ids",)
            self.note = f"with position_ids alone; cu_seq_lens and seq_idx gave {type(error).__name__}: {first[:100]}"


def separate_runs(packed, parameters):
    """Logits, gradients of the embeddings and of parameters, from runs of one sample each."""
    logits, inputs, sums = [], [], [torch.zeros_like(p) for p in parameters]
    for sample, (begin, end) in zip(packed.samples, packed.spans, strict=True):
        if begin == end:
            continue
        one = run.gradients_of(packed.model, sample, parameters, use_cache=False)
        logits.append(one[0])
        inputs.append(one[1])
        sums = [total + g for total, g in zip(sums, one[2], strict=True)]
    return torch.cat(logits), torch.cat(inputs), sums


def farthest(got, expected):
    """The largest error among tensors, or lists of them."""
    return max(run.error_of(g, e) for g, e in zip(got, expected, strict=True))


def compare(report, what, got, expected, limit, note=""):
    """Rows for the logits and gradients of two runs, added to the report, which is returned."""
    report.add(f"{what}: logits", run.error_of(got[0], expected[0]), limit, note=note)
    report.add(f"{what}: gradients", farthest(got[1:], expected[1:]), run.GRADIENTS * limit)
    return report


def compare_packed(report, packed, separate, parameters, limit):
    """Rows for the packed row against the runs of one sample each."""
    together = run.gradients_of(packed.model, packed.ids, parameters, **packed.metadata())
    compare(report, "packed vs separate", together, separate, limit, packed.note)


def _refuses(problem):
    """Whether an error refuses packed input: ours does, and that of Transformers which says so. Others are faults."""
    stock = isinstance(problem, ValueError) and "can't keep packed sequences apart" in str(problem)
    return isinstance(problem, PackedInputError) or stock


def compare_with_cache(report, packed, expected, limit):
    """A row for the same call with use_cache at its default, which fills a cache unless the model sees to it."""
    if packed.arguments is not NO_CACHE:  # the caller's own choice
        return
    what = "packed, use_cache at its default, vs separate: logits"
    metadata = {name: value for name, value in packed.metadata().items() if name not in NO_CACHE}
    try:
        error = run.error_of(run.logits_of(packed.model, packed.ids, **metadata), expected)
    except Exception as problem:  # noqa: BLE001  (a foreign backend: whatever it says)
        text = str(problem).strip().split("\n")[0]
        refused = _refuses(problem)
        note = f"{'refused' if refused else 'failed'}: {type(problem).__name__}: {text[:100]}"
        report.add(what, ok=refused, note=note)
        return
    report.add(what, error, limit, note="" if error <= limit else "samples see each other; pass use_cache=False")


def add_parts(report, packed, tolerance=0.0):
    """One row for each of conv, state and attention that the model has."""
    text_model = run.text_model(packed.model)
    if text_model is None:
        return
    calls = parts.capture(text_model, lambda: run.logits_of(packed.model, packed.ids, **packed.metadata()))
    for part, layers in parts.leaking_parts(calls, packed.spans, tolerance).items():
        note = f"samples see each other in layers {', '.join(map(str, layers))}" if layers else ""
        report.add(f"{part} keeps samples apart", ok=not layers, note=note)


def _add_replacements(report, packed, tolerance):
    """Replaces one sample after the other and looks for changes in the rest."""
    model, metadata = packed.model, packed.metadata()
    before = run.logits_of(model, packed.ids, **metadata)
    for i, (begin, end) in enumerate(packed.spans):
        if begin == end:
            continue
        ids = packed.ids.clone()
        ids[begin:end] = (ids[begin:end] + 1 + run.random_ids(model, end - begin) % (run.vocabulary(model) - 1)) % (
            run.vocabulary(model)
        )
        difference = (run.logits_of(model, ids, **metadata) - before).abs()
        difference[begin:end] = 0
        hit = [j for j, (b, e) in enumerate(packed.spans) if b < e and difference[b:e].max() > 0]
        note = f"changes the logits of {', '.join(map(str, hit))}" if hit else ""
        report.add(f"sample {i} replaced", float(difference.max() / before.abs().max()), tolerance, note=note)


def check_isolation(
    model: torch.nn.Module,
    lengths: Sequence[int] = (5, 1, 64, 0, 70),
    seed: int = 0,
    *,
    tolerance: float = 0.0,
    inputs: Sequence[str] | None = None,
    arguments: dict[str, Any] | None = None,
) -> Report:
    """Packs random samples of these lengths and raises IsolationError, with a table, if one of them changes another.

    Runs on any model of Transformers, patched or not. The table compares with separate runs (logits, gradients of all
    parameters), replaces one sample after the other (the others must keep every bit; `tolerance` is for kernels whose
    rows depend on the size of their group) and names the part that leaks: conv, state or attention. `inputs` names the
    arguments that describe the packing (default: all that tidegate.pack makes, or position_ids if the model refuses);
    `arguments` are the others of the packed call, as your training passes them. By default that is use_cache=False, and
    the logits are compared without it too: a model that fills a cache by default may leak there, or refuse.
    """
    run.require_weights("check_isolation", model)
    unknown = [name for name in inputs or () if name not in METADATA]
    if unknown:
        raise ValueError(f"check_isolation: inputs: expected names from {', '.join(METADATA)}, got {unknown[0]!r}")
    report = Report(f"isolation of packed samples of {', '.join(map(str, lengths))} tokens")
    with run.undisturbed(model, seed):
        packed = Packed(model, list(lengths), inputs, arguments)
        packed.choose_inputs()
        parameters = [p for p in model.parameters() if p.requires_grad]
        separate, limit = separate_runs(packed, parameters), run.limit_of(model)
        compare_packed(report, packed, separate, parameters, limit)
        compare_with_cache(report, packed, separate[0], limit)
        _add_replacements(report, packed, tolerance)
        add_parts(report, packed, tolerance)
    if not report.ok:
        error = IsolationError(str(report))
        error.report = report
        raise error
    return report
