"""Packed batches for whole models, and what separate runs of their samples give."""

from importlib.metadata import version

import pytest
import tiny_models
import torch

import tidegate

SPLITS = {"24|40": (24, 40), "0|1|63|64|65|200": (0, 1, 63, 64, 65, 200)}
METADATA = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


def samples(lengths, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, tiny_models.VOCABULARY, (length,), generator=generator) for length in lengths]


def batch_of(lengths, seed=5):
    """(input_ids, the other arguments) of a packed batch."""
    batch = tidegate.pack(samples(lengths, seed))
    return batch.pop("input_ids"), batch


def spans(lengths):
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [slice(end - length, end) for length, end in zip(lengths, ends, strict=True)]


def patched(family, layers=4, **options):
    """A tiny patched model, and its handle."""
    model = tiny_models.build(family, layers=layers)
    return model, tidegate.patch(model, **options)


def packs(model):
    """Whether the model claims to run packed input."""
    notes = [row.reason for row in tidegate.report(model).only(op="packed")]
    return not any("packed input is refused" in note for note in notes)


# The first release of Transformers in which a family runs packed input; None: not yet.
FIRST_PACKED = {
    "qwen3_5": (5, 2),
    "qwen3_5_moe": (5, 2),
    "qwen3_next": (5, 2),
    "olmo_hybrid": (5, 15),  # before, it convolves q, k and v in modules of their own
    "qwen4_exp": None,
}


def should_pack(family):
    release = tuple(int(part) for part in version("transformers").split(".")[:2])
    return FIRST_PACKED[family] is not None and release >= FIRST_PACKED[family]


def packable(family, **options):
    """A tiny patched model that runs packed input; skips only where this release of its family is known not to."""
    model, _ = patched(family, **options)
    assert packs(model) == should_pack(family), str(tidegate.report(model))
    if not should_pack(family):
        pytest.skip(f"{family} cannot be packed in this release")
    return model


def separate(model, lengths):
    """Logits [T,V], loss and gradients of the samples one by one, weighted as the packed loss weighs them."""
    rows = [row for row in samples(lengths) if len(row)]
    counted = sum(len(row) - 1 for row in rows)
    model.zero_grad()
    logits, loss = [], 0.0
    for row in rows:
        out = model(row[None], labels=row[None], use_cache=False)
        logits.append(out.logits[0].detach())
        if len(row) > 1:
            part = out.loss * ((len(row) - 1) / counted)
            part.backward()
            loss += part.detach()
    return torch.cat(logits), loss, gradients(model)


def together(model, ids, **arguments):
    """The same of a packed batch."""
    model.zero_grad()
    out = model(ids, **arguments)
    out.loss.backward()
    return out.logits[0].detach(), out.loss.detach(), gradients(model)


def exact(family, lengths):
    """Gradients of the separate runs in fp64, where our operators run their definitions; and of the stock model."""
    stock, model = tiny_models.build(family), tiny_models.build(family).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    tidegate.patch(model)
    return separate(model, lengths)[2], separate(stock, lengths)[2]


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_runs(got, want, limit=1e-5, truth=None):
    """Largest error, relative to the largest value. Gradients of decays are small differences of large sums: where two
    runs differ by more than the limit, truth() decides, and the stock model's own distance from it."""
    assert tiny_models.relative(got[0], want[0]) <= limit
    assert abs(float(got[1]) - float(want[1])) <= limit * abs(float(want[1]))
    assert got[2].keys() == want[2].keys()
    errors = {name: tiny_models.relative(got[2][name], value) for name, value in want[2].items()}
    errors = {name: error for name, error in errors.items() if error > limit}
    if errors and truth is not None:
        exact, stock = truth()
        limits = {name: max(limit, tiny_models.relative(stock[name].double(), exact[name])) for name in errors}
        errors = {name: tiny_models.relative(got[2][name].double(), exact[name]) for name in errors}
        errors = {name: error for name, error in errors.items() if error > limits[name]}
    assert not errors, errors
