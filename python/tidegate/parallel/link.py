"""A process group that counts what goes through it. Tensors travel as bytes: gloo does not know every type."""

import os
from typing import NamedTuple

import torch
import torch.distributed as dist


class Traffic(NamedTuple):
    """Of one purpose: calls, bytes that this rank handed over, bytes that left it (a copy for every receiver)."""

    calls: int = 0
    payload: int = 0
    sent: int = 0


def _bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


class Link:
    """The ranks that share a row of tokens. `traffic` maps the purpose of a message to its Traffic."""

    def __init__(self, group):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.traffic = {}

    def _count(self, purpose, payload, sent):
        calls, before, left = self.traffic.get(purpose, Traffic())
        self.traffic[purpose] = Traffic(calls + 1, before + payload, left + sent)

    def all_gather(self, tensor, purpose):
        """The tensors of all ranks, which have one shape and type, stacked."""
        tensor = tensor.contiguous()
        out = tensor.new_empty(self.size, *tensor.shape)
        self._count(purpose, tensor.nbytes, tensor.nbytes * (self.size - 1))
        if tensor.numel():
            dist.all_gather(list(_bytes(out).chunk(self.size)), _bytes(tensor), group=self.group)
        return out

    def all_to_all(self, buffer, sends, receives, purpose):
        """buffer: sends[r] elements for every rank r, one after the other. Returns receives[r] elements of each."""
        size = buffer.element_size()
        out = buffer.new_empty(sum(receives))
        mine = sends[self.rank]
        self._count(purpose, (sum(sends) - mine) * size, (sum(sends) - mine) * size)
        scaled = [[n * size for n in counts] for counts in (receives, sends)]
        dist.all_to_all_single(_bytes(out), _bytes(buffer), *scaled, group=self.group)
        return out

    def send(self, tensor, to, purpose, tag=0):
        """Starts to send; the caller keeps what is returned and calls wait()."""
        tensor = tensor.contiguous()
        self._count(purpose, tensor.nbytes, tensor.nbytes)
        return _Pending(dist.isend(_bytes(tensor), dist.get_global_rank(self.group, to), self.group, tag), tensor)

    def receive(self, tensor, source, tag=0):
        """Starts to fill a contiguous tensor; wait() returns it."""
        return _Pending(dist.irecv(_bytes(tensor), dist.get_global_rank(self.group, source), self.group, tag), tensor)

    def sum(self, tensor, purpose, op=dist.ReduceOp.SUM):
        """The sum (or another reduction) over all ranks, in place."""
        self._count(purpose, tensor.nbytes, tensor.nbytes)
        dist.all_reduce(tensor, op=op, group=self.group)
        return tensor


class _Pending:
    def __init__(self, work, tensor):
        self._work, self._tensor = work, tensor

    def wait(self):
        self._work.wait()
        return self._tensor


def group_of(group_or_mesh):
    """The process group that a user means, or None: there is nothing to share."""
    if not dist.is_available() or not dist.is_initialized():
        if group_or_mesh is not None:
            raise ValueError(
                "sequence_parallel: group_or_mesh: expected None before torch.distributed.init_process_group, got "
                f"{type(group_or_mesh).__name__}"
            )
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # a launcher has started several: one alone is a mistake
            raise ValueError(
                f"sequence_parallel: WORLD_SIZE is {os.environ['WORLD_SIZE']}, but there is no process group: call "
                "torch.distributed.init_process_group first"
            )
        return None
    if group_or_mesh is None:
        return dist.group.WORLD
    if hasattr(group_or_mesh, "get_group"):  # a DeviceMesh
        if group_or_mesh.ndim != 1:
            names = group_or_mesh.mesh_dim_names
            raise ValueError(
                f"sequence_parallel: mesh: expected 1 dimension, got {group_or_mesh.ndim} ({names}): pass mesh[name]"
            )
        return group_or_mesh.get_group()
    if not isinstance(group_or_mesh, dist.ProcessGroup):
        raise TypeError(
            "sequence_parallel: group_or_mesh: expected a ProcessGroup or a DeviceMesh, got "
            f"{type(group_or_mesh).__name__}"
        )
    return group_or_mesh
