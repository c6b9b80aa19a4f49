"""How far sequence-parallel gradients are from one process, and both from fp64: the table of docs/sequence-parallel.md.

Three columns each: the worst gradient other than those of A_log and dt_bias, of its norm; the worst of these two, of
its terms; these two over all layers, of their norm.

usage: python tests/sequence_precision.py
"""

import functools
import pathlib
import tempfile

import ranks as harness
import torch
from sequence_case import GATES, alone, batch, build, distance, far, joined, together

from tidegate.parallel import sequence_parallel

FAMILY, HEADS, WORLD = "qwen3_5", "two", 4
LENGTHS, JOBS = (40, 41, 1000), ((2, "chain"), (3, "chain"), (4, "scan"))


def row(length, size, mode, ranks):
    if ranks.rank >= size:
        return None
    model = build(FAMILY, HEADS)
    with sequence_parallel(model, ranks.groups[size], mode, grad_reduction="sum") as handle:
        ours = together(handle, model, batch(length))
    if ranks.rank > 0:
        return None
    one, exact = (alone(FAMILY, HEADS, length, dtype) for dtype in (torch.float32, torch.float64))
    runs = ((ours, one), (one, exact), (ours, exact))
    figures = []
    for gates in (False, True):
        names = [name for name in one[2] if name.endswith(GATES) == gates]
        figures += [max(far(name, *pair) for name in names) for pair in runs]
    figures += [max(distance(joined(a, gate), joined(b, gate)) for gate in GATES) for a, b in runs]
    return f"| {length} | {size}, {mode} | " + " | ".join(f"{x:.1e}" for x in figures) + " |"


def cases():
    return {f"{t}-{size}": functools.partial(row, t, size, mode) for t in LENGTHS for size, mode in JOBS}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        rows = harness.run(cases, list(cases()), WORLD, pathlib.Path(folder))
    pairs = ("ranks - one", "one - fp64", "ranks - fp64")
    print("| tokens | ranks | " + " | ".join(pairs * 3) + " |\n|" + "---|" * 11)
    for found in rows.values():
        print(*found)
