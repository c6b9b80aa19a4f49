#!/usr/bin/env python3
"""Milliseconds of the fused delta rule by tokens, forward and forward + backward, as JSON.

    python bench/growth.py --threads 2

P1's heads (16/32, K = V = 128, bf16). What `tidegate bench --growth` puts into its results.
"""

import argparse
import json

import torch

import tidegate
from prefill import call, medians, problem
from training import forward_backward
from training import problem as training_problem


def measure(most, reps):
    """{"forward": [[tokens, ms], ...], "forward + backward": ...}"""
    found = {"forward": [], "forward + backward": []}
    tokens = 256
    while tokens <= most:
        args, do = training_problem(tokens)
        calls = {
            "forward": call(problem(tokens)),
            "forward + backward": lambda args=args, do=do: forward_backward(args, do),
        }
        for name, seconds in medians(calls, reps).items():
            found[name].append([tokens, round(1e3 * seconds, 3)])
        tokens *= 2
    return found


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--tokens", type=int, default=16384, help="longest sequence")
    p.add_argument("--reps", type=int, default=5)
    options = p.parse_args()
    torch.set_num_threads(options.threads)
    found = measure(options.tokens, options.reps)
    print(json.dumps({"isa": tidegate.isa(), "threads": options.threads, "milliseconds": found}))


if __name__ == "__main__":
    main()
