"""Several processes on gloo for the tests of a file: started once, they run all cases one after the other.

A case is a function of a Ranks object. Groups of the first 2, 3, ... processes stand for smaller jobs.
"""

import datetime
import multiprocessing
import os
import socket
import time
import traceback
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Imported once by the fork server, which whoever starts it first starts for all; every process is then a cheap fork.
PRELOAD = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "tidegate.ep",
    "tidegate.parallel",
    "transformers.models.qwen3_5.modeling_qwen3_5",
    "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
)
PATIENCE = datetime.timedelta(seconds=60)  # a rank that hangs ends the run


class Ranks(NamedTuple):
    rank: int
    groups: dict  # by size; this process is in it if its rank is smaller


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _worker(rank, world, port, load, names, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=PATIENCE)
    ranks = Ranks(rank, {size: dist.new_group(list(range(size))) for size in range(2, world + 1)})
    cases = load()
    found = {}
    for name in names:
        torch.manual_seed(0)
        try:
            found[name] = cases[name](ranks)
        except BaseException:
            found[name] = f"rank {rank}: {traceback.format_exc()}"
    torch.save(found, f"{results}.{rank}")  # not gathered: ranks of small groups have nothing to do for a while
    # The store lives in rank 0; others may still need it.
    store = dist.distributed_c10d._get_default_store()
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < world:
        time.sleep(0.05)


def run(load, names, world, folder, method="forkserver"):
    """Runs the cases load()[name] on `world` processes; returns what failed, by name (an empty list: nothing).

    forkserver imports torch once for all; spawn makes processes that see the environment as it is now.
    """
    results = str(folder / "results")
    multiprocessing.set_forkserver_preload(list(PRELOAD))
    mp.start_processes(_worker, (world, _free_port(), load, list(names), results), nprocs=world, start_method=method)
    everyone = [torch.load(f"{results}.{rank}") for rank in range(world)]
    return {name: [of[name] for of in everyone if of[name]] for name in names}
