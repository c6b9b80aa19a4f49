"""Sequence parallelism beside FSDP2, DDP and expert parallelism, on the same ranks and on a mesh of 2 x 2, against one
process: logits, loss, every gradient."""

import contextlib
import copy
import functools
import importlib

import pytest
import ranks as harness
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from sequence_case import Cases, alone, assert_same, batch, build, gradients, needs_support, refused, together  # noqa: E402

import tidegate  # noqa: E402
from tidegate.parallel import sequence_parallel  # noqa: E402

pytestmark = [needs_support, pytest.mark.slow]

WORLD = 4
ROWS = ((30, 11), (20, 25))  # of the two ranks along the other dimension
DENSE, MOE = "qwen3_5", "qwen3_5_moe"


@functools.cache
def mesh():
    """Ranks 0 and 1, and 2 and 3, are beside each other in "sequence"."""
    return dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))


def row(dimension):
    """Which row this rank works on, if rows are cut along a dimension."""
    return mesh().get_local_rank("data" if dimension == "sequence" else "sequence")


def one_row(family, mine, dtype):
    return alone(family, "two", ROWS[mine], dtype)


def both_rows(family, mine, scale, dtype):
    """Logits and loss of this rank's row; scale times the sum of both rows' gradients, and its terms."""
    a, b = (one_row(family, i, dtype) for i in (0, 1))
    sums = {name: (a[2][name] + b[2][name]) * scale for name in a[2]}
    return *(b if mine else a)[:2], sums, {name: torch.cat([a[3][name], b[3][name]]) * scale for name in a[3]}


def _assert(got, whole, part):
    """whole(dtype): one process's answers. part: what of its gradients this rank has."""

    def own(dtype):
        logits, loss, found, terms = whole(dtype)
        return logits, loss, part(found), terms

    assert_same(got, own(torch.float32), lambda: own(torch.float64), strict=False)  # experts' rows in another order


def everything(found):
    return found


def assert_row(family, mine, got, part=everything):
    _assert(got, functools.partial(one_row, family, mine), part)


def assert_rows(family, mine, scale, got, part=everything):
    _assert(got, functools.partial(both_rows, family, mine, scale), part)


def shard(model, over):
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=over)
    return fully_shard(model, mesh=over)


def step(model, handle, mine):
    """Whole logits, loss and whole gradients where parameters are sharded."""
    out = model(**batch(ROWS[mine]))
    out.loss.backward()
    if handle.grad_reduction == "sum":
        handle.reduce_gradients()
    else:
        refused(handle.reduce_gradients, "is sharded over ranks .* FSDP2 has reduced its gradient")
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return handle.gather(out.logits.detach()), out.loss.detach(), found


def fsdp_over(dimensions, ranks):
    """Two rows of data, each cut among two ranks; FSDP2 over all four, or over the two that have the same tokens."""
    model, mine = copy.deepcopy(build(DENSE)), row("sequence")
    shard(model, mesh() if dimensions == "both" else mesh()[dimensions])
    reduction = "mean" if dimensions == "both" else "sum"  # FSDP2 knows only its own ranks
    handle = sequence_parallel(model, mesh()["sequence"], "chain", grad_reduction=reduction)
    assert_rows(DENSE, mine, 1 / 2, step(model, handle, mine))


def fsdp_over_the_same_ranks(ranks):
    """It averages gradients."""
    model, mine = copy.deepcopy(build(DENSE)), row("sequence")
    shard(model, mesh()["sequence"])
    handle = sequence_parallel(model, mesh()["sequence"], "chain", grad_reduction="mean")
    assert_row(DENSE, mine, step(model, handle, mine))


def averaged_by_ddp(ranks):
    model = copy.deepcopy(build(DENSE))
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=ranks.groups[2])
    handle = sequence_parallel(wrapped, ranks.groups[2], "heads", grad_reduction="mean")
    out = wrapped(**batch(ROWS[0]))
    out.loss.backward()
    assert_row(DENSE, 0, (handle.gather(out.logits.detach()), out.loss.detach(), gradients(model)))


# Expert parallelism


def of_experts(rank, found):
    """Gradients, those of experts for the first or second half of them."""
    return {n: g.chunk(2)[rank] if ".experts." in n else g for n, g in found.items()}


def spread(dimension):
    return tidegate.ep.parallelize(copy.deepcopy(build(MOE)), mesh()[dimension], max_tokens=64)


def experts_on_the_same_ranks(ranks):
    """The ranks that share a row share the experts. An expert meets the tokens of both, whatever the reduction."""
    mine, part = row("sequence"), functools.partial(of_experts, mesh().get_local_rank("sequence"))
    model = spread("sequence")
    tokens = sum(ROWS[mine])
    for mode, reduction, starts in (
        ("chain", "sum", None),
        ("heads", "mean", None),
        ("scan", "sum", (0, tokens, tokens)),  # one rank has experts but no tokens
    ):
        with sequence_parallel(model, mesh()["sequence"], mode, grad_reduction=reduction) as handle:
            got = together(handle, model, handle.shard(batch(ROWS[mine]), starts))
        assert_row(MOE, mine, got, part)
    with sequence_parallel(model, mesh()["sequence"], "chain", grad_reduction="sum") as handle:
        before = together(handle, model, batch(ROWS[mine]))[2]
        model.train().gradient_checkpointing_enable(dict(use_reentrant=False))
        after = together(handle, model, batch(ROWS[mine]))[2]
    assert all(torch.equal(before[name], after[name]) for name in before)
    tidegate.ep.unregister()


def experts_on_the_other_dimension(ranks):
    """Each row is cut among two ranks; the ranks of the other dimension share the experts and have different rows."""
    mine, data = row("sequence"), mesh()["data"]
    model = spread("data")
    with sequence_parallel(model, mesh()["sequence"], "chain", grad_reduction="sum") as handle:
        logits, loss, found = together(handle, model, batch(ROWS[mine]))
    for name, gradient in found.items():  # data parallelism: experts have the tokens of both rows already
        if ".experts." not in name:
            dist.all_reduce(gradient, group=data.get_group())
    part = functools.partial(of_experts, data.get_local_rank())
    assert_rows(MOE, mine, 1, (logits, loss, found), part)
    tidegate.ep.unregister()


def experts_over_more_ranks(ranks):
    """All four share the experts, one each: two rows, each cut among two ranks; one row, cut among all."""
    mine, everyone = row("sequence"), dist.device_mesh.DeviceMesh.from_group(ranks.groups[4], "cpu")
    model = tidegate.ep.parallelize(copy.deepcopy(build(MOE)), everyone, max_tokens=64)
    with sequence_parallel(model, mesh()["sequence"], "chain", grad_reduction="sum") as handle:
        logits, loss, found = together(handle, model, batch(ROWS[mine]))
    for name, gradient in found.items():
        if ".experts." not in name:
            dist.all_reduce(gradient, group=mesh()["data"].get_group())

    def part(whole):
        return {n: g.chunk(4)[ranks.rank] if ".experts." in n else g for n, g in whole.items()}

    assert_rows(MOE, mine, 1, (logits, loss, found), part)
    with sequence_parallel(model, everyone, "chain", grad_reduction="sum") as handle:
        got = together(handle, model, batch(ROWS[0]))
    assert_row(MOE, 0, got, part)
    tidegate.ep.unregister()
    # Experts over two of the four ranks that share a row: nobody has the group that would have to add them up.
    model = spread("data")
    with sequence_parallel(model, everyone, "chain", grad_reduction="sum") as handle:
        refused(handle.reduce_gradients, r"experts that are spread over all ranks .*, got ranks \[(0, 2|1, 3)\]")
    tidegate.ep.unregister()


def plan_of_transformers(dimension, ranks):
    """Experts over two ranks, FSDP2 over four, as DistributedConfig(fsdp_size=4, ep_size=2) has it. The two are those
    that share a row, or those that do not."""
    from transformers.distributed import DistributedConfig

    tidegate.ep.register(max_tokens=64)
    model, mine = copy.deepcopy(build(MOE)), row(dimension)
    plan, _, meshes = type(model).prepare_distribute_model(DistributedConfig(fsdp_size=4, ep_size=2))
    assert meshes.get_mesh("ep").mesh.tolist() == mesh()["sequence"].mesh.tolist()
    model = type(model).maybe_distribute_model(model, plan, meshes)
    assert tidegate.ep.ep_enabled(model)
    handle = sequence_parallel(model, mesh()[dimension], "chain", grad_reduction="mean")
    assert_rows(MOE, mine, 1 / 2, step(model, handle, mine))
    tidegate.ep.unregister()


def tensor_parallelism(ranks):
    """It wants the tokens of a row on all of its ranks."""
    from torch.distributed.tensor import Shard, distribute_tensor

    over = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "tp"))
    model = copy.deepcopy(build(DENSE))
    head = model.lm_head
    head.weight = torch.nn.Parameter(distribute_tensor(head.weight.detach(), over["tp"], [Shard(0)]))
    refused(lambda: sequence_parallel(model, over["tp"], "chain"), "lm_head.weight is under tensor parallelism")


def cases():
    found = Cases()
    found.add("two-dimensions", 4, functools.partial(fsdp_over, "both"))
    found.add("fsdp-on-the-other-dimension", 4, functools.partial(fsdp_over, "data"))
    found.add("sharded-parameters", 4, fsdp_over_the_same_ranks)
    found.add("averaged-by-ddp", 2, averaged_by_ddp)
    found.add("tensor-parallelism", 4, tensor_parallelism)
    if tidegate.isa() == "fallback":  # expert parallelism needs the native library
        return found
    found.add("experts-on-the-same-ranks", 4, experts_on_the_same_ranks)
    found.add("experts-on-the-other-dimension", 4, experts_on_the_other_dimension)
    found.add("experts-over-more-ranks", 4, experts_over_more_ranks)
    with contextlib.suppress(ImportError):  # older Transformers have no such plan
        importlib.import_module("transformers.distributed.expert_parallel")
        for dimension in ("sequence", "data"):
            found.add(f"plan-of-transformers-{dimension}", 4, functools.partial(plan_of_transformers, dimension))
    return found


NAMES = list(cases())


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    return harness.run(cases, NAMES, WORLD, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", NAMES)
def test_ranks(failures, name):
    assert not failures[name], "\n".join(failures[name])
