#!/usr/bin/env python3
"""Decode steps against the memory they move, and what a call costs around its kernel.

    python bench/decode.py                       # prints Markdown tables

D1's heads (16/32, K = V = 128, bf16, fp32 states). Columns of one table are interleaved; times are medians.
"""

import argparse

import torch

import tidegate
from items import ITEMS, Item, inputs
from prefill import medians

step = tidegate.recurrent_gated_delta_rule


def call(B, v_first=False, storage=torch.float32, tokens=1, HK=16, HV=32):
    """A step, and the pool that it works on."""
    x = inputs(Item("decode", "prefill", "", dict(B=1, T=B * tokens, HK=HK, HV=HV)), 0)
    q, k, v, a, b = (x[n][0] for n in ("q", "k", "v", "a", "b"))
    pool = torch.zeros(B, HV, 128, 128, dtype=storage)
    options = dict(A_log=x["A_log"], dt_bias=x["dt_bias"], beta_sigmoid=True, state_v_first=v_first)
    options |= dict(state_indices=torch.arange(B), cu_seqlens=torch.arange(B + 1) * tokens, out=torch.empty_like(v))
    return lambda: step(q, k, v, a, b, pool, **options), pool


def bandwidth(reps):
    print(
        "| sequences | state | step | GB/s | read-modify-write in place | GB/s | of it |\n|---|---|---|---|---|---|---|"
    )
    for B in (1, 16, 64):
        for name, options in (
            ("fp32", {}),
            ("fp32, V-first", {"v_first": True}),
            ("bf16", {"storage": torch.bfloat16}),
        ):
            run, pool = call(B, **options)
            plain = torch.ones(pool.numel() * pool.element_size() // 4)
            t = medians({"step": run, "plain": lambda x=plain: x.mul_(1.0)}, reps)
            rate = {n: 2e-9 * pool.numel() * pool.element_size() / s for n, s in t.items()}
            cells = f"{1e3 * t['step']:.3f} ms | {rate['step']:.1f} | {1e3 * t['plain']:.3f} ms | {rate['plain']:.1f}"
            print(f"| {B} | {name} | {cells} | {rate['step'] / rate['plain']:.0%} |")


def overhead(reps):
    """The same call on heads of 1 x 1 x 8: nothing but the way to the kernel and back."""
    small = inputs(Item("call", "prefill", "", dict(B=1, T=1, HK=1, HV=1)), 0)
    q, k, v = (small[n][0, ..., :8].contiguous() for n in ("q", "k", "v"))
    pool, slots, out = torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.int32), torch.empty_like(v)
    args = (q, k, v, small["g"][0], small["beta"][0], pool)
    op = torch.ops.tidegate.recurrent_gated_delta_rule
    rows = {
        "tidegate.recurrent_gated_delta_rule(..., out=)": lambda: step(*args, state_indices=slots, out=out),
        "tidegate.recurrent_gated_delta_rule(...)": lambda: step(*args, state_indices=slots),
        "torch.ops.tidegate.recurrent_gated_delta_rule(...)": lambda: op(*args, state_indices=slots),
    }
    print("\n| call | us |\n|---|---|")
    for name, seconds in medians(rows, 50 * reps).items():
        print(f"| `{name}` | {1e6 * seconds:.1f} |")


def layer(reps):
    from engines.tidegate import _layer, _layer_separate

    print("\n| sequences | one call | separate operators | ratio |\n|---|---|---|---|")
    for name in ("L1_B1", "L1_B16"):
        item = ITEMS[name]
        x = inputs(item, 0)
        t = medians({"one": _layer(item, x).call, "separate": _layer_separate(item, x).call}, 4 * reps)
        cells = " | ".join(f"{1e6 * t[n]:.0f} us" for n in ("one", "separate"))
        print(f"| {item.sizes['B']} | {cells} | {t['separate'] / t['one']:.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--reps", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        bandwidth(options.reps)
        overhead(options.reps)
        layer(options.reps)
