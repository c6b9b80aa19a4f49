#!/usr/bin/env python3
"""Forward and backward of the fused delta rule: time by tokens, the ratio to the forward alone, and memory.

    python bench/training.py                     # prints a Markdown table

BW's heads (16/32, K = V = 128, bf16). Times are medians, forward and forward + backward interleaved. Memory is the
growth of the peak resident set over one forward and backward in a process of its own, beside what it must be: output,
gradients and the states that the forward saves, 4 K V HV / 256 bytes a token. Workspaces of the threads do not grow
with the tokens.
"""

import argparse
import subprocess
import sys

import torch

import tidegate
from items import Item, inputs
from prefill import HK, HV, D, medians, table

NAMES = ("q", "k", "v", "g", "beta")


def problem(tokens):
    x = inputs(Item("scaling", "train", "", dict(B=1, T=tokens, HK=HK, HV=HV)), 0)
    return [x[n].requires_grad_() for n in NAMES], x["do"]


def forward_backward(args, do):
    o, _ = tidegate.chunk_gated_delta_rule(*args)
    return torch.autograd.grad(o, args, do)


def bytes_of(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def formula(args, do):
    """Bytes that live at the peak beside the inputs and do: o, the gradients, the saved states."""
    tokens = args[0].shape[1]
    states = (tokens - 1) // 256 * HV * D * D * 4
    gates = 2 * tokens * HV * 4  # dg and dbeta before they take the type of the gates
    return bytes_of([do]) + bytes_of(args) + states + gates


def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure_memory(tokens, threads):
    """The child's side: prints the growth of the peak and the two sums it is compared with."""
    torch.set_num_threads(threads)
    forward_backward(*problem(256))  # workspaces and code are there before the count begins
    args, do = problem(tokens)
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # forget the peak of making the inputs
    before = status("VmRSS")
    kept = forward_backward(args, do)
    print(status("VmHWM") - before, bytes_of(args) + bytes_of(kept), formula(args, do))


def memory(tokens, threads):
    command = [sys.executable, __file__, "--memory", str(tokens), "--threads", str(threads)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return map(int, out.split())


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--tokens", type=int, default=16384, help="longest sequence")
    p.add_argument("--reps", type=int, default=7)
    p.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    options = p.parse_args()
    if options.memory:
        return measure_memory(options.memory, options.threads)
    torch.set_num_threads(options.threads)
    print(f"tidegate {tidegate.__version__}, isa {tidegate.isa()}, {options.threads} threads")
    rows, tokens = [], 1024
    while tokens <= options.tokens:
        args, do = problem(tokens)
        plain = [a.detach() for a in args]
        found = medians(
            {
                "F": lambda: tidegate.chunk_gated_delta_rule(*plain),  # noqa: B023
                "F+B": lambda: forward_backward(args, do),  # noqa: B023
            },
            options.reps,
        )
        growth, both, expected = memory(tokens, options.threads)
        rows.append(
            [
                str(tokens),
                f"{1e3 * found['F']:.0f}",
                f"{1e3 * found['F+B']:.0f}",
                f"{found['F+B'] / found['F']:.2f}",
                f"{1e6 * found['F+B'] / tokens:.1f}",
                f"{growth / 1e6:.0f}",
                f"{expected / 1e6:.0f}",
                f"{growth / both:.2f}",
            ]
        )
        tokens *= 2
    header = ["T", "F ms", "F+B ms", "(F+B)/F", "us / token", "peak extra MB", "formula MB", "of inputs + gradients"]
    table("Training", header, rows)


if __name__ == "__main__":
    main()
