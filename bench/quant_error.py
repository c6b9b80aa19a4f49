#!/usr/bin/env python3
"""What int8 experts lose: relative rms error of a layer's output against fp64 with the bf16 weights.

    python bench/quant_error.py                  # prints a Markdown table

64 experts, 8 slots, 64 tokens; normal numbers, weights scaled so that every layer keeps the size of its input.
"""

import torch

import tidegate

E, SLOTS, T = 64, 8, 64


def problem(H, inside):
    generator = torch.Generator().manual_seed(H)

    def normal(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator)).bfloat16()

    weights, ids = torch.rand(T, E, generator=generator).topk(SLOTS)
    weights = weights / weights.sum(-1, keepdim=True)
    return (
        normal(T, H),
        ids.int(),
        weights,
        normal(E, 2 * inside, H, scale=H**-0.5),
        normal(E, H, inside, scale=inside**-0.5),
    )


def exact(x, ids, weights, gate_up, down):
    """Token by token in fp64, whatever the types."""
    x, weights, gate_up, down = (t.double() for t in (x, weights, gate_up, down))
    y = torch.zeros_like(x)
    for t in range(len(x)):
        for w, e in zip(weights[t], ids[t].tolist(), strict=True):
            gate, up = (gate_up[e] @ x[t]).chunk(2)
            y[t] += w * (down[e] @ (torch.nn.functional.silu(gate) * up))
    return y


def error(got, want):
    return ((got.double() - want).square().sum(-1) / want.square().sum(-1)).sqrt()


def rms(got, want):
    return float((got.double() - want).norm() / want.norm())


def main():
    print("| H, I | bf16 experts | int8 experts | largest error of a token | int8 weights, exact activations |")
    print("|---|---|---|---|---|")
    for H, inside in ((2048, 512), (1024, 256)):
        x, ids, weights, gate_up, down = problem(H, inside)
        want = exact(x, ids, weights, gate_up, down)
        plain = tidegate.moe_experts(x, ids, weights, gate_up, down)
        stored = [t for w in (gate_up, down) for t in tidegate.quantize(w)]
        found = tidegate.moe_experts_quant(x, ids, weights, *stored)
        back = [q.double() * scale.double()[..., None] for q, scale in (stored[:2], stored[2:])]
        alone = exact(x, ids, weights, *back)
        figures = (rms(plain, want), rms(found, want), float(error(found, want).max()), rms(alone, want))
        print(f"| {H}, {inside} | " + " | ".join(f"{v:.1e}".replace("e-0", "e-") for v in figures) + " |")


if __name__ == "__main__":
    main()
