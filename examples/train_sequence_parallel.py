#!/usr/bin/env python3
"""Packed training with the tokens of every step cut among processes, beside the same training in one process.

    torchrun --nproc-per-node 2 examples/train_sequence_parallel.py             # both curves, side by side
    python examples/train_sequence_parallel.py                                  # one process alone

A tiny random Qwen3.5 (3 layers of linear and 1 of full attention) learns sequences in which every token follows from
the one before it. Rank 0 also trains a second copy in one process; the two curves must agree. Needs Transformers.
"""

import argparse
import copy
import os

import torch
import torch.distributed as dist

import tidegate
from tidegate.parallel import sequence_parallel

VOCABULARY = 256


def make_model():
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )
    return Qwen3_5ForCausalLM(config).train()


def batches(steps):
    """Packs of samples of any length; the same on every rank."""
    random = torch.Generator().manual_seed(1)
    follower = torch.randperm(VOCABULARY, generator=random)
    for _ in range(steps):
        samples = []
        for length in torch.randint(5, 120, (4,), generator=random).tolist():
            tokens = [torch.randint(VOCABULARY, (), generator=random)]
            while len(tokens) < length:
                tokens.append(follower[tokens[-1]])
            samples.append(torch.stack(tokens))
        yield tidegate.pack(samples)


def train(model, steps, handle=None):
    """The losses. handle: what sequence_parallel returned for the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches(steps):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        if handle is not None:
            handle.reduce_gradients()  # FSDP2 or DDP over these ranks would do it, with grad_reduction="mean"
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--steps", type=int, default=50)
    p.add_argument("--mode", default="auto", help="auto, heads, chain or scan")
    options = p.parse_args()
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = make_model()
    tidegate.patch(model)
    twin = copy.deepcopy(model)
    handle = sequence_parallel(model, mode=options.mode, grad_reduction="sum")
    losses = train(model, options.steps, handle)
    if rank == 0:
        print(handle.report())
        alone = train(twin, options.steps) if handle.on else losses
        for step in range(0, options.steps, max(options.steps // 10, 1)):
            print(f"step {step:3}  loss {losses[step]:.6f}  one process {alone[step]:.6f}")
        worst = max(abs(a - b) / b for a, b in zip(losses, alone, strict=True))
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; largest relative difference to one process {worst:.1e}")
        if worst > 1e-4 or losses[-1] > 0.8 * losses[0]:
            raise SystemExit("the curves differ, or the model did not learn")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
