#!/usr/bin/env python3
"""Sequence parallelism between a layer's projections: bytes, time and peak memory of a rank, by mode and ranks.

    python bench/sequence_parallel.py                     # T = 16384 on 1, 2 and 4 ranks, and where the modes cross
    python bench/sequence_parallel.py --tokens 4096 --ranks 1 2

Convolution and delta rule of Qwen3-Next's heads (16/32, K = V = 128, bf16), forward and backward. Ranks are processes
on gloo with the machine's cores shared among them. Times are medians of the slowest rank, modes interleaved; bytes are
those of the rank that sends most. Memory is the largest growth of a rank's peak resident set over one forward and
backward, its inputs included, in processes of their own.
"""

import argparse
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tidegate
from tidegate.parallel import linear_attention
from tidegate.parallel.choice import LINEAR, Heads, payload
from tidegate.parallel.link import Link
from tidegate.parallel.plan import SpPlan, split
from training import status

HK, HV, K, V, TAPS = 16, 32, 128, 128, 4
SIZES = HK, HV, K, V
CHANNELS = 2 * HK * K + HV * V


class Alone:
    """The group of one process: everything stays where it is."""

    rank, size, traffic = 0, 1, {}

    def all_to_all(self, buffer, sends, receives, purpose):
        return buffer


def problem(plan, dtype=torch.bfloat16):
    """Inputs of a rank and the gradient of its output."""
    torch.manual_seed(plan.rank)
    T = plan.own.tokens
    tokens = [torch.randn(1, T, n).to(dtype) for n in (CHANNELS, HV, HV)]
    weight, gates = torch.randn(CHANNELS, TAPS).to(dtype), [torch.zeros(HV), torch.zeros(HV)]
    return [t.requires_grad_() for t in (*tokens, weight, *gates)], torch.randn(1, T, HV, V).to(dtype)


def step(plan, tensors, do):
    mixed, a, b, weight, A_log, dt_bias = tensors
    mix = linear_attention.by_heads if plan.linear == "heads" else linear_attention.by_states
    o = mix(plan, SIZES, mixed, a, b, weight, None, A_log, dt_bias)
    forward = time.perf_counter()
    return forward, torch.autograd.grad(o, tensors, do)


def timed(plan, tensors, do, link):
    """Seconds of a forward, and of both; of the slowest rank."""
    if plan.ranks > 1:
        dist.barrier(link.group)
    start = time.perf_counter()
    forward, _ = step(plan, tensors, do)
    found = torch.tensor([forward - start, time.perf_counter() - start], dtype=torch.float64)
    if plan.ranks > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=link.group)
    return found.tolist()


def peak(plan):
    """Bytes by which one forward and backward, with their inputs, raise this rank's peak."""
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # forget the peak of what came before
    before = status("VmRSS")
    step(plan, *problem(plan))
    return status("VmHWM") - before


def measure(link, tokens, reps):
    """Per mode: seconds of forward and of both, bytes sent in both, and those of a forward by the formula."""
    cu, modes = (0, tokens), LINEAR if link.size > 1 else ("heads",)
    plans = {mode: SpPlan(link, split(cu, link.size), cu, mode) for mode in modes}
    tensors, do = problem(plans[modes[0]])
    times, sent = {mode: [] for mode in modes}, {}
    for _ in range(reps):
        for mode, plan in plans.items():
            link.traffic = {}
            times[mode].append(timed(plan, tensors, do, link))
            sent[mode] = most(link, sum(t.sent for t in link.traffic.values()))
    rows = {}
    for mode, plan in plans.items():
        forward, both = (statistics.median(t[i] for t in times[mode]) for i in (0, 1))
        formula = payload(mode, Heads(*SIZES, 0), plan.own.tokens, link.size, 2) if link.size > 1 else 0
        rows[mode] = dict(forward=forward, both=both, sent=sent[mode], formula=formula)
    return rows


def most(link, value):
    """The largest value of all ranks."""
    found = torch.tensor(value)
    if link.size > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=link.group)
    return int(found)


def show(ranks, tokens, rows, peaks):
    for mode, row in rows.items():
        cells = [
            str(ranks),
            str(tokens),
            "one process" if ranks == 1 else mode,
            f"{row['sent'] / 1e6:.2f}",
            f"{row['formula'] / 1e6:.2f}",
            f"{1e3 * row['forward']:.0f}",
            f"{1e3 * row['both']:.0f}",
            f"{peaks[mode] / 1e6:.0f}" if mode in peaks else "",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


def start(rank, ranks, port, threads):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(max(threads // ranks, 1))
    if ranks > 1:
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
    link = Link(dist.group.WORLD) if ranks > 1 else Alone()
    warm = SpPlan(link, split((0, 256), ranks), (0, 256), "heads")
    step(warm, *problem(warm))  # workspaces, connections and code are there before anything counts
    return link


def finish(ranks):
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def memory_worker(rank, ranks, port, options, mode, results):
    link = start(rank, ranks, port, options.threads)
    cu = (0, options.tokens)
    found = most(link, peak(SpPlan(link, split(cu, ranks), cu, mode)))
    if rank == 0:
        results.put(found)
    finish(ranks)


def time_worker(rank, ranks, port, options, peaks):
    link = start(rank, ranks, port, options.threads)
    rows = measure(link, options.tokens, options.reps)
    if rank == 0:
        show(ranks, options.tokens, rows, peaks)
    tokens = 64 * ranks
    while ranks > 1 and options.crossover and tokens <= min(options.tokens // 2, 4096):
        rows = measure(link, tokens, options.reps)
        if rank == 0:
            show(ranks, tokens, rows, {})
            best = min(rows, key=lambda mode: rows[mode]["both"])
            print(f"<!-- {ranks} ranks, {tokens // ranks} tokens a rank: {best} is fastest -->", flush=True)
        tokens *= 2
    finish(ranks)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tokens", type=int, default=16384)
    p.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    p.add_argument("--threads", type=int, default=os.cpu_count(), help="of all ranks together")
    p.add_argument("--reps", type=int, default=5)
    p.add_argument("--no-crossover", dest="crossover", action="store_false")
    options = p.parse_args()
    heads = Heads(*SIZES, 0)
    for ranks in (r for r in options.ranks if r > 1):
        row = (2 * HK * K + 2 * HV * V + 2 * HV) * 2 * (ranks - 1) / ranks
        equal = ", ".join(f"{m} {payload(m, heads, 0, ranks, 2) / row:.0f}" for m in ("chain", "scan"))
        print(f"{ranks} ranks: as many bytes as head split at so many tokens a rank: {equal}")
    print(f"tidegate {tidegate.__version__}, isa {tidegate.isa()}, {options.threads} threads in all\n")
    print("| ranks | T | mode | sent MB (F+B) | formula MB (F) | F ms | F+B ms | peak MB |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    results = mp.get_context("spawn").SimpleQueue()
    for ranks in options.ranks:
        peaks = {}
        for mode in LINEAR if ranks > 1 else ("heads",):
            mp.start_processes(memory_worker, (ranks, free_port(), options, mode, results), nprocs=ranks)
            peaks[mode] = results.get()
        mp.start_processes(time_worker, (ranks, free_port(), options, peaks), nprocs=ranks)


if __name__ == "__main__":
    main()
