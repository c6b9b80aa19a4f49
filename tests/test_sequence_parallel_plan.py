"""Who holds which tokens, how a batch becomes one row, and which way is chosen: pure functions, no processes."""

import types

import pytest
import torch

import tidegate
from tidegate.errors import PackedInputError, SequenceParallelError
from tidegate.parallel import choice, sequence_parallel
from tidegate.parallel.inputs import read
from tidegate.parallel.link import group_of
from tidegate.parallel.plan import GRID, SpPlan, split


def plans(starts, cu):
    return [SpPlan(types.SimpleNamespace(rank=r), starts, cu) for r in range(len(starts) - 1)]


def test_fragments_of_a_pack():
    a, b, c, d = plans((0, 10, 10, 13, 20), (0, 4, 12, 20))
    assert [s.cu for s in a.shards] == [(0, 4, 10), (0,), (0, 2, 3), (0, 7)]
    assert [(s.takes, s.gives) for s in a.shards] == [(False, True), (False, False), (True, True), (True, False)]
    assert (a.right, c.left, c.right, d.left) == (2, 0, 3, 2)  # the empty shard is passed over
    assert (c.before, c.after, d.before) == ([0], [3], [2])
    assert [(p.begin, p.end, p.takes, p.gives) for p in c.parts] == [(0, 2, True, False), (2, 3, False, True)]
    assert b.parts == []
    assert not plans((0, 4, 12), (0, 4, 12))[0].straddles


def test_halo_reaches_past_short_shards_but_not_past_a_beginning():
    plan = plans((0, 5, 6, 7, 9), (0, 4, 9))[0]
    assert [plan.halo(3, 3, sender) for sender in range(4)] == [(4, 5), (5, 6), (6, 7), (0, 0)]
    assert [plan.halo(3, 1, sender) for sender in range(4)] == [(4, 5), (0, 0), (0, 0), (0, 0)]


def test_parts_take_many_short_sequences_in_one_call():
    plan = plans((0, 6, 20), (0, 3, 8, 9, 10, 11, 30)[:-1] + (20,))[1]
    assert [(p.begin, p.end, None if p.cu is None else p.cu.tolist()) for p in plan.parts] == [
        (0, 2, None),
        (2, 14, [0, 1, 2, 3, 12]),
    ]


def test_shards_begin_on_the_grid_of_their_sequence():
    assert split((0, 41), 2) == (0, 32, 41)
    assert split((0, 40), 4) == (0, 0, 32, 32, 40)
    assert split((0, 1000), 3) == (0, 320, 672, 1000)
    assert split((0, 100, 1200), 2) == (0, 100 + 512, 1200)
    assert split((0, 30, 41), 3) == (0, 0, 30, 41)  # where the sequence ends, not 32: that is no place of the next one
    assert split((0, 7, 7, 7), 2) == (0, 0, 7) and split((0, 0), 3) == (0, 0, 0, 0)


def test_starts_move_by_half_a_step_at_most():
    for lengths in ([1] * 90, [33, 0, 64, 5, 200], [1000], [31, 32, 33] * 4):
        cu = [0]
        for length in lengths:
            cu.append(cu[-1] + length)
        for ranks in (1, 2, 3, 4, 7):
            starts = split(cu, ranks)
            assert list(starts) == sorted(starts) and (starts[0], starts[-1], len(starts)) == (0, cu[-1], ranks + 1)
            assert all(abs(start - cu[-1] * r // ranks) <= GRID // 2 for r, start in enumerate(starts))


COSTS = choice.Costs(latency=1e-4, byte=1e-9, token=5e-5)
HEADS = choice.Heads(16, 32, 128, 128, 2)


def test_choice_follows_heads_and_length():
    def best(tokens, ranks=2, heads=HEADS, costs=COSTS, groups=16):
        return choice.choose(heads, tokens, ranks, min(groups, max(tokens // 64, 1)), 2, costs)[0]

    assert best(8192) == "chain" and best(16) == "heads"
    assert best(16, heads=HEADS._replace(HK=1), groups=1) != "heads"  # fewer key heads than ranks
    assert best(8192, ranks=64, heads=HEADS._replace(HK=2, HV=4), groups=2) == "scan"  # a chain would stand still
    assert choice.attention_mode("auto", HEADS, 2) == "heads" and choice.attention_mode("auto", HEADS, 3) == "ring"


def test_bytes_of_the_modes():
    assert choice.payload("chain", HEADS, 8192, 2, 2) == 2 << 20
    assert choice.payload("scan", HEADS, 8192, 2, 2) == 4 << 20
    assert choice.payload("heads", HEADS, 8192, 2, 2) == 24704 * 8192 // 2


def row(**arguments):
    return read(arguments, None, lambda: "")


def test_rows_become_one_row_without_padding():
    ids = torch.arange(12).view(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 2] = -100  # one process would predict it from padding
    found = row(input_ids=ids, attention_mask=mask, labels=labels)
    assert found.tokens["input_ids"].tolist() == [[2, 3, 4, 5, 6, 7, 8]]
    assert found.tokens["shift_labels"].tolist() == [[3, 4, 5, -100, 7, 8, -100]]
    assert found.positions.tolist() == [[2, 3, 4, 5, 0, 1, 2]] and found.cu == (0, 4, 7) and found.items == 5


def test_padding_of_a_trainer_is_trimmed():
    ids = torch.arange(8)[None]
    positions = torch.tensor([[0, 1, 2, 0, 1, -1, -1, -1]])
    found = row(input_ids=ids, position_ids=positions, labels=ids, cu_seq_lens_q=[0, 3, 5])
    assert found.cu == (0, 3, 5) and found.tokens["input_ids"].shape == (1, 5) and found.items == 4


@pytest.mark.parametrize(
    "arguments, text",
    [
        (dict(), "exactly one of"),
        (dict(input_ids=torch.ones(2, 3)), "expected integers"),
        (dict(input_ids=torch.ones(5, dtype=torch.int64)), "got \\[5\\]"),
        (dict(input_ids=torch.ones(1, 4, dtype=torch.int64), labels=torch.ones(1, 3)), "labels: expected"),
        (dict(input_ids=torch.ones(1, 4, dtype=torch.int64), use_cache=True), "no cache"),
        (dict(input_ids=torch.ones(1, 4, dtype=torch.int64), attention_mask=torch.tensor([[1, 0, 1, 1]])), "between"),
        (dict(input_ids=torch.ones(1, 4, dtype=torch.int64), pixel_values=torch.ones(3, 2)), "pixel_values"),
        (dict(input_ids=torch.ones(1, 4, dtype=torch.int64), logits_to_keep=1), "logits_to_keep"),
    ],
)
def test_bad_batches(arguments, text):
    with pytest.raises(SequenceParallelError, match=text):
        row(**arguments)


def test_labels_of_padding_would_change_the_loss():
    ids, mask = torch.ones(1, 4, dtype=torch.int64), torch.tensor([[0, 1, 1, 1]])
    with pytest.raises(SequenceParallelError, match=r"labels\[0,1\]"):
        row(input_ids=ids, labels=ids, attention_mask=mask)


def test_restarts_are_an_error_as_in_one_process():
    with pytest.raises(PackedInputError, match="restart"):
        row(input_ids=torch.ones(1, 4, dtype=torch.int64), position_ids=torch.tensor([[0, 1, 0, 1]]))


def test_one_process_is_left_alone():
    model = torch.nn.Linear(2, 2)
    handle = sequence_parallel(model, None)
    batch = {"input_ids": torch.ones(1, 3)}
    assert not handle.on and "one process" in handle.report() and handle.shard(batch) == batch
    assert "_tidegate" not in model.__dict__ and handle.gather(batch["input_ids"]) is batch["input_ids"]
    with pytest.raises(ValueError, match="mode: expected"):
        tidegate.parallel.sequence_parallel(model, None, mode="ulysses")


def test_several_processes_without_a_group_are_refused(monkeypatch):
    assert group_of(None) is None
    with pytest.raises(ValueError, match="expected None before .*init_process_group, got str"):
        group_of("chain")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE is 2.*init_process_group first"):
        group_of(None)
