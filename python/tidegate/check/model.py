"""tidegate.check: a whole model against itself, in seconds."""

import contextlib
import copy

import torch

from tidegate.check import isolation, original, run
from tidegate.check.short import shortened
from tidegate.check.table import Report
from tidegate.errors import PackedInputError

LENGTHS = (9, 1, 66)  # shorter than two convolutions, one token, longer than a chunk of 64
PROMPT = 62  # tokens of the longest sample that are run before there is a cache
SMALL = 1 << 20  # elements of a parameter whose gradient is compared; those of the embeddings depend on all others


@contextlib.contextmanager
def _noting(report, what):
    """An exception becomes a row; a model that says that it cannot be packed is not wrong."""
    try:
        yield
    except PackedInputError as error:
        report.add(what, ok=True, note=f"refused: {error}")
    except Exception as error:  # noqa: BLE001  (a foreign backend: whatever it says)
        text = str(error).strip().split("\n")[0]
        report.add(what, ok=False, note=f"{type(error).__name__}: {text[:160]}")


def _in_fp32(packed, parameters):
    """The same runs by a copy of the model in fp32."""
    names = {id(p): name for name, p in packed.model.named_parameters()}
    wide = copy.copy(packed)
    wide.model = copy.deepcopy(packed.model).float()
    twins = dict(wide.model.named_parameters())
    return isolation.separate_runs(wide, [twins[names[id(p)]] for p in parameters])


def _add_original(report, handle, packed, parameters, patched, limit):
    """Patched and original round at different places. In 16 bits that can be more than the limit, because a router
    sends some tokens to other experts. Then the middle one of the tokens may be twice as far from fp32 as that of the
    original: a wrong operator changes them all."""
    try:
        with original.unpatched(handle):
            before = isolation.separate_runs(packed, parameters)
            rows = isolation.compare(Report(""), "patched vs original", patched, before, limit)
            narrow = limit > run.LIMITS[torch.float32]
            truth = None if rows.ok or not narrow else _in_fp32(packed, parameters)
    except Exception as error:  # noqa: BLE001
        text = str(error).strip().split("\n")[0]
        note = f"not compared: the original raises {type(error).__name__}: {text[:100]}"
        report.add("patched vs original", ok=True, note=note)
        return
    logits, gradients = rows.rows
    if truth is not None and not logits.ok:
        ours, theirs = (run.middle_error_of(found[0], truth[0]) for found in (patched, before))
        note = f"the middle token is {ours:.1e} from fp32, that of the original {theirs:.1e}"
        logits = logits._replace(ok=ours <= 2 * theirs, note=note)
    if truth is not None and not gradients.ok:
        ours, theirs = (isolation.farthest(found[1:], truth[1:]) for found in (patched, before))
        note = f"{ours:.1e} from fp32, those of the original {theirs:.1e}"
        gradients = gradients._replace(ok=ours <= 2 * theirs, note=note)
    report.rows += [logits, gradients]


def _add_padding(report, model, ids, limit):
    """Two rows of different length, padded on either side, against the shorter one alone."""
    short, width = ids[:-3], len(ids)
    alone = run.logits_of(model, short, use_cache=False)
    for side in ("left", "right"):
        begin = width - len(short) if side == "left" else 0
        rows = torch.stack([torch.zeros_like(ids), ids])
        rows[0, begin : begin + len(short)] = short
        mask = torch.zeros_like(rows)
        mask[0, begin : begin + len(short)] = 1
        mask[1] = 1
        with torch.no_grad():
            out = model(input_ids=rows, attention_mask=mask, use_cache=False)
        found = run.first_row(out)[begin : begin + len(short)]
        report.add(f"padded on the {side} vs unpadded", run.error_of(found, alone), limit)


def _add_cache(report, model, ids, limit):
    """A prompt and then the rest, token by token and in one piece, against all at once."""
    full = run.logits_of(model, ids, use_cache=False)
    for what, step in (("token by token", 1), ("in two pieces", len(ids))):
        cache, found, begin = None, [], 0
        while begin < len(ids):
            end = PROMPT if begin == 0 else min(begin + step, len(ids))
            with torch.no_grad():
                out = model(input_ids=ids[None, begin:end], past_key_values=cache, use_cache=True)
            cache, begin = out.past_key_values, end
            found.append(run.first_row(out))
        report.add(f"with a cache, {what}, vs at once", run.error_of(torch.cat(found), full), limit)


def check(model: torch.nn.Module, *, seed: int = 0, show: bool = True) -> Report:
    """Compares a model with itself and, if it is patched, with what it was; prints and returns a table with a verdict.

    Patched and original, packed and separate, padded and unpadded, with a cache and at once: logits, and gradients in
    the first two. Works on models that are not patched too, and on those of other backends: it then says what leaks.
    """
    if not hasattr(model, "get_input_embeddings"):
        raise TypeError(f"check: model: expected a model of Transformers, got {type(model).__name__}")
    handle = original.handle_of(model)
    with run.undisturbed(model, seed), shortened(model) as note:
        run.require_weights("check", model)
        report = Report(f"{type(model).__name__}, {'patched' if handle else 'not patched'}{note}")
        limit = run.limit_of(model)
        packed = isolation.Packed(model, list(LENGTHS))
        parameters = [p for p in model.parameters() if p.requires_grad and p.numel() <= SMALL]
        separate = None
        with _noting(report, "forward and backward"):
            separate = isolation.separate_runs(packed, parameters)
        if separate is not None:
            if handle is not None:
                _add_original(report, handle, packed, parameters, separate, limit)
            with _noting(report, "packed vs separate"):
                packed.choose_inputs()
                isolation.compare_packed(report, packed, separate, parameters, limit)
                isolation.compare_with_cache(report, packed, separate[0], limit)
                if not report.ok:
                    isolation.add_parts(report, packed)
            with _noting(report, "padded vs unpadded"):
                _add_padding(report, model, packed.samples[2][:12], limit)
            with _noting(report, "with a cache vs at once"):
                _add_cache(report, model, packed.samples[2], limit)
    if show:
        print(report)
    return report
