"""A small model trained, prefilled and decoded twice: by Transformers alone, and after tidegate.patch(model).

The model has the architecture of Qwen3.5-MoE (linear and full attention, routed and shared experts) and reads bytes.
The text is examples/tides.txt, a paragraph a sample. Transformers cannot pack samples on a CPU (they would see each
other), so it gets them as padded rows; the patched model gets the same samples as one packed row. Both start from the
same weights and see the same samples in the same order, so that they must learn the same. Text, prefill and decode are
then those of one set of weights, which the patched model learned, in both.
"""

import argparse
import copy
import time
from pathlib import Path

import demo_plot
import torch
import transformers
from tqdm import tqdm
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

import tidegate
from tidegate.cli.generate import stream
from tidegate.cli.train import pad

HERE = Path(__file__).resolve().parent


def make_model(seed=0):
    """About two million parameters; three layers of linear attention for one of full attention."""
    torch.manual_seed(seed)
    config = Qwen3_5MoeTextConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=4,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3_5MoeForCausalLM(config)


def read_samples():
    """A paragraph a sample, its end marked by an empty line."""
    paragraphs = (HERE / "tides.txt").read_text().strip().split("\n\n")
    return [{"input_ids": list(f"{p}\n\n".encode()), "labels": list(f"{p}\n\n".encode())} for p in paragraphs]


def train(model, samples, collate, options, title):
    """Losses and seconds of every step. The same samples in the same order for both models."""
    order = torch.Generator().manual_seed(1)
    # With the usual eps a gradient that is nothing but rounding would move its weight like any other.
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, eps=1e-5)
    losses, seconds = [], []
    model.train()
    with tqdm(total=options.steps, desc=title, unit="step") as bar:
        for step in range(options.steps):
            picked = torch.randperm(len(samples), generator=order)[: options.samples].tolist()
            for group in optimizer.param_groups:  # up in a tenth of the steps, then down to a tenth of the rate
                group["lr"] = options.lr * min((step + 1) / (0.1 * options.steps), 1.1 - step / options.steps, 1.0)
            start = time.perf_counter()
            loss = model(**collate([samples[i] for i in picked]), use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seconds.append(time.perf_counter() - start)
            losses.append(loss.item())
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
            bar.update()
    model.eval()
    return losses, seconds


def logits(model, ids):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def largest_difference(a, b):
    """Largest difference, relative to the largest value."""
    return float((a - b).abs().max() / b.abs().max())


def median(values):
    return sorted(values)[len(values) // 2]


def speak(model, prompt, options):
    """Text after a prompt, seconds of the prefill of a long prompt, seconds of a token of decode."""
    text = list((HERE / "tides.txt").read_bytes())
    long = (text * (options.prefill // len(text) + 1))[: options.prefill]
    prefill = median([next(iter(stream(model, long, 1)))[1] for _ in range(3)])
    found = list(stream(model, list(prompt.encode()), options.tokens))
    return bytes(token for token, _ in found).decode(errors="replace"), prefill, median([s for _, s in found[1:]])


def arguments():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--steps", type=int, default=60, help="of training, for each of the two (default 60)")
    p.add_argument("--samples", type=int, default=8, help="paragraphs a step (default 8)")
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--tokens", type=int, default=200, help="bytes to generate (default 200)")
    p.add_argument("--prefill", type=int, default=2048, help="tokens of the prompt that is timed (default 2048)")
    p.add_argument("--prompt", default="The gate ", help="what the trained models go on from")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--png", type=Path, default=Path("demo.png"), help="loss curves (default demo.png)")
    p.add_argument("--output", type=Path, default=Path("demo-model"), help="the trained model (default demo-model)")
    return p.parse_args()


def main():
    options = arguments()
    begin = time.perf_counter()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()  # its advice to install GPU kernels is of no use here
    samples = read_samples()
    stock = make_model()
    patched = copy.deepcopy(stock)
    handle = tidegate.patch(patched)
    print(tidegate.report(), f"\n\n{handle.report()}\n")
    count = sum(p.numel() for p in stock.parameters())
    tokens = sum(len(s["input_ids"]) for s in samples)
    print(f"{count / 1e6:.1f} million parameters, fp32; {len(samples)} samples, {tokens} bytes\n")
    first = largest_difference(logits(patched, samples[0]["input_ids"]), logits(stock, samples[0]["input_ids"]))

    curves = {
        "Transformers, padded": train(stock, samples, pad, options, "Transformers, padded rows"),
        "Tidegate, packed": train(patched, samples, tidegate.pack, options, "Tidegate, one packed row "),
    }
    print(f"\n{demo_plot.terminal(curves)}\n")
    wrote = demo_plot.png(curves, options.png)
    print(f"curves: {wrote}" if wrote else "no PNG: matplotlib is not installed (pip install matplotlib)")

    (their_losses, their_times), (our_losses, our_times) = curves.values()
    loss = max(abs(a - b) for a, b in zip(our_losses, their_losses, strict=True))
    apart = largest_difference(logits(patched, samples[0]["input_ids"]), logits(stock, samples[0]["input_ids"]))
    print(f"\nLargest difference of the two curves: {loss:.1e}. Logits of the two, trained apart: {apart:.1e}.")
    print("Weights that differ in their last bits can send a token with two almost equal experts to the other one.")
    print("From here on both have the weights that the patched model learned.\n")

    stock.load_state_dict(patched.state_dict())
    (theirs, their_prefill, their_decode), (ours, our_prefill, our_decode) = (
        speak(model, options.prompt, options) for model in (stock, patched)
    )
    print(f"What the patched model says after {options.prompt!r}, most likely byte each time:\n")
    print(f"{options.prompt}{ours}\n")
    same = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours)))
    print(f"Transformers alone says the same for {same} of {len(ours)} characters.\n")

    after = largest_difference(logits(patched, samples[0]["input_ids"]), logits(stock, samples[0]["input_ids"]))
    step = [median(t) for t in (their_times, our_times)]
    rows = [
        ("training step", *(f"{1e3 * s:.0f} ms" for s in step), step[0] / step[1], f"{loss:.1e} (loss, any step)"),
        (
            f"prefill, {options.prefill} tokens",
            *(f"{options.prefill / s:.0f} tokens/s" for s in (their_prefill, our_prefill)),
            their_prefill / our_prefill,
            f"{first:.1e} (logits, before training)",
        ),
        (
            "decode",
            *(f"{1 / s:.0f} tokens/s" for s in (their_decode, our_decode)),
            their_decode / our_decode,
            f"{after:.1e} (logits, after training)",
        ),
    ]
    demo_plot.table(("", "Transformers", "Tidegate", "faster", "largest difference"), rows)
    handle.undo()
    patched.save_pretrained(options.output)
    print(f"\nTry the model:  tidegate generate {options.output} --bytes --prompt 'The keeper '")
    print(f"All of it took {time.perf_counter() - begin:.0f} s.")


if __name__ == "__main__":
    main()
