"""A group of processes with windows of shared memory. The work is done in C++ (include/tidegate/ep.h)."""

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tidegate import _native, options
from tidegate.ep.agreement import gather_facts
from tidegate.errors import ExpertParallelError


def _ops():
    _native.require()
    if _native.fallback is not None:
        raise RuntimeError(f"tidegate.ep: expert parallelism needs the native library: {_native.fallback}")
    return torch.ops.tidegate_ep


def call(name, *args):
    """An operator of the native library. A failed check arrives as ValueError or TypeError, as everywhere; what another
    rank did, or did not do, as ExpertParallelError."""
    try:
        return getattr(_ops(), name)(*args)
    except _native.NATIVE_ERRORS as error:
        line = str(error).split("\n", 1)[0]
        translated = None if ": group " in line else _native._translate(error)
        raise translated or ExpertParallelError(line) from None


def node_id(configured: str | None = None) -> str:
    """The node that this process runs on: as configured, or TIDEGATE_NODE_ID, or host name and boot id."""
    return call("node_id", configured or options.environment("node_id") or "")


def group_of(group):
    """The process group of a group, a one-dimensional DeviceMesh or None (all processes; None if there is only one)."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"ep: mesh: expected 1 dimension, got {group.ndim} ({group.mesh_dim_names}); pass mesh['ep']"
            )
        return group.get_group()
    if group is None and dist.is_initialized():
        return dist.group.WORLD
    return group


class Handle:
    """What a dispatch leaves behind: where every pair (token, slot) went, and where every received row came from."""

    # Those of rows are as long as what expand gives; with static_shape their ends are -1, and 0 in row_weights.
    FIELDS = (
        "expert_rows",  # int64 [local experts]: rows of each, in their order
        "row_expert",  # int32 [rows,1]: the local expert of every row
        "row_weights",  # fp32 [rows,1]: the routing weight of every row (1 if none were given)
        "row_rank",  # int32 [rows]: the rank that it came from
        "row_pair",  # int32 [rows]: token * K + slot there
        "rank",  # int32 [T,K]: the rank that holds the expert of a pair, -1 if it did not travel
        "place",  # int32 [T,K]: the row there
        "source_tokens",  # int64 [ranks]
        "ids",  # int32 [T,K]: those given to dispatch, -1 where a mask said so
    )

    def __init__(
        self, number: int, rows: int, shape_rows: int, width: int, dtype: torch.dtype, weights: torch.Tensor | None
    ) -> None:
        self.number, self.width, self.dtype = number, width, dtype
        self.rows, self.shape_rows = rows, shape_rows  # that came, and of a tensor of them: more with static_shape
        self.weights = weights  # the routing weights given to dispatch, for their gradient
        self.smooth_scale = None
        self._free = weakref.finalize(self, torch.ops.tidegate_ep.free_handle, number)

    def __getattr__(self, name):  # tensors are made when they are asked for: decoding needs none of them
        if name not in Handle.FIELDS:
            raise AttributeError(f"Handle has no attribute {name!r}")
        self.__dict__.update(zip(Handle.FIELDS, call("describe", self.number), strict=True))
        return self.__dict__[name]


class Buffer:
    """The windows of a group. Making one is collective, and so is every call that takes one.

    group: a ProcessGroup, a one-dimensional DeviceMesh, or None for all processes. experts: of all ranks; rank r holds
    those from expert_begin[r] to expert_begin[r + 1] (default: even shares). slots: largest top-k. row_bytes: of the
    widest row (hidden size times bytes of an element). max_tokens: largest number of tokens of a rank in one call; it
    costs address space, memory is taken as it is used. timeout: seconds before a wait for another rank fails.
    """

    def __init__(
        self,
        group: "dist.ProcessGroup | DeviceMesh | None" = None,
        *,
        experts: int,
        slots: int,
        row_bytes: int,
        max_tokens: int,
        expert_begin: Sequence[int] | None = None,
        zero_experts: int = 0,
        copy_experts: int = 0,
        const_experts: int = 0,
        name: str = "moe",
        timeout: float = 60.0,
        node_id: str | None = None,
    ) -> None:
        self.group = group_of(group)
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self.ranks = 1 if self.group is None else dist.get_world_size(self.group)
        self.experts, self.slots, self.row_bytes, self.max_tokens = experts, slots, row_bytes, max_tokens
        self.zero_experts, self.copy_experts, self.const_experts = zero_experts, copy_experts, const_experts
        even = [r * experts // self.ranks for r in range(self.ranks + 1)] if isinstance(experts, int) else []
        self.expert_begin = even if expert_begin is None else list(expert_begin)
        numbers = [experts, slots, max_tokens, row_bytes, zero_experts, copy_experts, const_experts]
        node = node_id or options.environment("node_id") or ""
        self._arguments = ([*numbers, self.rank, self.ranks], self.expert_begin, name, timeout, node)
        self.number = None
        self._open()

    def _open(self):
        def address():
            self.number = call("open", *self._arguments)
            self._close = weakref.finalize(self, torch.ops.tidegate_ep.close, self.number)
            return call("address", self.number)

        found = [address()] if self.group is None else gather_facts("ep_buffer", self.group, {}, address)
        call("connect", self.number, torch.stack(found))

    @property
    def local_experts(self) -> int:
        """How many experts this rank holds."""
        return self.expert_begin[self.rank + 1] - self.expert_begin[self.rank]

    @property
    def is_open(self) -> bool:
        """Whether it has windows: not after close()."""
        return self._close.alive

    @property
    def window_bytes(self) -> int:
        """Address space of one rank's window."""
        return call("window_bytes", self.number)

    @property
    def waited_microseconds(self) -> torch.Tensor:
        """int64 [ranks]: time spent waiting for each of them."""
        return call("waited", self.number)

    def close(self) -> None:
        """Gives the windows back; harmless when repeated."""
        self._close()

    def reset(self) -> None:
        """Collective, after a failure: new windows. Handles from before do not work any more."""
        self._close()
        self._open()

    # The exchanges without gradients; functions.py has them with.

    def dispatch(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        int8: bool = False,
        needs_backward: bool = False,
        x_scale: torch.Tensor | None = None,
        smooth_scale: torch.Tensor | None = None,
        static_shape: bool = False,
        static_tokens: int = 0,
    ) -> Handle:
        """Sends tokens to the ranks of their experts, as the function dispatch does; expand has the rows that came.

        int8: rows travel as int8 with one scale a token; with x_scale fp32 [T] x is int8 already. With smooth_scale
        fp32 [experts,H] rows travel as they are, and expand quantises each times the factors of its expert.
        static_tokens: with static_shape, tokens of all ranks if there are more than those of this buffer."""
        options = (int8, needs_backward, x_scale, smooth_scale, static_shape, static_tokens)
        number, *rows = call("dispatch", self.number, x, ids, weights, mask, *options)
        handle = Handle(number, *rows, x.shape[1], torch.int8 if int8 else x.dtype, weights)
        handle.smooth_scale = smooth_scale
        return handle

    def redispatch(self, x: torch.Tensor, handle: Handle) -> torch.Tensor:
        """Other rows along the way of a handle: [shape_rows,H]."""
        call("redispatch", self.number, x, handle.number)
        return call("expand", self.number, handle.number, x.shape[1], x.dtype, None)[0]

    def window(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the window, [rows,width]: y that was written here is not copied by the next combine. It lives no
        longer than the next dispatch or combine."""
        view = call("window", self.number, rows, width, dtype)
        view._ep_buffer = self  # the memory must not go before the view
        return view

    def expand(
        self, handle: Handle, out: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The rows that the last dispatch brought: [shape_rows,H]; of an int8 dispatch (rows, scales)."""
        if out is not None:
            call("expand_out", self.number, handle.number, out)
            return out
        rows, scales = call("expand", self.number, handle.number, handle.width, handle.dtype, handle.smooth_scale)
        return (rows, scales) if handle.dtype == torch.int8 else rows

    def combine(
        self,
        y: torch.Tensor | None,
        handle: Handle,
        weighted: bool = True,
        weights: torch.Tensor | None = None,
        shared_x: torch.Tensor | None = None,
        row_values: torch.Tensor | None = None,
        ori_x: torch.Tensor | None = None,
        alpha1: torch.Tensor | None = None,
        alpha2: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        needs_backward: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [T,H], pair_values [T,K]); the second is empty without row_values."""
        tensors = (weights, shared_x, row_values, ori_x, alpha1, alpha2, v)
        return call("combine", self.number, y, handle.number, weighted, *tensors, needs_backward)

    def collect(self, y: torch.Tensor, handle: Handle) -> torch.Tensor:
        """The rows of y by pair, unsummed: [T*K,H]."""
        return call("collect", self.number, y, handle.number)
