#!/usr/bin/env python3
"""How the fused delta rule's time grows: with tokens, by instruction set, by threads, with snapshots and with splits.

    python bench/prefill.py                      # prints Markdown tables

P1's heads (16/32, K = V = 128, bf16). Times are medians; columns of one table are interleaved.
"""

import argparse
import statistics
import time

import torch

import tidegate
from items import Item, inputs

HK, HV, D = 16, 32, 128
op = torch.ops.tidegate.chunk_gated_delta_rule_fwd


def problem(tokens):
    x = inputs(Item("scaling", "prefill", "", dict(B=1, T=tokens, HK=HK, HV=HV)), 0)
    return [x[n] for n in ("q", "k", "v", "g", "beta")]


def gflops(tokens, seconds):
    return 6e-9 * D * D * HV * tokens / seconds


def medians(calls, reps, warmup=2):
    """{name: call} -> {name: seconds}, interleaved, after some rounds that warm up."""
    times = {name: [] for name in calls}
    for round_ in range(reps + warmup):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if round_ >= warmup:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def table(title, header, rows):
    print(f"\n{title}\n\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def call(args, **options):
    o = torch.empty_like(args[2])
    state = torch.empty(1, HV, D, D)
    return lambda: op.out(*args, o=o, final_state=state, **options)


def tokens_table(most, reps):
    rows = []
    tokens = 256
    while tokens <= most:
        seconds = medians({"": call(problem(tokens))}, max(3, reps if tokens <= 8192 else 3))[""]
        each = f"{1e6 * seconds / tokens:.2f}"
        rows.append([str(tokens), f"{1e3 * seconds:.1f}", each, f"{gflops(tokens, seconds):.0f}"])
        tokens *= 2
    table("Tokens", ["T", "ms", "us / token", "GFLOP/s (6KV)"], rows)


def isa_table(available, tokens, reps):
    args, active, rows = problem(tokens), tidegate.isa(), []
    for isa in available:
        tidegate.set_isa(isa)
        calls = {p: call(args, precision=p) for p in ("fp32", "bf16")}
        found = medians(calls, 3 if isa == "scalar" else reps)
        for precision, seconds in found.items():
            rows.append([isa, precision, f"{1e3 * seconds:.1f}", f"{gflops(tokens, seconds):.0f}"])
    tidegate.set_isa(active)
    table(f"Instruction sets, T={tokens}", ["isa", "precision", "ms", "GFLOP/s (6KV)"], rows)


def snapshot_table(tokens, reps):
    args, calls = problem(tokens), {"none": call(problem(tokens))}
    for step in (tidegate.chunk_size(), 64, 256, 100):
        at = torch.tensor([(0, t) for t in range(step, tokens + 1, step)])
        calls[f"every {step} tokens"] = call(args, snapshot_at=at, snapshots=torch.empty(len(at), HV, D, D))
    found = medians(calls, reps)
    rows = [[n, f"{1e3 * s:.1f}", f"{100 * (s / found['none'] - 1):+.1f} %"] for n, s in found.items()]
    table(f"Snapshots of the state, T={tokens}", ["snapshots", "ms", "extra time"], rows)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--tokens", type=int, default=65536, help="longest sequence")
    p.add_argument("--reps", type=int, default=9)
    options = p.parse_args()
    torch.set_num_threads(options.threads)
    available = torch.ops.tidegate.about().split(";")[2].split(",")
    print(f"tidegate {tidegate.__version__}, isa {tidegate.isa()}, {options.threads} threads")
    tokens_table(options.tokens, options.reps)
    isa_table(available, 2048, options.reps)
    snapshot_table(4096, options.reps)


if __name__ == "__main__":
    main()
