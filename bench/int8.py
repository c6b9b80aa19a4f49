#!/usr/bin/env python3
"""Experts of a layer in bf16 and in int8, timed in turn.

    python bench/int8.py --experts 64,256 --tokens 1,16,64,256,2048

H 2048, I 512, 8 slots. Experts are drawn anew in every turn; the ratio is the median of the turns' ratios.
"""

import argparse
import statistics
import time

import torch

import tidegate
from prefill import table

HIDDEN, WIDTH, SLOTS = 2048, 512, 8


def timed(function, *args):
    begin = time.perf_counter()
    function(*args)
    return time.perf_counter() - begin


def compare(experts, tokens, turns, weights, quantised):
    """Median times in ms, and the median of their ratios."""
    x = torch.randn(tokens, HIDDEN).bfloat16()
    calls = (tidegate.moe_experts, weights), (tidegate.moe_experts_quant, quantised)
    times = [[], []]
    for turn in range(turns):
        ids = torch.stack([torch.randperm(experts)[:SLOTS] for _ in range(tokens)]).int()
        slots = torch.rand(tokens, SLOTS)
        for i in (0, 1) if turn % 2 else (1, 0):
            function, given = calls[i]
            times[i].append(timed(function, x, ids, slots, *given))
    bf16, int8 = map(statistics.median, times)
    return bf16 * 1e3, int8 * 1e3, statistics.median(a / b for a, b in zip(*times, strict=True))


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--experts", default="64,256")
    p.add_argument("--tokens", default="1,16,64,256,2048")
    p.add_argument("--threads", type=int, default=2)
    options = p.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for experts in map(int, options.experts.split(",")):
        shapes = (experts, 2 * WIDTH, HIDDEN), (experts, HIDDEN, WIDTH)
        weights = [torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02) for shape in shapes]
        quantised = [part for weight in weights for part in tidegate.quantize(weight)]
        for tokens in map(int, options.tokens.split(",")):
            bf16, int8, ratio = compare(experts, tokens, max(6, 300 // tokens), weights, quantised)
            rows.append((str(experts), str(tokens), f"{bf16:.2f} ms", f"{int8:.2f} ms", f"{ratio:.2f}x"))
    table("experts of a layer", ("experts", "tokens", "bf16", "int8", "faster"), rows)


if __name__ == "__main__":
    main()
