#!/usr/bin/env python3
"""A whole model before and after tidegate.patch: prefill, training step, decode, and where the time of the rest goes.

    python bench/model.py                        # the layers of Qwen3.5 0.8B
    python bench/model.py --model 35b-a3b        # the layers of Qwen3.5 35B-A3B, 4 of them

Random weights, bf16, real layer shapes; the vocabulary is cut (it is the same product in both columns). Both models
have the same weights and are timed in turn, in one process; times are medians.
"""

import argparse
import copy
from collections import Counter

import torch

import tidegate
from prefill import medians, table

SHAPES = {
    "0.8b": dict(
        family="qwen3_5",
        num_hidden_layers=8,
        hidden_size=1024,
        intermediate_size=3584,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
    ),
    "35b-a3b": dict(
        family="qwen3_5_moe",
        num_hidden_layers=4,
        hidden_size=2048,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_experts=256,
        num_experts_per_tok=8,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
    ),
}


def build(name, vocabulary):
    """A causal language model of the text family, random weights in bf16."""
    from transformers import AutoModelForCausalLM

    sizes = dict(SHAPES[name])
    family = sizes.pop("family")
    if family == "qwen3_5":
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig as Config
    else:
        from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig as Config
    config = Config(vocab_size=vocabulary, linear_key_head_dim=128, linear_value_head_dim=128, **sizes)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for label, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(0.0, 0.02, generator=generator)
            else:
                p.fill_(0.5 if "A_log" in label or "dt_bias" in label else 0.1)
        for module in model.modules():  # buffers of rotary embeddings are computed, not stored
            if hasattr(module, "compute_default_rope_parameters"):
                module.__init__(module.config)
    return model.eval()


def prefill(model, ids):
    def call():
        with torch.inference_mode():
            return model(input_ids=ids, use_cache=True, logits_to_keep=1).logits

    return call


def decode(model, ids, steps):
    """`steps` tokens after a prompt; the cache grows from call to call, in both models alike."""
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values

    def call():
        token = ids[:, :1]
        with torch.inference_mode():
            for _ in range(steps):
                token = model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)

    return call


def train(model, ids):
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def call():
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return loss

    return call


def where(call, count=8):
    """The operators that a call spends its time in, in percent of the whole."""
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        call()
    events = sorted(profile.key_averages(), key=lambda e: -e.self_cpu_time_total)
    whole = sum(e.self_cpu_time_total for e in events)
    return ", ".join(f"{e.key} {e.self_cpu_time_total / whole:.0%}" for e in events[:count])


def difference(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm())


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", choices=SHAPES, default="0.8b")
    p.add_argument("--items", default="prefill,decode,decode_after_128,train")
    p.add_argument("--tokens", type=int, default=1024)
    p.add_argument("--vocabulary", type=int, default=8192)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--reps", type=int, default=3)
    options = p.parse_args()
    known = ("prefill", "decode", "decode_after_128", "train")
    if unknown := [name for name in options.items.split(",") if name not in known]:
        p.error(f"--items: expected names from {', '.join(known)}, got {', '.join(unknown)}")
    torch.set_num_threads(options.threads)
    stock = build(options.model, options.vocabulary)
    patched = copy.deepcopy(stock) if options.model == "0.8b" else build(options.model, options.vocabulary)
    handle = tidegate.patch(patched)
    report = handle.report()
    print(
        "\n".join(
            f"{op}: {count} x installed" for op, count in Counter(r.op for r in report.only(status="installed")).items()
        )
    )
    ids = torch.randint(options.vocabulary, (1, options.tokens), generator=torch.Generator().manual_seed(1))
    error = difference(prefill(patched, ids)(), prefill(stock, ids)())
    print(f"\nlogits of the last token, relative difference between the two: {error:.1e}")
    makers = {
        "prefill": lambda model: prefill(model, ids),
        "decode": lambda model: decode(model, ids, 4),
        "decode_after_128": lambda model: decode(model, ids[:, :128], 4),
        "train": lambda model: train(model, ids),
    }
    rows, profiles = [], []
    for name in options.items.split(","):
        calls = {"stock": makers[name](stock), "patched": makers[name](patched)}
        t = medians(calls, options.reps, warmup=1)
        rows.append([name, f"{t['stock']:.3f} s", f"{t['patched']:.3f} s", f"{t['stock'] / t['patched']:.2f}x"])
        print(*rows[-1], flush=True)  # the next item may take minutes
        profiles += [f"{name}, {which}: {where(call)}" for which, call in calls.items()]
    table(f"{options.model}, {options.tokens} tokens", ["", "stock", "patched", "faster"], rows)
    print("\nWhere the time goes:\n" + "\n".join(f"- {line}" for line in profiles))


if __name__ == "__main__":
    main()
