"""Who holds which tokens, and what has to cross from shard to shard: pure functions of the boundaries.

Tokens of a step lie in one flat row; sequences are cut out of it by `cu` (no empty ones), shards by `starts`. A shard's
piece of a sequence is a fragment. A shard takes a state if its first fragment does not begin its sequence, and gives
one if its last fragment does not end its own.
"""

import bisect
import dataclasses
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch

GRID = 32  # shards begin at multiples of it in the sequence that they cut: chunks then lie as in one process
GROUP_TOKENS = 64  # of a shard, for every group of heads that a chain takes apart


def split(cu, ranks):
    """Starts of nearly equal shards, each on the grid of the sequence that it cuts, or where one begins.

    A start moves by half a step at most, and so a rank of a very short row may get nothing: in exchange the ranks
    round as one process does.
    """
    tokens = cu[-1]
    starts = [tokens * r // ranks for r in range(ranks + 1)]
    for r in range(1, ranks if tokens > 0 else 1):
        sequence = bisect.bisect_right(cu, starts[r]) - 1
        first, last = cu[sequence], cu[sequence + 1]
        starts[r] = min(first + round((starts[r] - first) / GRID) * GRID, last)
    return tuple(starts)


def shares(total, ranks):
    """(first, last) of `total` heads for every rank, as equal as they can be."""
    return [(total * r // ranks, total * (r + 1) // ranks) for r in range(ranks)]


class Part(NamedTuple):
    """Tokens [begin, end) of a shard that one call of an operator takes; cu: their sequences, None for one."""

    begin: int
    end: int
    cu: torch.Tensor | None
    takes: bool
    gives: bool


class Shard(NamedTuple):
    """Tokens [begin, end) of the flat row, which one rank holds."""

    begin: int
    end: int
    cu: tuple  # of its fragments, from 0
    takes: bool
    gives: bool

    @property
    def tokens(self) -> int:
        """How many."""
        return self.end - self.begin

    @property
    def first(self) -> tuple[int, int]:
        """(begin, end) of the first fragment."""
        return self.cu[0], self.cu[1]

    @property
    def last(self) -> tuple[int, int]:
        """(begin, end) of the last fragment."""
        return self.cu[-2], self.cu[-1]


@dataclasses.dataclass(frozen=True, eq=False)
class SpPlan:
    """One step's layout, the same on all ranks but for `rank`. Layers get it as the argument `sequence_parallel`."""

    link: object
    starts: tuple
    cu: tuple
    linear: str = "chain"  # heads, chain or scan
    attention: str = "ring"  # heads or ring
    grad_scale: int | None = None  # of gradients that come out of a gathered tensor; None: there are none
    shape: tuple = (1, 0)  # [B, T] of the batch
    kept: torch.Tensor | None = None  # places of the flat row's tokens in the flattened batch; None: all

    @property
    def rank(self) -> int:
        """Of this process in the group."""
        return self.link.rank

    @property
    def ranks(self) -> int:
        """How many share the row."""
        return len(self.starts) - 1

    @property
    def tokens(self) -> int:
        """Of the whole row."""
        return self.starts[-1]

    @cached_property
    def shards(self) -> list[Shard]:
        """Of all ranks."""
        return [self._shard(a, b) for a, b in pairwise(self.starts)]

    def _shard(self, begin, end):
        if begin == end:
            return Shard(begin, end, (0,), False, False)
        inside = self.cu[bisect.bisect_right(self.cu, begin) : bisect.bisect_left(self.cu, end)]
        cu = (0, *(c - begin for c in inside), end - begin)
        return Shard(begin, end, cu, self._sequence(begin)[0] < begin, self._sequence(end - 1)[1] > end)

    def _sequence(self, token):
        n = bisect.bisect_right(self.cu, token)
        return self.cu[n - 1], self.cu[n]

    @property
    def own(self) -> Shard:
        """The shard of this rank."""
        return self.shards[self.rank]

    def owner(self, token: int) -> int:
        """The rank that holds a token."""
        return bisect.bisect_right(self.starts, token) - 1

    @property
    def left(self) -> int:
        """The rank whose state this one takes."""
        return self.owner(self.own.begin - 1)

    @property
    def right(self) -> int:
        """The rank that takes this one's state."""
        return self.owner(self.own.end)

    @cached_property
    def straddles(self) -> bool:
        """Whether any sequence lies on more than one rank."""
        return any(shard.takes for shard in self.shards)

    def meets(self, earlier: int, later: int) -> bool:
        """Whether the last fragment of one rank and the first of a later one are of the same sequence."""
        a, b = self.shards[earlier], self.shards[later]
        return a.gives and b.takes and self._sequence(a.end - 1) == self._sequence(b.begin)

    @cached_property
    def before(self) -> list[int]:
        """Ranks whose last fragments lie in front of this rank's first one, in order."""
        return [r for r in range(self.rank) if self.meets(r, self.rank)]

    @cached_property
    def after(self) -> list[int]:
        """Ranks whose first fragments lie behind this rank's last one, in order."""
        return [r for r in range(self.rank + 1, self.ranks) if self.meets(self.rank, r)]

    @cached_property
    def parts(self) -> list[Part]:
        """The shard in up to three parts, so that one state goes in and one comes out, however many fragments."""
        shard, last = self.own, len(self.own.cu) - 1
        cuts = sorted({0, 1 if shard.takes else 0, last - 1 if shard.gives else last, last})
        return [
            Part(
                shard.cu[i],
                shard.cu[j],
                offsets([c - shard.cu[i] for c in shard.cu[i : j + 1]]) if j > i + 1 else None,
                shard.takes and i == 0,
                shard.gives and j == last,
            )
            for i, j in pairwise(cuts)
        ]

    @cached_property
    def local_cu(self) -> torch.Tensor:
        """Offsets of this rank's fragments."""
        return offsets(self.own.cu)

    @cached_property
    def whole_cu(self) -> torch.Tensor:
        """Offsets of all sequences."""
        return offsets(self.cu)

    def halo(self, width: int, receiver: int, sender: int) -> tuple[int, int]:
        """Global (begin, end) of the rows of `sender` that the first fragment of `receiver` looks back at."""
        shard = self.shards[receiver]
        low = max(self._sequence(shard.begin)[0], shard.begin - width) if shard.takes else shard.begin
        begin, end = max(low, self.starts[sender]), min(shard.begin, self.starts[sender + 1])
        return (begin, end) if begin < end else (0, 0)

    def groups(self, heads: int) -> list[tuple[int, int]]:
        """Ranges of heads that a chain handles one after the other: while one rank computes a group, the next rank
        computes the group before it. Short shards take fewer, so that calls do not become tiny."""
        count = min(heads, max(self.tokens // self.ranks // GROUP_TOKENS, 1)) if self.straddles else 1
        return shares(heads, count)


def fill_up(x, rows):
    """x [1,T,A,B] with rows of zeros behind its tokens."""
    return x if x.shape[1] == rows else torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows - x.shape[1]))


def offsets(values):
    return torch.tensor(values, dtype=torch.int32)
