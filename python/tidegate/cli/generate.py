"""tidegate generate: text from a model, and how fast it came."""

import time

from tidegate.cli import adapters, command, memory, models

NAME = "generate"
HELP = "generate text with a patched model and print its speed"
DESCRIPTION = """\
Loads a model, patches it, reads the prompt (prefill) and generates tokens one by one (decode). The text goes to
standard output as it comes, the speeds to standard error. Without --temperature the most likely token is taken.
A folder with an adapter of PEFT is loaded on top of the model that its adapter_config.json names."""
EXAMPLES = (
    'tidegate generate ~/models/Qwen3.5-0.8B --prompt "The tide turns when" --tokens 64',
    'tidegate generate demo-model --bytes --prompt "The gate "    # the model that `make demo` leaves',
)


def add_arguments(parser):
    models.add_arguments(parser)
    parser.add_argument("--prompt", required=True, help="the text to go on from")
    parser.add_argument("--tokens", type=command.positive, default=128, help="most tokens to generate (default 128)")
    parser.add_argument(
        "--temperature", type=command.temperature, default=0.0, help="0: the most likely token (default); else sample"
    )
    parser.add_argument("--seed", type=command.seed, default=0, help="of the sampling (default 0)")
    parser.add_argument("--bytes", action="store_true", help="tokens are bytes, there is no tokenizer")
    parser.add_argument("--unpatched", action="store_true", help="Transformers alone, to compare")


def choose(logits, temperature, generator):
    """The next token of one row of logits."""
    import torch

    if temperature <= 0:
        return int(logits.argmax())
    # In fp64 and below zero: a tiny temperature neither vanishes nor makes the largest logit infinite.
    scaled = (logits.double() - logits.max()) / temperature
    return int(torch.multinomial(scaled.softmax(-1), 1, generator=generator))


def stream(model, ids, count, end=None, temperature=0.0, seed=0):
    """Yields (token, seconds it took); the first one's are the prefill's."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    step, cache = torch.tensor([ids]), None
    for _ in range(count):
        start = time.perf_counter()
        with torch.inference_mode():
            out = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, token = out.past_key_values, choose(out.logits[0, -1], temperature, generator)
        yield token, time.perf_counter() - start
        if token == end:
            return
        step = torch.tensor([[token]])


def run(options):
    import sys

    command.set_threads(options.threads)
    base, adapter = adapters.split(options.model)
    tokens = models.Tokens(base, options.bytes)
    ids = tokens.encode(options.prompt)
    if not ids:
        raise command.Failure("--prompt: expected at least one token, got none", "give a longer prompt")
    size = adapters.WIDTH * memory.count_parameters(adapter) if adapter else 0
    model = models.load(base, options.dtype, options.ignore_memory, adapter_bytes=size)
    model = adapters.attach(model, adapter) if adapter else model
    import tidegate

    handle = None if options.unpatched else models.patch(model, options.model)
    found, times, shown = [], [], ""
    print(options.prompt, end="", flush=True)
    for token, seconds in stream(model, ids, options.tokens, tokens.end, options.temperature, options.seed):
        found.append(token)
        times.append(seconds)
        text = tokens.decode(found)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else a character is not complete yet
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print(tokens.decode(found)[len(shown) :])  # also a character that never became complete
    if handle is not None and handle.installed:
        who = f"tidegate {tidegate.__version__} on {tidegate.isa()}"
    else:
        who = "Transformers alone" + (f" ({handle.notes[0]})" if handle is not None else "")
    decode = f", decode {(len(times) - 1) / sum(times[1:]):.1f} tokens/s" if len(times) > 1 else ""
    print(f"{who}: prefill of {len(ids)} tokens {len(ids) / times[0]:.0f} tokens/s{decode}", file=sys.stderr)
    return 0
