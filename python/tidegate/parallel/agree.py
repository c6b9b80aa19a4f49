"""All ranks look at each other before the first message of a step: what one finds wrong is raised on all."""

import torch

from tidegate.errors import SequenceParallelError

ANY = "a gradient of the input"  # the one fact that may differ: it counts as soon as one rank has it
FACTS = (  # what must be equal on all ranks, in words for the error
    "settings",
    "batch rows",
    "tokens",
    "boundaries of sequences",
    "input_ids",
    "labels",
    "position_ids",
    "cuts of the shards",
    "data type",
    "grad mode",
    "parameters that need gradients",
    "arguments",
    ANY,
)
_TEXT = 400  # bytes of an error's text that others see
_HEAD = 8 * (1 + len(FACTS))


def fingerprint(values):
    """A number for a sequence of integers, the same in every process."""
    return hash(tuple(values))


def _said(row):
    """The text of a rank's error, or empty."""
    length = int(row[:8].view(torch.int64))
    return bytes(row[_HEAD : _HEAD + length].tolist()).decode(errors="replace")


def agree(link, error, facts):
    """One exchange of fixed size. Raises the same SequenceParallelError on all ranks if any rank has an error, or if
    their facts (a number for some of FACTS) differ. Returns whether any rank has the fact ANY."""
    kind = "" if isinstance(error, SequenceParallelError) else f"{type(error).__name__}: "
    said = b"" if error is None else f"{kind}{error}".encode()[:_TEXT]
    head = torch.tensor([len(said), *(facts.get(name, 0) for name in FACTS)])
    text = torch.tensor([*said, *bytes(_TEXT - len(said))], dtype=torch.uint8)
    found = link.all_gather(torch.cat([head.view(torch.uint8), text]), "agree")
    errors = {r: text for r in range(link.size) if (text := _said(found[r]))}
    if errors:
        same = len(errors) == link.size and len(set(errors.values())) == 1
        lines = [errors[0]] if same else [f"rank {r}: {text}" for r, text in errors.items()]
        raise SequenceParallelError(f"sequence parallelism: {'; '.join(lines)}") from error
    numbers = found[:, 8:_HEAD].contiguous().view(torch.int64)
    for what, values in zip(FACTS[:-1], numbers.T.tolist(), strict=False):
        other = next((r for r in range(link.size) if values[r] != values[0]), None)
        if other is not None:
            values = f": {values[0]} and {values[other]}" if what in ("batch rows", "tokens") else ""
            raise SequenceParallelError(
                f"sequence parallelism: {what} differ between rank 0 and rank {other}{values}; every rank of the group "
                "must be given the same"
            )
    return bool(numbers[:, -1].any())
