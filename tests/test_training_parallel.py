"""Training in several processes over gloo: DDP and FSDP2 give the gradients of one process."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_delta_rule_training import Layer

WORLD = 2


def _rank_inputs(rank):
    return torch.randn(1, 40, 16, generator=torch.Generator().manual_seed(rank))


def _loss(layer, rank):
    return layer(_rank_inputs(rank)).square().mean()


def _layer():
    torch.manual_seed(0)
    return Layer()


def _ddp(layer):
    return torch.nn.parallel.DistributedDataParallel(layer)


def _fsdp(layer):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (WORLD,)))


def _worker(rank, wrap, rendezvous, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD)
    try:
        layer = wrap(_layer())
        _loss(layer, rank).backward()
        gradients = {}
        for name, parameter in layer.named_parameters():
            gradient = parameter.grad
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            gradients[name.removeprefix("module.")] = whole.clone()
        if rank == 0:
            torch.save(gradients, results)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("wrap", [_ddp, _fsdp])
def test_gradients_of_one_process(wrap, tmp_path):
    results = tmp_path / "gradients.pt"
    worker = functools.partial(_worker, wrap=wrap, rendezvous=f"file://{tmp_path}/store", results=str(results))
    mp.start_processes(worker, nprocs=WORLD, start_method="spawn")
    layer = _layer()
    (sum(_loss(layer, rank) for rank in range(WORLD)) / WORLD).backward()
    found = torch.load(results)
    assert found.keys() == dict(layer.named_parameters()).keys()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-7)
