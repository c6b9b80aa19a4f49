"""Which experts a model chose, to choose them again: a trainer must use the experts of the rollout."""

import contextlib
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from tidegate.errors import ReplayError


class Choice(NamedTuple):
    """The experts of one call of a layer: ids int32 [tokens, slots], and a hash of them."""

    ids: torch.Tensor
    digest: int


def _digest(tensor):
    data = tensor.detach().contiguous().view(torch.uint8).numpy()
    return int.from_bytes(hashlib.blake2b(data.tobytes(), digest_size=8).digest(), "little")


def _is_choice(ids):
    return isinstance(ids, torch.Tensor) and ids.dtype == torch.int32 and ids.dim() == 2


def _kind(value):
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def in_backward() -> bool:
    """Whether a layer is being computed again for its gradient (checkpointing)."""
    return torch._C._current_graph_task_id() != -1


class RouterRecorder:
    """Records and replays the choices of a patched model's routers, one list of choices a layer.

    with recorder.recording(): model(...)      # adds to what there is; clear() begins anew
    with recorder.replaying(): model(...)      # the same calls again; weights and gradients are the present ones

    Replay raises ReplayError for another shape, changed ids, a missing or a left-over choice.
    Layers that are computed again during a backward (gradient checkpointing), inside the context or after it, get the
    choice of their forward: it is found by the logits, which have the same bits.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        from tidegate.patch.engine import existing_handle
        from tidegate.patch.resolve import core

        handle = existing_handle(core(model))
        sites = [] if handle is None else [site for site in handle.installed if site.op == "router"]
        if not sites:
            raise ValueError('RouterRecorder: model: expected routers under tidegate.patch (op "router"), got none')
        self._sites = sites
        self._replay = False
        self.choices = {site.path: [] for site in sites}
        self._next = dict.fromkeys(self.choices, 0)  # which choice a layer comes to
        self._replayed = {path: {} for path in self.choices}  # of the last replay, by the digest of the logits

    def clear(self) -> None:
        """Forgets everything."""
        self.choices = {path: [] for path in self.choices}

    def state_dict(self) -> dict[str, list[torch.Tensor]]:
        """The ids of all calls, by layer."""
        return {path: [choice.ids for choice in list_] for path, list_ in self.choices.items()}

    def load_state_dict(self, state: dict[str, list[torch.Tensor]]) -> None:
        """What state_dict gave, of a model with the same layers."""
        if not isinstance(state, dict) or state.keys() != self.choices.keys():
            got = list(state) if isinstance(state, dict) else type(state).__name__
            raise ReplayError(f"RouterRecorder: state: expected layers {list(self.choices)}, got {got}")
        for path, calls in state.items():
            if not isinstance(calls, (list, tuple)) or not all(map(_is_choice, calls)):
                got = [_kind(ids) for ids in calls] if isinstance(calls, (list, tuple)) else _kind(calls)
                raise ReplayError(
                    f"RouterRecorder: state[{path!r}]: expected a list of int32 tensors [tokens, slots], got {got}"
                )
        self.choices = {path: [Choice(ids, _digest(ids)) for ids in list_] for path, list_ in state.items()}

    @contextlib.contextmanager
    def _attached(self, replay):
        for site in self._sites:
            if site.recorder is not None:
                raise ReplayError(f"RouterRecorder: {site.path}: expected one recorder at a time, got two")
        self._replay, self._next = replay, dict.fromkeys(self.choices, 0)
        self._replayed = {path: {} for path in self.choices}
        for site in self._sites:
            site.recorder, site.replayed = self, self if replay else None
        try:
            yield self
        finally:
            for site in self._sites:
                site.recorder = None

    def recording(self) -> contextlib.AbstractContextManager["RouterRecorder"]:
        """A context in which choices are kept."""
        return self._attached(False)

    @contextlib.contextmanager
    def replaying(self) -> Iterator["RouterRecorder"]:
        """A context in which the recorded choices are made again, all of them."""
        with self._attached(True):
            yield self
        for path, done in self._next.items():
            if done != len(self.choices[path]):
                raise ReplayError(f"{path}: expected {len(self.choices[path])} calls as recorded, got {done}")

    def chosen(self, path: str, logits: torch.Tensor, slots: int) -> torch.Tensor | None:
        """For the router: the ids that it must take, or None."""
        if in_backward():
            return self._chosen_before(path, logits)
        if not self._replay:
            return None
        list_, step, tokens = self.choices[path], self._next[path], logits.shape[0]
        if step >= len(list_):
            raise ReplayError(f"{path}: expected {len(list_)} calls as recorded, got one more")
        choice = list_[step]
        if choice.ids.shape != (tokens, slots):
            got = f"{tokens} tokens and {slots} slots"
            raise ReplayError(f"{path}, call {step}: expected {list(choice.ids.shape)} as recorded, got {got}")
        if _digest(choice.ids) != choice.digest:
            raise ReplayError(f"{path}, call {step}: expected ids as recorded, got changed ones")
        self._next[path] += 1
        self._replayed[path].setdefault(_digest(logits), {})[choice.digest] = choice.ids
        return choice.ids

    def _chosen_before(self, path, logits):
        """The choice of the replayed call with these logits; None for a call that was free: it is free again."""
        found = list(self._replayed[path].get(_digest(logits), {}).values())
        if len(found) > 1:
            raise ReplayError(
                f"{path}: expected other logits in calls with other experts, to tell them apart in backward"
            )
        return found[0] if found else None

    def keep(self, path: str, ids: torch.Tensor) -> None:
        """For the router: what it has chosen."""
        if not self._replay and not in_backward():
            ids = ids.detach().clone()
            self.choices[path].append(Choice(ids, _digest(ids)))
