"""Boundaries of packed input: every source, their agreement, and what is said when they are wrong."""

import itertools
import re
from typing import NamedTuple

import pytest
import torch

from tidegate.errors import PackedInputError
from tidegate.packed import pack
from tidegate.packed.forward import prepare
from tidegate.packed.sources import boundaries, padding_mask, unpacked_positions

LENGTHS = (24, 0, 40)
T = sum(LENGTHS)
BATCH = pack([torch.arange(length) + 1 for length in LENGTHS])
TEXT = BATCH["position_ids"]
POSITIONS = {
    "[T]": TEXT[0],
    "[1,T]": TEXT,
    "[3,1,T]": TEXT.expand(3, 1, T),
    "[4,1,T]": torch.cat([TEXT[None], 7 * TEXT.expand(3, 1, T)]),
}
METADATA = {name: BATCH[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")}


def prepared(setting=None, batch=1, tokens=T, **arguments):
    return prepare(setting, lambda: "", arguments, batch, tokens)


def error(setting=None, batch=1, tokens=T, **arguments):
    with pytest.raises(PackedInputError) as caught:
        prepared(setting, batch, tokens, **arguments)
    return str(caught.value)


def edited(values, index, value):
    values = values.clone()
    values[..., index] = value
    return values


@pytest.mark.parametrize("positions", [None, *POSITIONS])
def test_every_combination_gives_the_same_boundaries(positions):
    want = [0, 24] + [T] * (T - 1)
    for count in range(len(METADATA) + 1):
        for names in itertools.combinations(METADATA, count):
            given = {name: METADATA[name] for name in names}
            if positions is not None:
                given["position_ids"] = POSITIONS[positions]
            if not given:
                continue
            for padding_free in (True, None) if names else (True,):
                got = prepared(padding_free, **given)
                assert got["cu_seq_lens_q"].tolist() == got["cu_seq_lens_k"].tolist() == want
                assert got["seq_idx"].tolist() == [[0] * 24 + [1] * 40]
                assert got["max_length_q"] == got["max_length_k"] == T
                assert got["use_cache"] is False and got["attention_mask"] is None
                if positions in (None, "[T]"):
                    assert torch.equal(got["position_ids"], TEXT)
                elif positions == "[3,1,T]":  # gets a row for the text
                    assert torch.equal(got["position_ids"], TEXT.expand(4, 1, T))
                else:
                    assert got["position_ids"] is POSITIONS[positions]


def test_forms_of_the_arguments():
    lists = prepared(cu_seq_lens_q=[0, 24, 24, 64, 64])
    wide = prepared(cu_seq_lens_q=METADATA["cu_seq_lens_q"].long(), seq_idx=METADATA["seq_idx"][0])
    assert torch.equal(lists["cu_seq_lens_q"], wide["cu_seq_lens_q"])
    assert prepared(**METADATA, max_length_q=40, max_length_k=99)["max_length_q"] == 40
    ones = torch.ones(1, T, dtype=torch.long)
    assert prepared(**METADATA, attention_mask=ones)["attention_mask"] is None
    assert prepared(True, batch=1, position_ids=TEXT + 5)["cu_seq_lens_q"][1] == 24  # all begin at 5


def test_unset_means_packed_only_with_metadata():
    arguments = prepared(position_ids=torch.arange(T)[None], use_cache=True)
    assert "cu_seq_lens_q" not in arguments and arguments["use_cache"] is True
    assert prepared() == {"position_ids": None}
    text = (
        "position_ids restart at token 24 but padding_free is not set. Pass padding_free=True (separate sequences) or "
    )
    ones = torch.ones(1, T, dtype=torch.long)
    for positions in POSITIONS.values():
        assert error(position_ids=positions) == text + "False (one sequence)"
        assert error(position_ids=positions, attention_mask=ones) == text + "False (one sequence)"
        assert error(position_ids=positions, padding_free=None) == text + "False (one sequence)"
    rows = torch.cat([torch.arange(T)[None], (torch.arange(T) % 24)[None]])
    assert "the samples in one row (tidegate.pack), or padding_free=False" in error(position_ids=rows, batch=2)
    jump = torch.arange(T)[None] + 70 * (torch.arange(T) > 4)  # no restart
    assert "cu_seq_lens_q" not in prepared(position_ids=jump)
    assert prepared(cu_seq_lens_q=[0, T], position_ids=jump)["cu_seq_lens_q"].tolist() == [0] + [T] * T


class Cache(NamedTuple):
    """As many tokens as a cache holds."""

    length: int

    def get_seq_length(self):
        return torch.tensor(self.length)


SAMPLE = METADATA["seq_idx"][0]
BLOCKS = torch.ones(T, T).tril().bool()[None, None] & (SAMPLE[:, None] == SAMPLE)  # which tokens meet in a pack


@pytest.mark.parametrize("name", POSITIONS)
def test_restarts_beside_other_masks(name):
    """Padding around a pack, or between its samples, and masks that say which tokens meet, hide no restart."""
    ones, text = torch.ones(1, T, dtype=torch.long), "position_ids restart at token 24 but padding_free is not set"
    square = torch.ones(1, 1, T, T, dtype=torch.bool)
    for mask in (*(edited(ones, i, 0) for i in (0, 23, 63)), ones.bool(), square, {"full_attention": square}):
        assert error(position_ids=POSITIONS[name], attention_mask=mask).startswith(text)
    empty, full = Cache(0), Cache(9)
    for mask in (square, {"full_attention": square}, BLOCKS, {"full_attention": BLOCKS, "linear_attention": ones}):
        assert error(position_ids=POSITIONS[name], attention_mask=mask, past_key_values=empty).startswith(text)
    assert "cu_seq_lens_q" not in prepared(position_ids=POSITIONS[name], attention_mask=square, past_key_values=full)
    assert prepared(False, position_ids=POSITIONS[name], attention_mask=square)["attention_mask"] is square


def test_any_way_back_is_a_restart():
    positions = torch.cat([torch.arange(5, 29), torch.arange(40)])[None]
    rows = positions.expand(3, 1, T)
    for given in (positions, positions[0], rows, rows + 1, torch.cat([positions[None], TEXT.expand(3, 1, T)])):
        assert error(position_ids=given).startswith("position_ids restart at token 24 but")
    images = torch.cat([torch.arange(T).expand(1, 1, T), rows])  # the text runs on
    for given in (images, torch.arange(100, 100 + T)[None]):
        assert torch.equal(prepared(position_ids=given)["position_ids"], given)


def mrope(*parts, start=0):
    """Positions [3,1,T] as Qwen3.5's get_rope_index makes them: a number is text, a pair an image of that many rows."""
    rows = []
    for part in parts:
        if isinstance(part, int):
            rows.append(torch.arange(part).expand(3, part) + start)
            start += part
        else:
            h, w = part
            rows.append(torch.cartesian_prod(torch.arange(1), torch.arange(h), torch.arange(w)).T + start)
            start += max(h, w)
    return torch.cat(rows, 1)[:, None]


IMAGES = {
    "inside": (5, (3, 4), 7, (2, 2), (1, 1), 2),
    "first": ((4, 3), 6),
    "last": (6, (2, 5)),
    "alone": ((3, 3),),
    "one patch": ((1, 1),),
    "text": (9,),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_go_back_and_forth_inside_a_sample(name):
    for start in (0, 4):
        rows = mrope(*IMAGES[name], start=start)
        tokens = rows.shape[-1]
        assert torch.equal(prepared(tokens=tokens, position_ids=rows)["position_ids"], rows)
        mask = torch.ones(1, tokens + 3, dtype=torch.long)
        mask[:, :2] = mask[:, -1] = 0
        for pad in (0, 1):
            padded = torch.nn.functional.pad(rows, (2, 1), value=pad)
            got = prepared(tokens=tokens + 3, position_ids=padded, attention_mask=mask)
            assert torch.equal(got["position_ids"], padded)


@pytest.mark.parametrize("one, other", list(itertools.product(IMAGES, IMAGES)))
def test_packs_of_images_are_right_or_refused(one, other):
    """Samples that begin at 0, and at another number, which nothing but cu_seq_lens can take for a beginning."""
    for start in (0, 4):
        rows = [mrope(*IMAGES[name], start=start) for name in (one, other)]
        cut, pack = rows[0].shape[-1], torch.cat(rows, -1)
        tokens = pack.shape[-1]
        assert error(tokens=tokens, position_ids=pack).startswith(f"position_ids restart at token {cut} but")
        cu = prepared(tokens=tokens, position_ids=pack, cu_seq_lens_q=[0, cut, tokens])["cu_seq_lens_q"]
        assert cu.tolist() == [0, cut] + [tokens] * (tokens - 1)
        assert "disagree" in error(tokens=tokens, position_ids=pack, cu_seq_lens_q=[0, tokens])
        if start == 0:
            assert torch.equal(prepared(True, tokens=tokens, position_ids=pack)["cu_seq_lens_q"], cu)
        else:
            text = f"position_ids[:,0,{cut}]=[4, 4, 4] after "
            assert error(True, tokens=tokens, position_ids=pack).startswith(text)


@pytest.mark.parametrize("pad", [0, 1])
def test_positions_of_padding_mean_nothing(pad):
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[0, :3] = mask[1, 6:] = 0
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, pad)
    longer = torch.cat([torch.ones(3, 5, dtype=torch.long), mask], 1)  # with tokens in a cache
    for given in (mask, mask.bool(), mask.float(), longer):
        for rows in (positions, positions.expand(3, 3, 8)):
            got = prepared(None, 3, 8, position_ids=rows, attention_mask=given)
            assert torch.equal(got["position_ids"], rows)


@pytest.mark.parametrize("spare", [0, 4], ids=["keys", "spare keys"])
@pytest.mark.parametrize("unseeing", [False, True], ids=["blank", "all"])
def test_padding_in_masks_beside_an_empty_cache(spare, unseeing):
    """As generate() makes them: the queries of padding see nothing, or everything in some releases."""
    flat = torch.ones(3, 8, dtype=torch.long)
    flat[0, :3] = flat[1, 6:] = 0
    sees = torch.ones(8, 8).tril().bool() & (flat != 0)[:, None, None]
    sees = torch.nn.functional.pad(sees, (0, spare))
    sees |= unseeing & ~sees.any(-1, keepdim=True)
    added = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
    positions = (flat.cumsum(1) - 1).clamp(min=0)
    packed = positions.clone()
    packed[2] = torch.arange(8) % 5
    for mask in (sees, added, {"full_attention": sees, "linear_attention": None}, {"linear_attention": flat}):
        given = dict(attention_mask=mask, past_key_values=Cache(0))
        assert torch.equal(prepared(None, 3, 8, position_ids=positions, **given)["position_ids"], positions)
        assert error(None, 3, 8, position_ids=packed, **given).startswith("position_ids restart at token 5 but")


def test_a_mask_with_ids_of_samples():
    mask = torch.tensor([[1] * 24 + [2] * 40])
    text = "attention_mask[0,24]=2, expected 0 or 1; pass ids of samples as seq_idx"
    for given in ({}, {"position_ids": torch.arange(T)[None]}, {"seq_idx": mask}):
        assert error(attention_mask=mask, **given) == text
    assert torch.equal(prepared(attention_mask=mask.clamp(max=1))["attention_mask"], mask.clamp(max=1))


def test_false_means_one_sequence():
    arguments = prepared(False, position_ids=POSITIONS["[T]"], use_cache=True)
    assert torch.equal(arguments["position_ids"], TEXT) and arguments["use_cache"] is True
    assert (
        error(False, seq_idx=METADATA["seq_idx"]) == "seq_idx is given but padding_free is False; leave out one of them"
    )
    assert error(True, padding_free=False, **METADATA).startswith("cu_seq_lens_q is given but padding_free is False")


SHIFTED = {
    "cu_seq_lens_q": torch.tensor([0, 25, 64]),
    "cu_seq_lens_k": torch.tensor([0, 25, 64]),
    "seq_idx": torch.tensor([[3] * 25 + [1] * 39]),
    "position_ids": torch.cat([torch.arange(25), torch.arange(39)])[None],
}


@pytest.mark.parametrize("one, other", list(itertools.permutations(SHIFTED, 2)))
def test_disagreement_is_an_error(one, other):
    given = {one: {**METADATA, "position_ids": TEXT}[one], other: SHIFTED[other]}
    first, second = sorted(given, key=list(SHIFTED).index)
    values = (24, 25) if first == one else (25, 24)
    text = (
        f"{first} and {second} disagree: boundary 1 is {values[0]} in {first}, {values[1]} in {second} (T=64, N=2 vs 2)"
    )
    assert error(True, **given) == error(**given) == text


def test_the_first_source_has_fewer_boundaries():
    assert error(cu_seq_lens_q=[0, 64], seq_idx=METADATA["seq_idx"]) == (
        "cu_seq_lens_q and seq_idx disagree: boundary 1 is 64 in cu_seq_lens_q, 24 in seq_idx (T=64, N=1 vs 2)"
    )


MASK = torch.ones(1, T, dtype=torch.long)
ORDER = "is smaller than cu_seq_lens_{0}[2]=12; lengths must not decrease"
SHAPES = "position_ids: expected [T], [B,T], [3,B,T] or [4,B,T], got "
CACHE = "packed input cannot fill a cache; call with use_cache=False (got {0})"
NO_MASK = "attention_mask: packed input takes none, or [1,T] of ones; its boundaries say which tokens meet"
ZERO = "attention_mask[0,7]=0, expected 1: packed input has no padding; drop these tokens"
NOTHING = "padding_free is True but nothing says where sequences begin: pass position_ids, cu_seq_lens_q or seq_idx"
WRONG = [
    (dict(cu_seq_lens_q=[0, 5, 12, 8, 64]), "cu_seq_lens_q[3]=8 " + ORDER.format("q")),
    (dict(cu_seq_lens_k=[0, 5, 12, 8, 64]), "cu_seq_lens_k[3]=8 " + ORDER.format("k")),
    (dict(cu_seq_lens_q=[0, 24, 60]), "cu_seq_lens_q[2]=60, expected 64 (tokens)"),
    (dict(cu_seq_lens_q=[0, 24, 70]), "cu_seq_lens_q[2]=70, expected <= 64 (tokens)"),
    (dict(cu_seq_lens_q=[1, 24, 64]), "cu_seq_lens_q[0]=1, expected 0"),
    (dict(cu_seq_lens_q=[0]), "cu_seq_lens_q: expected at least 2 entries, got 1"),
    (dict(cu_seq_lens_q=torch.tensor([[0, 64]])), "cu_seq_lens_q: expected shape [N+1], got [1, 2]"),
    (dict(cu_seq_lens_q=torch.tensor([0.0, 64.0])), "cu_seq_lens_q: expected int32 or int64, got torch.float32"),
    (dict(cu_seq_lens_q="0,64"), "cu_seq_lens_q: expected a tensor or a list, got str"),
    (dict(seq_idx=edited(METADATA["seq_idx"], 63, 0)), "seq_idx[63]=0, expected an id not used before"),
    (dict(seq_idx=METADATA["seq_idx"][:, 1:]), "seq_idx: expected boundaries of 64 tokens, got 63"),
    (dict(position_ids=edited(TEXT, 3, -1)), "position_ids[3]=-1, expected >= 0"),
    (dict(position_ids=edited(TEXT, 3, 9)), "position_ids[3]=9, expected 3 (same sequence) or 0 (new sequence)"),
    (dict(position_ids=TEXT[:, 1:]), "position_ids: expected 64 tokens, got 63 (shape [1, 63])"),
    (dict(position_ids=TEXT.view(1, 1, 1, T)), SHAPES + "[1, 1, 1, 64]"),
    (dict(position_ids=TEXT.expand(2, 1, T)), SHAPES + "[2, 1, 64]"),
    (dict(), NOTHING),
    (dict(METADATA, max_length_q=39), "max_length_q=39 is smaller than the longest sequence, which has 40 tokens"),
    (dict(METADATA, max_length_k=1), "max_length_k=1 is smaller than the longest sequence, which has 40 tokens"),
    (dict(METADATA, use_cache=True), CACHE.format("use_cache=True")),
    (dict(METADATA, past_key_values=()), CACHE.format("past_key_values")),
    (dict(METADATA, attention_mask=edited(MASK, 7, 0)), ZERO),
    (dict(METADATA, attention_mask=MASK[None, None]), NO_MASK),
]


@pytest.mark.parametrize("arguments, text", WRONG, ids=[text[:40] for _, text in WRONG])
def test_wrong_input_names_the_entry(arguments, text):
    assert error(True, **arguments) == text


def test_more_than_one_row():
    text = "packed input needs batch size 1, got 4; pack the samples with tidegate.pack"
    assert error(batch=4, **METADATA) == error(True, batch=4, position_ids=TEXT.expand(4, T)) == text


def test_a_refusal_is_passed_on():
    with pytest.raises(PackedInputError, match="this model cannot run packed input: so and so"):
        prepare(None, lambda: "so and so", dict(METADATA), 1, T)
    prepare(None, lambda: "so and so", {"position_ids": None}, 1, T)  # not packed: nobody asks


def test_operators():
    given = [*METADATA.values(), TEXT, MASK]
    torch.library.opcheck(boundaries, given, dict(tokens=T, max_length_q=40))
    torch.library.opcheck(unpacked_positions, [torch.arange(T)[None], MASK])
    torch.library.opcheck(padding_mask, [MASK])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_checks_stay(backend):
    """The checks are part of the graph: a second call with other values is checked too."""

    @torch.compile(fullgraph=True, backend=backend)
    def run(cu, positions):
        return prepared(cu_seq_lens_q=cu, position_ids=positions)["cu_seq_lens_q"] * 2

    @torch.compile(fullgraph=True, backend=backend)
    def unpacked(positions):
        return prepared(position_ids=positions)["position_ids"] * 2

    cu = METADATA["cu_seq_lens_q"]
    assert torch.equal(run(cu, TEXT), 2 * prepared(cu_seq_lens_q=cu)["cu_seq_lens_q"])
    with pytest.raises(PackedInputError, match="disagree"):
        run(torch.where(cu == 24, 25, cu), TEXT)
    unpacked(torch.arange(T)[None])
    with pytest.raises(PackedInputError, match=re.escape("restart at token 24")):
        unpacked(TEXT)
