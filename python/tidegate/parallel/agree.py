"""All ranks look at each other before the first message of a step: what one finds wrong is raised on all."""

import torch

from tidegate.errors import SequenceParallelError

FACTS = (  # what must be equal on all ranks, in words for the error
    "batch rows",
    "tokens",
    "boundaries of sequences",
    "input_ids",
    "labels",
    "cuts of the shards",
    "data type",
    "grad mode",
    "parameters that need gradients",
    "arguments",
)  # and one fact that may differ: whether the input needs a gradient
_TEXT = 400  # bytes of an error's text that others see
_HEAD = len(FACTS) + 2


def fingerprint(values):
    """A number for a sequence of integers, the same in every process."""
    return hash(tuple(values))


def agree(link, error=None, facts=()):
    """One exchange of fixed size. Raises the same SequenceParallelError on all ranks if any rank has an error, or if
    their facts differ. Returns whether the input of any rank needs a gradient."""
    head = torch.zeros(_HEAD, dtype=torch.int64)
    text = torch.zeros(_TEXT, dtype=torch.uint8)
    if error is not None:
        said = f"{type(error).__name__}: {error}".encode()[:_TEXT]
        head[0] = len(said)
        text[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    elif facts:
        head[1 : 1 + len(facts)] = torch.tensor(facts, dtype=torch.int64)
    found = link.all_gather(torch.cat([head.view(torch.uint8), text]), "agree")
    heads = found[:, : 8 * _HEAD].contiguous().view(torch.int64)
    bad = [r for r in range(link.size) if int(heads[r, 0])]
    if bad:
        said = [
            bytes(found[r, 8 * _HEAD : 8 * _HEAD + int(heads[r, 0])].tolist()).decode(errors="replace") for r in bad
        ]
        lines = "; ".join(f"rank {r}: {text}" for r, text in zip(bad, said, strict=True))
        raise SequenceParallelError(f"sequence parallelism: {lines}") from error
    for i, what in enumerate(FACTS, 1):
        values = heads[:, i].tolist()
        if len(set(values)) > 1:
            other = next(r for r in range(link.size) if values[r] != values[0])
            values = f": {values[0]} and {values[other]}" if all(0 <= v < 1 << 40 for v in values) else ""
            raise SequenceParallelError(
                f"sequence parallelism: {what} differ between rank 0 and rank {other}{values}; every rank of the group "
                "must be given the same batch"
            )
    return bool(heads[:, -1].any())
