"""seqlens: boundaries from any of their sources, and the errors that name the first wrong entry."""

import random
import re

import golden
import pytest
import torch

import tidegate

seqlens = tidegate.ops.seqlens


def padded(cu, tokens):
    """What the operator returns: boundaries without empty sequences, filled up with the number of tokens."""
    kept = sorted(set(cu))
    return kept + [tokens] * (tokens + 1 - len(kept))


def seq_idx_of(cu):
    return [n for n in range(len(cu) - 1) for _ in range(cu[n], cu[n + 1])]


def positions_of(cu):
    return [t for n in range(len(cu) - 1) for t in range(cu[n + 1] - cu[n])]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_every_source_gives_the_same_boundaries(dtype):
    rng = random.Random(0)
    for _ in range(20):
        cu = golden.cu_from_lengths([rng.choice([0, 1, 2, 3, 63, 64, 65]) for _ in range(rng.randrange(1, 6))])
        T = cu[-1]
        ids = [7 * n - 3 for n in seq_idx_of(cu)]
        text = torch.tensor(positions_of(cu), dtype=dtype)
        mrope = text.repeat(3, 1)[:, None]
        sources = {
            "cu_seqlens": (torch.tensor(cu, dtype=dtype), None, None),
            "padded cu_seqlens": (torch.tensor(cu + [T] * 4, dtype=dtype), None, None),
            "seq_idx": (None, torch.tensor(ids, dtype=dtype), None),
            "seq_idx [1,T]": (None, torch.tensor(ids, dtype=dtype)[None], None),
            "position_ids": (None, None, text),
            "position_ids [1,T]": (None, None, text[None]),
            "position_ids [4,1,T]": (None, None, torch.cat([text[None, None], mrope * 5])),
            "position_ids [3,1,T]": (None, None, mrope),
            "all": (torch.tensor(cu, dtype=dtype), torch.tensor(ids, dtype=dtype), text),
        }
        for name, given in sources.items():
            got = seqlens(*given, tokens=T)
            assert got.dtype == torch.int32 and got.tolist() == padded(cu, T), name
        if T:
            assert sorted(set(golden.cu_from_seq_idx(ids))) == sorted(set(cu))
            assert sorted(set(golden.cu_from_position_ids(text))) == sorted(set(cu))


def test_image_tokens_share_a_position():
    """mRoPE ids repeat inside an image; only a token with all three axes at 0 starts a sequence."""
    ids = torch.tensor([[0, 1, 1, 1, 1, 3, 0, 1], [0, 1, 1, 2, 2, 3, 0, 1], [0, 1, 2, 1, 2, 3, 0, 1]])[:, None]
    assert seqlens(None, None, ids, tokens=8).tolist() == padded(golden.cu_from_position_ids(ids[:, 0]), 8)
    assert seqlens(None, None, ids, tokens=8).tolist() == padded([0, 6, 8], 8)


def test_positions_may_start_anywhere():
    assert seqlens(None, None, torch.tensor([5, 6, 7, 5, 6]), tokens=5).tolist() == padded([0, 3, 5], 5)


def test_strided_source():
    cu = torch.tensor([0, 9, 3, 9, 8, 9])[::2]
    assert seqlens(cu, None, None, tokens=8).tolist() == padded([0, 3, 8], 8)


def test_result_is_what_operators_accept():
    x, w = torch.randn(9, 4), torch.randn(4, 4)
    cu = torch.tensor([0, 2, 2, 9])
    want = tidegate.ops.causal_conv1d_fwd(x, w, cu_seqlens=cu, layout="TND")[0]
    got = tidegate.ops.causal_conv1d_fwd(x, w, cu_seqlens=seqlens(cu, None, None, tokens=9), layout="TND")[0]
    assert torch.equal(got, want)


ERRORS = [  # source, value, tokens, the whole text after "seqlens: "
    ("cu_seqlens", [1, 16], 16, "cu_seqlens[0]: expected 0, got 1"),
    ("cu_seqlens", [0, 12, 8, 16], 16, "cu_seqlens[2]: expected >= 12, got 8"),
    ("cu_seqlens", [0, 20], 16, "cu_seqlens[1]: expected <= 16 (tokens), got 20"),
    ("cu_seqlens", [0, 4, 8, 12], 16, "cu_seqlens[3]: expected 16 (tokens), got 12"),
    ("cu_seqlens", [0], 0, "cu_seqlens: expected at least 2 entries, got 1"),
    ("seq_idx", [0, 0, 1, 0], 4, "seq_idx[3]: expected an id not used before, got 0"),
    ("seq_idx", [0, 0, 1], 4, "seq_idx: expected boundaries of 4 tokens, got 3"),
    ("position_ids", [0, 1, 2, 7], 4, "position_ids[3]: expected 3 (same sequence) or 0 (new sequence), got 7"),
    ("position_ids", [0, -1], 2, "position_ids[1]: expected >= 0, got -1"),
    ("position_ids", [0, 1, 2], 4, "position_ids: expected boundaries of 4 tokens, got 3"),
]


@pytest.mark.parametrize("source, value, tokens, text", ERRORS)
def test_errors_name_the_entry(source, value, tokens, text):
    with pytest.raises(ValueError, match="^" + re.escape("seqlens: " + text) + "$"):
        seqlens(**{source: torch.tensor(value)}, tokens=tokens)


def test_sources_must_agree():
    cu, ids = torch.tensor([0, 3, 8]), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    with pytest.raises(ValueError, match=r"seqlens: seq_idx: expected 3 \(end of sequence 0 in cu_seqlens\), got 4"):
        seqlens(cu, ids, None, tokens=8)
    with pytest.raises(ValueError, match=r"position_ids: expected 8 \(end of sequence 0 in cu_seqlens\), got 9"):
        seqlens(torch.tensor([0, 8, 9]), None, torch.arange(9), tokens=9)


def test_nothing_given():
    with pytest.raises(ValueError, match="expected one of cu_seqlens, seq_idx and position_ids, got none"):
        seqlens(None, None, None, tokens=4)
