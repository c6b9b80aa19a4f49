"""Patched models in two processes on gloo: FSDP2 and DDP train as unpatched ones do, and can be undone."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402
from packed_case import batch_of, packs, samples  # noqa: E402
from test_patch_models import T32, stock  # noqa: E402

import tidegate  # noqa: E402

STEPS = 3
KINDS = ("ddp", "fsdp2")
ORDERS = ("unpatched", "before", "after")  # when the model is patched: before it is wrapped, or after


def wrap(model, kind):
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    base = model.model
    for layer in base.layers:
        fully_shard(layer)
    return fully_shard(model)


def found(model):
    return [(row.path, row.op, row.status, row.mechanism) for row in tidegate.report(model)]


def packed_difference(wrapped):
    """Of a packed row under FSDP2 or DDP from its samples alone: logits."""
    lengths = (9, 0, 21)
    ids, batch = batch_of(lengths)
    with torch.no_grad():
        parts = [wrapped(input_ids=row[None], use_cache=False).logits[0] for row in samples(lengths) if len(row)]
    out = wrapped(input_ids=ids, **batch)
    out.loss.backward()
    return tiny.relative(out.logits[0].detach(), torch.cat(parts))


def train(kind, order, rank):
    """Losses of some steps on this rank's samples."""
    model = stock("qwen3_5", layers=2) if order == "unpatched" else tiny.build("qwen3_5", layers=2)
    if order == "before":
        tidegate.patch(model)
        plain = found(model)
    wrapped = wrap(model, kind)
    if order == "before":
        assert found(wrapped) == plain
    if order == "after":
        rows = tidegate.patch(wrapped).report().only(op="gdn_layer")
        assert rows[0].path == "model.layers.0.linear_attn" and rows[0].status == "installed"
        assert rows[0].checked.startswith("err" if kind == "ddp" else "unchecked: sharded")
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        ids = tiny.tokens(1, 30, seed=10 * step + rank)
        loss = wrapped(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if order != "unpatched":
        assert packs(wrapped) and packed_difference(wrapped) < T32
        assert tidegate.unpatch(wrapped) and not tidegate.report(wrapped)
        assert all("_tidegate" not in module.__dict__ for module in wrapped.modules())
    return torch.stack(losses)


def state_of(model, identity=id):
    """What undo() has to put back: class, attributes, hooks and configuration of every module, by its path."""

    def of(module):
        hooks = {name: list(map(identity, value.values())) for name, value in vars(module).items() if "_hooks" in name}
        config = getattr(module, "config", None)
        names = [getattr(config, f"_{op}_implementation", None) for op in ("attn", "experts")]
        return type(module).__name__, list(vars(module)), hooks, names, None if config is None else config.to_dict()

    return {path: of(module) for path, module in model.named_modules()}


def undo_after_sharding(family, order, rank):
    """Undo under FSDP2 gives the bits and the attributes of a model that was never patched."""
    model, ids = tiny.build(family), tiny.tokens(1, 30, seed=rank)
    if order == "before":
        handle, never = tidegate.patch(model), wrap(tiny.build(family), "fsdp2")
        wrap(model, "fsdp2")
    else:
        never = wrap(model, "fsdp2")
    want = tiny.logits(never, ids)
    identity = type if order == "before" else id  # the hooks of two models are of the same kinds only
    before = state_of(never, identity)  # after a call: FSDP2 makes some of its own attributes in the first
    if order == "after":
        handle = tidegate.patch(model)
    assert {row.status for row in handle.report().only(op="gdn_layer")} <= {"installed", "fallback"}
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()  # without a step: the weights stay as they are
    assert not torch.equal(out.logits.detach(), want)  # ours ran, and rounds otherwise
    handle.undo()
    assert torch.equal(tiny.logits(model, ids), want)
    assert state_of(model, identity) == before


def work(rank, port, function, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        results[rank] = function(rank)
    finally:
        dist.destroy_process_group()


def on_two_ranks(function):
    """What function(rank) returns in each of two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(work, (port, function, results), nprocs=2)
        return dict(results)


def train_all(rank):
    return {(kind, order): train(kind, order, rank) for kind in KINDS for order in ORDERS}


def undo_all(rank):
    for family in ("qwen3_5", "qwen3_5_moe"):
        for order in ORDERS[1:]:
            undo_after_sharding(family, order, rank)


@pytest.mark.slow
def test_two_processes():
    results = on_two_ranks(train_all)
    for rank in range(2):
        for kind in KINDS:
            expected = results[rank][kind, "unpatched"]
            assert all(tiny.relative(results[rank][kind, order], expected) < T32 for order in ORDERS), (rank, kind)


@pytest.mark.slow
def test_undo_under_fsdp2():
    assert len(on_two_ranks(undo_all)) == 2
