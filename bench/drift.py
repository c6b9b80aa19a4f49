#!/usr/bin/env python3
"""How far a state drifts from fp64 over a long generation, by its storage type.

    python bench/drift.py                        # prints a Markdown table; 131072 tokens, about a minute

One sequence, token by token on a pool, K = V = 64. Every row is another decay: from a head that forgets within a few
tokens to one that keeps everything. Errors are relative rms against the fp64 recurrence on the same inputs.
"""

import argparse

import torch
import torch.nn.functional as F

import tidegate

D, CALL = 64, 16  # head size; tokens of a call, all of them token by token
DECAYS = (0.3, 1e-2, 1e-3, 1e-4, 0.0)


def tokens(count, heads, start):
    """q, k, v, g, beta of a stretch of the sequence; the same in every type."""
    random = torch.Generator().manual_seed(start)
    unit = lambda: F.normalize(torch.randn(count, heads, D, generator=random), dim=-1)  # noqa: E731
    q, k, v = unit(), unit(), torch.randn(count, heads, D, generator=random)
    g = -torch.tensor(DECAYS) * 2 * torch.rand(count, heads, generator=random)
    return (
        q.bfloat16().float(),
        k.bfloat16().float(),
        v.bfloat16().float(),
        g,
        torch.rand(count, heads, generator=random),
    )


def error(x, truth):
    return ((x.double() - truth).square().mean((-2, -1)) / truth.square().mean((-2, -1))).sqrt()


def run(total, marks):
    heads, cu = len(DECAYS), torch.tensor([0, CALL])
    pools = {t: torch.zeros(1, heads, D, D, dtype=t) for t in (torch.float64, torch.float32, torch.bfloat16)}
    slot, o = torch.zeros(1, dtype=torch.int64), {}
    for start in range(0, total, 4096):
        x = tokens(4096, heads, start)
        for first in range(0, 4096, CALL):
            part = [t[first : first + CALL] for t in x]
            for kind, pool in pools.items():
                args = [t.double() for t in part] if kind == torch.float64 else part
                o[kind] = tidegate.recurrent_gated_delta_rule(*args, pool, state_indices=slot, cu_seqlens=cu)
            done = start + first + CALL
            if done in marks:
                truth = pools[torch.float64][0]
                for kind in (torch.float32, torch.bfloat16):
                    out = error(o[kind].transpose(0, 1), o[torch.float64].transpose(0, 1))
                    yield done, kind, error(pools[kind][0], truth), out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=131072)
    options = parser.parse_args()
    marks = {n for n in (1024, 16384, 131072) if n <= options.tokens}
    print("| tokens | state | " + " | ".join(f"g about -{d:g}" for d in DECAYS) + " |")
    print("|---|---|" + "---|" * len(DECAYS))
    with torch.inference_mode():
        for done, kind, state, o in run(options.tokens, marks):
            cells = " | ".join(f"{s:.1e}, o {e:.1e}" for s, e in zip(state.tolist(), o.tolist(), strict=True))
            print(f"| {done} | {str(kind).removeprefix('torch.')} | {cells} |", flush=True)
