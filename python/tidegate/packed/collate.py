"""tidegate.pack: samples of any length as one batch without padding."""

from collections.abc import Iterable
from typing import Any

import torch

from tidegate.errors import PackedInputError

FIELDS = ("input_ids", "labels", "attention_mask")


def _ids(values, name):
    """One sample's field as int64 [L]."""
    try:
        tensor = values if isinstance(values, torch.Tensor) else torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise PackedInputError(f"{name}: expected one row of tokens, got {type(values).__name__}") from None
    if tensor.dim() == 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.dim() != 1:
        raise PackedInputError(f"{name}: expected one row of tokens, got shape {list(tensor.shape)}")
    if tensor.numel() and (tensor.is_floating_point() or tensor.dtype == torch.bool):
        raise PackedInputError(f"{name}: expected integers, got {tensor.dtype}")
    return tensor.long()


def _read(i, sample, ignore_index):
    """input_ids and labels of sample i."""
    name = f"samples[{i}]"
    if not hasattr(sample, "keys"):
        sample = {"input_ids": sample}
    unknown = [key for key in sample.keys() if key not in FIELDS]
    if unknown or "input_ids" not in sample:
        what = f"the unknown field {unknown[0]!r}" if unknown else "no input_ids"
        raise PackedInputError(
            f"{name} has {what}; expected input_ids and, if there are any, labels and attention_mask"
        )
    ids = _ids(sample["input_ids"], f"{name}.input_ids")
    given = {key: _ids(sample[key], f"{name}.{key}") for key in FIELDS[1:] if sample.get(key) is not None}
    for key, value in given.items():
        if len(value) != len(ids):
            raise PackedInputError(f"{name}.{key}: expected {len(ids)} entries (as input_ids), got {len(value)}")
    mask = given.get("attention_mask")
    if mask is not None and not mask.all():
        at = int((mask == 0).nonzero()[0])
        raise PackedInputError(
            f"{name}.attention_mask[{at}]=0, expected 1: packed samples have no padding; tokenize without it"
        )
    labels = given.get("labels", ids).clone()
    labels[:1] = ignore_index  # what comes before it belongs to another sample
    return ids, labels


def pack(
    samples: Iterable[Any], *, ignore_index: int = -100, max_tokens: int | None = None
) -> dict[str, torch.Tensor | int]:
    """One packed batch of a list of samples, for a model's forward or as a data collator of a Trainer.

    A sample is a mapping with input_ids and optionally labels (default: input_ids), or the ids alone. The result has
    input_ids, labels and position_ids [1,T], seq_idx int32 [1,T], cu_seq_lens_q and _k int32 [N+1], and max_length_q
    and _k. The label of each sample's first token is ignore_index, so that no sample is predicted from another. Empty
    samples stay empty sequences. More than max_tokens tokens are an error.
    """
    if hasattr(samples, "keys") or not isinstance(samples, Iterable):
        raise PackedInputError(f"pack: samples: expected a list of samples, got {type(samples).__name__}")
    samples = list(samples)
    if not samples:
        raise PackedInputError("samples: expected at least one, got none")
    ids, labels = zip(*(_read(i, sample, ignore_index) for i, sample in enumerate(samples)), strict=True)
    lengths = [len(row) for row in ids]
    total = sum(lengths)
    if total == 0:
        raise PackedInputError(f"samples: expected at least one token, got {len(samples)} empty samples")
    if max_tokens is not None and total > max_tokens:
        raise PackedInputError(f"samples have {total} tokens together, more than max_tokens={max_tokens}")
    count = torch.tensor(lengths)
    cu = torch.cat([count.new_zeros(1), count.cumsum(0)])
    sequence = torch.repeat_interleave(torch.arange(len(ids)), count)
    offsets = cu.to(torch.int32)
    return {
        "input_ids": torch.cat(ids)[None],
        "labels": torch.cat(labels)[None],
        "position_ids": (torch.arange(total) - cu[sequence])[None],
        "seq_idx": sequence.to(torch.int32)[None],
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets.clone(),
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
