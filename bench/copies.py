#!/usr/bin/env python3
"""What it costs to hand a transposed view of experts' weights to an operator that wants them contiguous.

    python bench/copies.py [--experts 256] [--tokens 1,16,2048]

Models store gate and up as [E,N,K]. An operator that insists on contiguous [E,K,N] copies all of them in every forward,
and again in every backward; one that takes strides does not. Peak memory is what the process needed beyond the weights.
"""

import argparse
import pathlib
import statistics
import time

import torch

import tidegate

H, N, SLOTS = 2048, 1024, 8


def status(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def measured(call, repeats):
    """(median milliseconds, MiB beyond what was there)."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before, times = status("VmRSS"), []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), max(0.0, status("VmHWM") - before)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--experts", type=int, default=256)
    p.add_argument("--tokens", default="1,16,2048")
    p.add_argument("--repeats", type=int, default=5)
    args = p.parse_args()
    weight = torch.empty(args.experts, N, H, dtype=torch.bfloat16)
    for matrix in weight:
        matrix.normal_(std=0.02)
    view = weight.mT  # [E,K,N], what a caller has who thinks in x @ w
    print(f"gate and up of {args.experts} experts, {weight.numel() * 2 / 1e9:.2f} GB, isa {tidegate.isa()}\n")
    print("| tokens | as stored | transposed view | view made contiguous first | peak of view | peak with the copy |")
    print("|---|---|---|---|---|---|")
    for tokens in map(int, args.tokens.split(",")):
        ids = torch.rand(tokens, args.experts).topk(min(SLOTS, args.experts)).indices.flatten()
        counts = torch.bincount(ids, minlength=args.experts)
        x = torch.randn(ids.numel(), H).bfloat16()
        calls = {
            "stored": lambda x=x, c=counts: tidegate.grouped_matmul(x, weight, c),
            "view": lambda x=x, c=counts: tidegate.grouped_matmul(x, view, c, weight_axes="kn"),
            "copy": lambda x=x, c=counts: tidegate.grouped_matmul(x, view.contiguous(), c, weight_axes="kn"),
        }
        calls["stored"]()
        found = {name: measured(call, args.repeats) for name, call in calls.items()}
        ms = [f"{found[name][0]:.3g} ms" for name in calls]
        print(f"| {tokens} | {' | '.join(ms)} | {found['view'][1]:.0f} MiB | {found['copy'][1]:.0f} MiB |")


if __name__ == "__main__":
    main()
