"""Steps that sequence parallelism must refuse on all ranks at once, how gradients are scaled, and undoing it."""

import copy

import pytest
import ranks as harness
import torch

pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402
from sequence_case import LIMIT, Cases, alone, assert_same, batch, build, distance, needs_support, refused, together  # noqa: E402

import tidegate  # noqa: E402
from tidegate.parallel import sequence_parallel  # noqa: E402

pytestmark = needs_support

WORLD = 3


def bad_steps(ranks):
    """One rank's input is wrong: all raise, and the group works afterwards."""
    model, group, rank = build("qwen3_5"), ranks.groups[3], ranks.rank
    good, want = batch((30, 11)), alone("qwen3_5", "two", (30, 11))
    counted = dict(good, num_items_in_batch=int((good["labels"] != -100).sum()))
    wrong = {
        "rank 1: .*expected integers": dict(good, input_ids=good["input_ids"].float()),
        "rank 1: .*labels": dict(good, labels=good["labels"][:, :-1]),
        "rank 1: .*cu_seq_lens_q": dict(good, cu_seq_lens_q=torch.tensor([0, 50, 41], dtype=torch.int32)),
        "rank 1: .*disagree": dict(good, cu_seq_lens_q=torch.tensor([0, 20, 41], dtype=torch.int32)),
        "input_ids differ between rank 0 and rank 1": dict(good, input_ids=good["input_ids"] + 1),
        "tokens differ .*41 and 17": batch(17),
        "position_ids differ between": dict(good, position_ids=good["position_ids"] + 1),
        "arguments differ between": dict(good, num_items_in_batch=7),
        "rank 1: .*no cache": dict(good, use_cache=True),
    }
    with sequence_parallel(model, group, "chain", grad_reduction="sum") as handle:
        for text, bad in wrong.items():
            like = counted if "num_items_in_batch" in bad else good
            refused(lambda bad=bad, like=like: model(**(bad if rank == 1 else like)), text, group)

        def fails_early():
            with handle.step():
                if rank == 2:
                    raise OSError("the data is gone")
                model(**good)

        refused(fails_early, "rank 2: OSError: the data is gone", group)
        with torch.set_grad_enabled(rank != 1):
            refused(lambda: model(**good), "grad mode differ", group)
        got = together(handle, model, good)
    if rank == 0:
        assert_same(got, want, lambda: alone("qwen3_5", "two", (30, 11), torch.float64))


def refusals(ranks):
    model, group = build("qwen3_5"), ranks.groups[3]
    refused(lambda: sequence_parallel(model, group, "heads"), "2 key heads for 3 ranks", group)
    refused(lambda: sequence_parallel(model, group, "chain", attention="heads"), "2 KV heads for 3 ranks", group)
    other = tiny.build("qwen3_5") if ranks.rank == 1 else model
    refused(lambda: sequence_parallel(other, group), "rank 1: .*call tidegate.patch", group)
    refused(lambda: sequence_parallel(model, group, ("chain", "scan", "auto")[ranks.rank]), "settings differ", group)
    with sequence_parallel(model, group, "chain"):
        refused(lambda: model(**batch(20)), "grad_reduction", group)
        refused(lambda: sequence_parallel(model, group), "already", group)
        with torch.no_grad():
            assert model(**batch(20)).loss > 0


def scaling(ranks):
    """One step of SGD, for gradients that are averaged and for those that are summed."""
    want = None
    for reduction in (None, "mean", "sum"):
        model = copy.deepcopy(build("qwen3_5"))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if reduction is None:
            model(**batch((30, 11)), use_cache=False).loss.backward()
        else:
            handle = sequence_parallel(model, ranks.groups[3], "chain", grad_reduction=reduction)
            together(handle, model, batch((30, 11)))
        optimizer.step()
        found = {name: p.detach() for name, p in model.named_parameters()}
        want = found if reduction is None else want
        assert all(distance(found[name], want[name]) <= LIMIT for name in want)


def undone(ranks):
    model = tiny.build("qwen3_5")
    patched = tidegate.patch(model)
    before = {name: set(m.__dict__) for name, m in model.named_modules()}
    rows = len(patched.report())
    handle = sequence_parallel(model, ranks.groups[2], grad_reduction="sum")
    with torch.no_grad():
        local = model(**batch(700)).logits
    assert local.shape[1] < 700 and "tokens a rank, expected for a layer" in handle.report()
    assert patched.report()[-1].op == "sequence_parallel" and len(patched.report()) == rows + 1
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(twin(**batch(700)).logits, local)
    handle.undo()
    assert {name: set(m.__dict__) for name, m in model.named_modules()} == before and len(patched.report()) == rows
    with torch.no_grad():
        assert model(**batch(700), use_cache=False).logits.shape[1] == 700


def cases():
    found = Cases()
    found.add("bad-steps", 3, bad_steps)
    found.add("refusals", 3, refusals)
    found.add("scaling", 3, scaling)
    found.add("undone", 2, undone)
    return found


NAMES = list(cases())


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    return harness.run(cases, NAMES, WORLD, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", NAMES)
def test_ranks(failures, name):
    assert not failures[name], "\n".join(failures[name])
