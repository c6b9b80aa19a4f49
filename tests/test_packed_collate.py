"""tidegate.pack: the batch of Transformers' flattening collator, and clear errors."""

import pytest
import torch

import tidegate
from tidegate.errors import PackedInputError


def test_batch():
    batch = tidegate.pack([{"input_ids": [5, 6, 7]}, {"input_ids": []}, {"input_ids": torch.tensor([[8, 9]])}])
    want = {
        "input_ids": [[5, 6, 7, 8, 9]],
        "labels": [[-100, 6, 7, -100, 9]],
        "position_ids": [[0, 1, 2, 0, 1]],
        "seq_idx": [[0, 0, 0, 2, 2]],
        "cu_seq_lens_q": [0, 3, 3, 5],
        "cu_seq_lens_k": [0, 3, 3, 5],
    }
    assert {name: batch[name].tolist() for name in want} == want
    assert batch["max_length_q"] == batch["max_length_k"] == 3
    for name, dtype in dict(input_ids=torch.int64, labels=torch.int64, position_ids=torch.int64).items():
        assert batch[name].dtype == dtype
    assert all(batch[name].dtype == torch.int32 for name in ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"))
    assert len(batch) == 8


def test_same_as_the_flattening_collator():
    transformers = pytest.importorskip("transformers")
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    samples = [{"input_ids": [5, 6, 7], "labels": [1, 2, 3]}, {"input_ids": [8], "labels": [4]}]
    want, got = collate([dict(sample) for sample in samples]), tidegate.pack(samples)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(torch.as_tensor(got[name]), torch.as_tensor(value)), name
        assert not isinstance(value, torch.Tensor) or value.dtype == got[name].dtype, name


def test_labels_are_not_changed_in_place():
    labels = torch.tensor([1, 2])
    batch = tidegate.pack([{"input_ids": [1, 2], "labels": labels}, [3]], ignore_index=-1)
    assert labels.tolist() == [1, 2] and batch["labels"].tolist() == [[-1, 2, -1]]


FIELDS = "; expected input_ids and, if there are any, labels and attention_mask"
WRONG = [
    ({"input_ids": [1]}, {}, "pack: samples: expected a list of samples, got dict"),
    (5, {}, "pack: samples: expected a list of samples, got int"),
    (["text"], {}, "samples[0].input_ids: expected one row of tokens, got str"),
    ([], {}, "samples: expected at least one, got none"),
    ([[], []], {}, "samples: expected at least one token, got 2 empty samples"),
    ([{"labels": [1]}], {}, "samples[0] has no input_ids" + FIELDS),
    (
        [[1], {"input_ids": [1], "pixel_values": 0}],
        {},
        "samples[1] has the unknown field 'pixel_values'" + FIELDS,
    ),
    ([{"input_ids": [1, 2], "labels": [1]}], {}, "samples[0].labels: expected 2 entries (as input_ids), got 1"),
    (
        [{"input_ids": [1, 2], "attention_mask": [1, 0]}],
        {},
        "samples[0].attention_mask[1]=0, expected 1: packed samples have no padding; tokenize without it",
    ),
    ([[1], [[1, 2], [3, 4]]], {}, "samples[1].input_ids: expected one row of tokens, got shape [2, 2]"),
    ([[0.5]], {}, "samples[0].input_ids: expected integers, got torch.float32"),
    ([[1, 2, 3], [4]], dict(max_tokens=3), "samples have 4 tokens together, more than max_tokens=3"),
]


@pytest.mark.parametrize("samples, options, text", WRONG, ids=[text[:30] for *_, text in WRONG])
def test_errors(samples, options, text):
    with pytest.raises(PackedInputError) as caught:
        tidegate.pack(samples, **options)
    assert str(caught.value) == text
