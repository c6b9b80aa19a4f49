"""tidegate train: fine-tune a model on lines of JSON."""

import contextlib
import json
import math
import random
import sys
import time
from pathlib import Path

from tidegate.cli import adapters, command, models, saving

NAME = "train"
HELP = "fine-tune a patched model on a file of JSON lines"
DESCRIPTION = """\
Trains all weights, or a LoRA adapter, with AdamW. Every line of the data is one sample: {"text": "..."},
{"messages": [...]} for a tokenizer with a chat template, or {"input_ids": [...], "labels": [...]}. With --packed a
batch is one row of samples without padding, which a patched model computes as if each were alone; otherwise samples are
rows padded on the right. Train all weights in float32: AdamW loses small steps in 16 bits. Ctrl-C saves what is
trained and ends with exit code 130."""
EXAMPLES = (
    "tidegate train ~/models/Qwen3.5-0.8B --data notes.jsonl --packed --lora --output notes-adapter",
    "tidegate train demo-model --bytes --data text.jsonl --packed --dtype float32 --epochs 3",
)


def add_arguments(parser):
    models.add_arguments(parser)
    parser.add_argument("--data", required=True, type=Path, help="a file, one JSON object a line")
    parser.add_argument("--output", type=Path, help="where the result goes (default: MODEL_DIR-trained)")
    parser.add_argument("--save-every", type=command.positive, metavar="N", help="also save after every N steps")
    parser.add_argument("--packed", action="store_true", help="samples in one row, no padding")
    parser.add_argument(
        "--lora",
        action="store_true",
        help="train an adapter (needs peft) on the projections of attention, not the weights",
    )
    parser.add_argument("--rank", type=command.positive, default=16, help="of the adapter (default 16)")
    parser.add_argument("--epochs", type=command.positive, default=1, help="passes over the data (default 1)")
    parser.add_argument("--steps", type=command.positive, help="stop after so many steps")
    parser.add_argument(
        "--length", type=command.positive, default=2048, help="tokens a sample is cut at (default 2048)"
    )
    parser.add_argument("--batch-tokens", type=command.positive, default=4096, help="most tokens a step (default 4096)")
    parser.add_argument("--lr", type=command.rate, help="learning rate (default 1e-4 with --lora, else 1e-5)")
    parser.add_argument("--seed", type=command.seed, default=0, help="of the order of samples (default 0)")
    parser.add_argument("--bytes", action="store_true", help="tokens are bytes, there is no tokenizer")
    parser.add_argument("--unpatched", action="store_true", help="Transformers alone, to compare (not with --packed)")


def read_lines(path: Path):
    """The lines of a UTF-8 file. Only \\n ends one: JSON allows other separators of Unicode inside a string."""
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise command.Failure(f"{path}: not UTF-8: {error}", "convert it:  iconv -f latin1 -t utf-8") from None


def integers(value, name):
    """A list of integers, or a TypeError."""
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise TypeError(f"{name}: expected a list of integers")
    return value


def check_vocabulary(samples, size: int, path: Path):
    """Ids that the model has no row for are an error before the first step."""
    wrong = [i for sample in samples for i in sample["input_ids"] if not 0 <= i < size]
    wrong += [i for sample in samples for i in sample["labels"] if i != -100 and not 0 <= i < size]
    if wrong:
        raise command.Failure(
            f"{path}: token id {wrong[0]}: expected 0 to {size - 1}", "use the tokenizer of this model"
        )


def read_samples(path: Path, tokens, length: int):
    """One {"input_ids", "labels"} a line; a wrong line fails with its number."""
    if not path.is_file():
        raise command.Failure(
            f"{path}: no such file, or a folder", 'write one JSON object a line, for instance {"text": "..."}'
        )
    samples, unlabelled = [], 0
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise TypeError(f'expected an object like {{"text": ...}}, got a {type(entry).__name__}')
            labels = None
            if "input_ids" in entry:
                ids, labels = integers(entry["input_ids"], "input_ids"), entry.get("labels")
                labels = None if labels is None else integers(labels, "labels")
                if labels is not None and len(labels) != len(ids):
                    raise TypeError(f"labels: expected {len(ids)} numbers (as input_ids), got {len(labels)}")
            elif "messages" in entry:
                ids = tokens.encode_chat(entry["messages"])
            else:
                if "text" not in entry:
                    raise TypeError(f"expected text, messages or input_ids, got {', '.join(entry) or 'nothing'}")
                if not isinstance(entry["text"], str):
                    raise TypeError("text: expected a string")
                ids = tokens.encode(entry["text"])
                ids += [tokens.end] if tokens.end is not None else []
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise command.Failure(
                f"{path}:{number}: {type(error).__name__}: {error}",
                'a line is {"text": "..."}, {"messages": [...]} or {"input_ids": [...]}',
            ) from None
        sample = {"input_ids": ids[:length], "labels": list(labels if labels is not None else ids)[:length]}
        if any(label != -100 for label in sample["labels"][1:]):  # nothing predicts the first
            samples.append(sample)
        else:
            unlabelled += 1
    if unlabelled:
        print(f"{unlabelled} samples left out: no token after the first has a label", file=sys.stderr)
    if not samples and not unlabelled:
        raise command.Failure(f"{path} has no samples", 'write one object a line, like {"text": "..."}')
    if not samples:
        raise command.Failure(
            f"{path} has no sample with a label after its first token",
            "write samples of two tokens or more, or raise --length",
        )
    return samples


def batches(samples, most: int, seed: int, padded: bool):
    """Lists of samples that together are at most `most` tokens (counting padding, if there is any), shuffled."""
    order = list(samples)
    random.Random(seed).shuffle(order)
    batch, longest, total = [], 0, 0
    for sample in order:
        size = len(sample["input_ids"])
        after = max(longest, size) * (len(batch) + 1) if padded else total + size
        if batch and after > most:
            yield batch
            batch, longest, total = [], 0, 0
        batch.append(sample)
        longest, total = max(longest, size), total + size
    if batch:
        yield batch


def pad(batch):
    """Rows padded on the right; padding is masked and has no label."""
    import torch

    width = max(len(s["input_ids"]) for s in batch)

    def rows(name, filler):
        return torch.tensor([list(s[name]) + [filler] * (width - len(s[name])) for s in batch])

    mask = torch.tensor([[1] * len(s["input_ids"]) + [0] * (width - len(s["input_ids"])) for s in batch])
    return {"input_ids": rows("input_ids", 0), "labels": rows("labels", -100), "attention_mask": mask}


def steps(model, samples, *, packed, batch_tokens, lr, epochs=1, most=None, seed=0):
    """Trains; yields (step, of how many, loss, tokens) after every step."""
    import torch

    import tidegate

    plan = [list(batches(samples, batch_tokens, seed + epoch, not packed)) for epoch in range(epochs)]
    plan = [batch for epoch in plan for batch in epoch][:most]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    warm = max(1, len(plan) // 20)
    model.train()
    for number, batch in enumerate(plan, 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, number / warm)
        loss = model(**(tidegate.pack(batch) if packed else pad(batch)), use_cache=False).loss
        if not math.isfinite(loss.item()):
            raise command.Failure(
                f"the loss became {loss.item()}", "use a smaller --lr, or --dtype float32", command.WRONG
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        with saving.uninterrupted():
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield number, len(plan), loss.item(), sum(len(s["input_ids"]) for s in batch)


def run(options):
    if options.packed and options.unpatched:
        raise command.Failure(
            "--packed needs the patch: Transformers alone lets packed samples see each other on CPUs", "leave one away"
        )
    if options.lora:
        command.require("peft", "--lora")
    command.require("tqdm", "a progress bar")
    command.set_threads(options.threads)
    folder = models.folder_of(options.model)
    output = options.output or Path(options.model.rstrip("/") + "-trained")
    saving.check_free(output)
    tokens = models.Tokens(folder, options.bytes)
    samples = read_samples(options.data, tokens, options.length)
    saving.check_writable(output)
    model = models.load(
        folder,
        options.dtype,
        options.ignore_memory,
        train_all=not options.lora,
        step_tokens=min(options.batch_tokens, sum(len(sample["input_ids"]) for sample in samples)),
        adapter_bytes=4 * adapters.WIDTH * adapters.count(folder, options.rank) if options.lora else 0,
    )
    if not options.lora and next(model.parameters()).dtype.itemsize < 4:
        print("tidegate: AdamW loses small steps in 16 bits: --dtype float32 trains all of them", file=sys.stderr)
    check_vocabulary(samples, model.get_input_embeddings().num_embeddings, options.data)
    import torch

    torch.manual_seed(options.seed)
    handle = None if options.unpatched else models.patch(model, options.model)
    if options.packed and not handle.installed:
        raise command.Failure(f"--packed needs the patch, and {handle.notes[0]}", "unset TIDEGATE_PATCH")
    trained = adapters.adapt(model, options.rank) if options.lora else model
    return train(options, trained, handle, samples, tokens, output)


def train(options, model, handle, samples, tokens, output):
    """All steps, and the result after the last, after every --save-every of them and after Ctrl-C."""
    from tqdm import tqdm

    from tidegate.check.original import unpatched

    def save():
        nonlocal saved
        with saving.uninterrupted():
            with unpatched(handle) if handle else contextlib.nullcontext():  # what is saved is a model of Transformers
                saving.save(output, *(part for part in (model, tokens.tokenizer) if part is not None))
            saved = len(losses)

    lr = options.lr or (1e-4 if options.lora else 1e-5)
    settings = dict(packed=options.packed, batch_tokens=options.batch_tokens, lr=lr, epochs=options.epochs)
    start, seen, saved, losses = time.perf_counter(), 0, 0, []
    try:
        with tqdm(unit="step", desc="training") as bar:
            for step, total, loss, count in steps(model, samples, most=options.steps, seed=options.seed, **settings):
                seen, bar.total = seen + count, total
                losses.append(loss)
                speed = f"{seen / (time.perf_counter() - start):.0f} tokens/s"
                bar.set_postfix_str(f"loss {loss:.3f}, {speed}", refresh=False)
                bar.update()
                if options.save_every and step % options.save_every == 0 and step < total:
                    try:
                        save()
                    except command.Failure as error:  # there is time to make room until the next one
                        bar.write(f"tidegate: not saved after step {step}: {error}", file=sys.stderr)
        save()
    except KeyboardInterrupt:
        if saved < len(losses):
            with contextlib.suppress(KeyboardInterrupt):  # pressed once more: it waits for the end of the save
                save()
        done = f"what {saved} steps trained is saved to {output}" if saved else "no step was done, nothing saved"
        print(f"tidegate: interrupted: {done}", file=sys.stderr)
        return command.INTERRUPTED
    tail = losses[-max(1, len(losses) // 10) :]
    print(f"{len(losses)} steps, {seen} tokens, loss {losses[0]:.3f} -> {sum(tail) / len(tail):.3f}; saved to {output}")
    return 0
