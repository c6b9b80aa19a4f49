"""What ranks on several nodes tell each other before rows travel: who failed, and what each is about to do."""

from contextlib import contextmanager

import torch
import torch.distributed as dist

from tidegate import _native
from tidegate.errors import ExpertParallelError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*FLOATS, torch.int8, None)  # of rows; their numbers travel
OPERATORS = ("dispatch", "redispatch", "combine", "reset")
# Equal on all ranks: they decide how everything that follows is read, and what backward exchanges.
TERMS = {
    "operator": "operator",
    "handle": "handle",
    "slots": "slots",
    "row_bytes": "bytes of a row",
    "dtype": "dtype",
    "int8": "int8",
    "smooth_scale": "smooth_scale given",
    "needs_backward": "needs_backward",
    "dx_wanted": "gradient of x wanted",
    "row_values": "row_values",
    "static_shape": "static_shape",
    "weighted": "weighted",
}
NAMES = {"operator": OPERATORS, "dtype": DTYPES}  # of numbers, for messages


def gather_facts(op, group, facts, found):
    """What `found()` gives on every rank. Collective: the facts of a buffer must be equal on all ranks, and a rank on
    which found() raises is named by the others."""
    failure = mine = None
    try:
        mine = found()
    except Exception as error:  # noqa: BLE001
        failure = _native.translated(error)
    said = [None] * dist.get_world_size(group)
    text = failure and str(failure).split("\n", 1)[0]
    dist.all_gather_object(said, (text, facts, mine), group=group)
    if failure:
        raise failure from None
    for rank, (text, theirs, _) in enumerate(said):
        if text is not None:
            raise ExpertParallelError(f"{op}: rank {rank} failed: {text}")
        for name, value in facts.items():
            if theirs[name] != value:
                here = dist.get_rank(group)
                raise ExpertParallelError(
                    f"{op}: rank {here} and rank {rank} disagree: {name} is {value} on rank {here} and {theirs[name]} "
                    f"on rank {rank}"
                )
    return [theirs for *_, theirs in said]


class Agreement:
    """Of the ranks of a process group. After a failure all of them can go on."""

    def __init__(self, group):
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def compare(self, op, counts=None, tokens=0, **terms):
        """(what every rank counted for this one, tokens of every rank). With them travel the terms, which must be
        equal, and the news of a rank that failed."""
        terms = {name: names.index(terms[name]) for name, names in NAMES.items()} | {
            name: int(value) for name, value in terms.items() if name not in NAMES
        }
        row = [terms.get(name, 0) for name in TERMS]
        mine = torch.tensor([[count, tokens, *row] for count in counts or [0] * self.ranks])
        theirs = self._exchange(mine)
        if (theirs[:, 0] < 0).any():
            rank, text = next((rank, text) for rank, text in enumerate(self._texts(None)) if text is not None)
            raise ExpertParallelError(f"{op}: rank {rank} failed: {text}")
        for rank, numbers in enumerate(theirs[:, 2:].tolist()):
            for (term, name), a, b in zip(TERMS.items(), row, numbers, strict=True):
                if a != b:
                    a, b = (NAMES[term][a], NAMES[term][b]) if term in NAMES else (a, b)
                    raise ExpertParallelError(
                        f"{op}: rank {self.rank} and rank {rank} disagree: {name} is {a} on rank {self.rank} "
                        f"and {b} on rank {rank}"
                    )
        return theirs[:, 0].tolist(), theirs[:, 1].tolist()

    def meet(self):
        """Ends when all ranks are here. Those that are still in a call hear that others have left it."""
        row = [OPERATORS.index("reset") if name == "operator" else 0 for name in TERMS]
        everybody = False
        while not everybody:
            theirs = self._exchange(torch.tensor([[0, 0, *row]] * self.ranks))
            if (theirs[:, 0] < 0).any():
                self._texts(None)
            everybody = theirs[:, 2:].tolist() == [row] * self.ranks

    @contextmanager
    def checking(self):
        """Around what a rank does alone before `compare`: if it fails, the rank says so there, rather than let the
        others wait."""
        try:
            yield
        except Exception as error:
            error = _native.translated(error)
            self._exchange(torch.full((self.ranks, 2 + len(TERMS)), -1))
            self._texts(str(error).split("\n", 1)[0])
            raise error from None

    def _exchange(self, mine):
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self.group)
        return theirs

    def _texts(self, text):
        """What failed on each rank, or None."""
        texts = [None] * self.ranks
        dist.all_gather_object(texts, text, group=self.group)
        return texts
