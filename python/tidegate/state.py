"""States of a model's linear-attention layers as objects: pools, sequences that can roll back, snapshots.

A sequence owns one row of every layer's conv_state and M = drafts + 1 slots of every layer's state. The operators
change them in place; `StatePool.indices` says where. What is counted here is which of the M states is the current one:

    pool.indices([sequence])           the arguments of a call that verifies up to M tokens
    sequence.accept(a)                 a of its tokens became final: the next call starts from there
    pool.settle(sequence)              afterwards a call in the one-slot form (a prompt) may follow
"""

import dataclasses
import json
import os
from collections.abc import Collection

import torch


def _whole(where, name, value, low, high=None):
    """A whole number in a range, or an error that says so."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        span = f"{low} to {high}" if high is not None else f"a whole number >= {low}"
        raise ValueError(f"{where}: {name}: expected {span}, got {value}")


@dataclasses.dataclass
class Sequence:
    """A place in a pool. `accepted` tokens of the last call became final; `tokens` of all calls did."""

    row: int
    slots: list
    accepted: int = 1
    tokens: int = 0

    def accept(self, count: int) -> None:
        """After a call with slots per token: `count` of its tokens became final, at least one."""
        _whole("Sequence.accept", "count", count, 1, len(self.slots))
        self.accepted = count
        self.tokens += count

    def advance(self, count: int) -> None:
        """After a prompt in the one-slot form, or a step of one token: all became final."""
        _whole("Sequence.advance", "count", count, 0)
        self.accepted = 1
        self.tokens += count


@dataclasses.dataclass
class Snapshot:
    """Everything that a sequence remembers after `tokens` tokens: conv [layers,D,W-1], state [layers,HV,K,V]."""

    conv: torch.Tensor
    state: torch.Tensor
    tokens: int
    state_v_first: bool = False


class StatePool:
    """conv_state [rows,D,W-1+drafts] (anchored at its head) and state [slots,HV,K,V] for each of several layers."""

    def __init__(
        self,
        layers: int,
        sequences: int,
        *,
        HK: int,
        HV: int,
        K: int,
        V: int,
        width: int = 4,
        drafts: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
        state_v_first: bool = False,
    ) -> None:
        sizes = {"layers": layers, "sequences": sequences, "HK": HK, "HV": HV, "K": K, "V": V}
        for name, value in sizes.items():
            _whole("StatePool", name, value, 1)
        _whole("StatePool", "width", width, 2, 4)
        _whole("StatePool", "drafts", drafts, 0)
        if HV % HK:
            raise ValueError(f"StatePool: HV: expected a multiple of {HK} (HK), got {HV}")
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"StatePool: state_dtype: expected dtype float32 or bfloat16, got {state_dtype}")
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"StatePool: dtype: expected dtype float32, bfloat16 or float16, got {dtype}")
        channels, self.width, self.depth = 2 * HK * K + HV * V, width, drafts + 1
        self.state_v_first = state_v_first
        # Token-major memory: a step reads and writes neighbouring channels.
        rows = torch.zeros(layers, sequences, width - 1 + drafts, channels, dtype=dtype)
        self.conv = rows.transpose(2, 3)
        shape = (V, K) if state_v_first else (K, V)
        self.state = torch.zeros(layers, sequences * self.depth, HV, *shape, dtype=state_dtype)
        self._free = list(range(sequences))[::-1]
        self._open = {}  # the sequences of this pool by their rows

    def _check_owned(self, method, *sequences):
        for sequence in sequences:
            if self._open.get(sequence.row) is not sequence:
                raise ValueError(
                    f"StatePool.{method}: sequence: expected an open one of this pool, got one with row {sequence.row}"
                )

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(conv_state, state) of a layer, for the operators."""
        return self.conv[index], self.state[index]

    def open(self) -> Sequence:
        """A sequence that remembers nothing."""
        if not self._free:
            raise RuntimeError(f"StatePool.open: expected a free row, got {self.conv.shape[1]} sequences in use")
        row = self._free.pop()
        sequence = Sequence(row, list(range(row * self.depth, (row + 1) * self.depth)))
        self._open[row] = sequence
        self.conv[:, row].zero_()
        for slot in sequence.slots:
            self.state[:, slot].zero_()
        return sequence

    def close(self, sequence: Sequence) -> None:
        """Gives the place back. The sequence must not be used afterwards."""
        self._check_owned("close", sequence)
        del self._open[sequence.row]
        self._free.append(sequence.row)

    def indices(self, sequences: Collection[Sequence], per_token: bool = True) -> dict[str, torch.Tensor]:
        """Arguments of an operator call. per_token: slots for every token, and where to start; else one slot each."""
        self._check_owned("indices", *sequences)
        if per_token:
            slots = torch.tensor([s.slots for s in sequences], dtype=torch.int64).reshape(-1, self.depth)
            accepted = torch.tensor([s.accepted for s in sequences], dtype=torch.int64)
            return {"state_indices": slots, "num_accepted_tokens": accepted}
        for s in sequences:
            if s.accepted != 1:
                raise ValueError(
                    f"StatePool.indices: sequences: expected settled ones, got {s.accepted} accepted tokens"
                )
        return {"state_indices": torch.tensor([s.slots[0] for s in sequences], dtype=torch.int64)}

    def rows(self, sequences: Collection[Sequence]) -> torch.Tensor:
        """Their rows of conv_state."""
        self._check_owned("rows", *sequences)
        return torch.tensor([s.row for s in sequences], dtype=torch.int64)

    def settle(self, sequence: Sequence) -> None:
        """Makes the current state the first one, so that nothing is left to roll back."""
        self._check_owned("settle", sequence)
        a = sequence.accepted - 1
        if a:
            row = self.conv[:, sequence.row]
            row[..., : self.width - 1] = row[..., a : a + self.width - 1].clone()
            sequence.slots[0], sequence.slots[a] = sequence.slots[a], sequence.slots[0]
            sequence.accepted = 1

    def snapshot(self, sequence: Sequence) -> Snapshot:
        """A copy of what the sequence remembers now."""
        self._check_owned("snapshot", sequence)
        a = sequence.accepted - 1
        conv = self.conv[:, sequence.row, :, a : a + self.width - 1]
        state = self.state[:, sequence.slots[a]].clone()
        return Snapshot(conv.clone(), state, sequence.tokens, self.state_v_first)

    def restore(self, snapshot: Snapshot, sequence: Sequence) -> None:
        """The sequence goes on as the snapshot's one would have, bit for bit."""
        self._check_owned("restore", sequence)
        conv, state = self.conv[:, sequence.row, :, : self.width - 1], self.state[:, sequence.slots[0]]
        if snapshot.state_v_first != self.state_v_first:
            state = state.mT
        for name, given, place in (("conv", snapshot.conv, conv), ("state", snapshot.state, state)):
            if given.shape != place.shape or given.dtype != place.dtype:
                expected, got = (f"{list(t.shape)} of {t.dtype}" for t in (place, given))
                raise ValueError(f"StatePool.restore: snapshot.{name}: expected {expected}, got {got}")
        conv.copy_(snapshot.conv)
        state.copy_(snapshot.state)
        sequence.accepted, sequence.tokens = 1, snapshot.tokens

    def copy(self, source: Sequence, target: Sequence) -> None:
        """target goes on where source is now."""
        self._check_owned("copy", source, target)
        if source.row == target.row:
            raise ValueError(f"StatePool.copy: target: expected another sequence, got row {source.row} twice")
        a = source.accepted - 1
        self.conv[:, target.row, :, : self.width - 1] = self.conv[:, source.row, :, a : a + self.width - 1]
        self.state[:, target.slots[0]] = self.state[:, source.slots[a]]
        target.accepted, target.tokens = 1, source.tokens

    def fork(self, source: Sequence) -> Sequence:
        """A new sequence that goes on where source is now."""
        self._check_owned("fork", source)
        target = self.open()
        self.copy(source, target)
        return target


SNAPSHOTS = "tidegate.snapshots"  # where a file says what it holds


def save_snapshots(path: str | os.PathLike[str], snapshots: dict[str, Snapshot]) -> None:
    """Writes a dict of snapshots, by names, as one safetensors file."""
    from safetensors.torch import save_file

    parts = [(name, s, part) for name, s in snapshots.items() for part in ("conv", "state")]
    # Clones: one snapshot may stand under two names, and safetensors wants memory of its own for each.
    tensors = {
        f"{name}.{part}": getattr(s, part).clone(memory_format=torch.contiguous_format) for name, s, part in parts
    }
    about = {str(name): {"tokens": s.tokens, "state_v_first": s.state_v_first} for name, s in snapshots.items()}
    save_file(tensors, path, metadata={SNAPSHOTS: json.dumps(about)})


def load_snapshots(path: str | os.PathLike[str]) -> dict[str, Snapshot]:
    """The dict of snapshots that save_snapshots wrote."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        about = (file.metadata() or {}).get(SNAPSHOTS)
        if about is None:
            raise ValueError(f"load_snapshots: path: expected a file of save_snapshots, got {path}")
        return {
            name: Snapshot(file.get_tensor(f"{name}.conv"), file.get_tensor(f"{name}.state"), **facts)
            for name, facts in json.loads(about).items()
        }
