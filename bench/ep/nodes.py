"""Two nodes: dispatch + combine with one row for every (token, node), beside plain all_to_all over the same link.

Started once for every rank by scripts/two_nodes.sh, which also limits the link. Bytes are those that the link's
interface counted. H=7168, top-8 of 256 experts, bf16, identity experts; times are medians of the slowest rank, in ms.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist

import tidegate
from run import EXPERTS, HIDDEN, SLOTS, make, stock_exchange, through_gloo


def link_bytes():
    """Sent and received by this node so far."""
    folder = f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics"
    return sum(int(open(f"{folder}/{kind}_bytes").read()) for kind in ("tx", "rx"))


def through_nodes(buffer, x, ids, weights):
    begin = time.perf_counter()
    handle = buffer.dispatch(x, ids, weights)
    rows = buffer.expand(handle)
    middle = time.perf_counter()
    out, _ = buffer.combine(rows, handle)
    return out, (middle - begin, time.perf_counter() - middle)


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, ids, weights = make(rank, options.tokens)
    sizes = dict(experts=EXPERTS, slots=SLOTS, row_bytes=2 * HIDDEN, max_tokens=options.tokens)
    exchange = stock_exchange(ranks)
    ways = {"plain all_to_all": lambda: through_gloo(exchange, x, ids, weights)}
    for mode in ("exact", "fast"):
        buffer = tidegate.ep.NodesBuffer(combine=mode, name=mode, **sizes)
        assert len(buffer.nodes) == 2, buffer.nodes
        ways[mode] = lambda buffer=buffer: through_nodes(buffer, x, ids, weights)
    times, moved = {way: [] for way in ways}, {way: [] for way in ways}
    for i in range(options.rounds + 1):
        for way, run in ways.items():
            dist.barrier()
            before = link_bytes()
            out, spent = run()
            total = torch.tensor([sum(spent) * 1e3])
            dist.barrier()
            bytes_now = link_bytes() - before
            dist.all_reduce(total, dist.ReduceOp.MAX)
            # Identity experts, weights that sum to 1.
            assert torch.allclose(out.float(), x.float(), rtol=2e-2, atol=2e-2), way
            if i > 0:
                times[way].append(total.item())
                moved[way].append(bytes_now)
    if rank == 0:
        base_time, base_bytes = (statistics.median(d["plain all_to_all"]) for d in (times, moved))
        print(f"{options.tokens} tokens a rank, {ranks} ranks on 2 nodes")
        for way in ways:
            t, b = statistics.median(times[way]), statistics.median(moved[way])
            print(f"{way:17} {t:8.1f} ms {b / 1e6:7.2f} MB   {t / base_time:5.2f}x time {b / base_bytes:5.2f}x bytes")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
