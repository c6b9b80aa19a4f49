"""Arguments, checked before anything travels: all of calls between nodes, and those of experts."""

import torch

from tidegate.ep.agreement import FLOATS


def _check_shape(op, name, tensor, *expected):
    if list(tensor.shape) not in [list(shape) for shape in expected]:
        shapes = " or ".join(str(list(shape)) for shape in expected)
        raise ValueError(f"{op}: {name}: expected shape {shapes}, got {list(tensor.shape)}")


def _check_dtype(op, name, tensor, *expected):
    if tensor.dtype not in expected:
        raise TypeError(f"{op}: {name}: expected dtype in {expected}, got dtype {tensor.dtype}")


def _check_tensor(op, name, tensor):
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{op}: {name}: expected a tensor on cpu, got one on {tensor.device}")


def _check_rows(op, name, tensor, row_bytes, floats=FLOATS):
    if tensor.dim() != 2:
        raise ValueError(f"{op}: {name}: expected 2 dimensions, got {tensor.dim()}")
    _check_dtype(op, name, tensor, *floats)
    if tensor.shape[1] * tensor.element_size() > row_bytes:
        raise ValueError(
            f"{op}: {name}: expected rows of at most {row_bytes} bytes (row_bytes of the buffer), "
            f"got {tensor.shape[1] * tensor.element_size()}"
        )


def _check_weights(op, weights, shape):
    if weights is not None:
        _check_shape(op, "weights", weights, shape)
        _check_dtype(op, "weights", weights, *FLOATS)


def _check_open(op, buffer):
    if not buffer.is_open:
        raise ValueError(f"{op}: buffer: expected an open one, got one that was closed")


def _check_handle(op, buffer, handle):
    _check_open(op, buffer)
    if handle.buffer is not buffer:
        raise ValueError(f"{op}: handle: expected one of this buffer, got one of another")
    if handle.life != buffer.life:
        raise ValueError(f"{op}: handle: expected one of a dispatch after the last reset, got one from before")


def check_buffer(ranks, experts, slots, row_bytes, max_tokens, expert_begin, combine, timeout=60.0, name="moe", **rest):
    """What all ranks must say alike when they make a buffer."""
    op = "ep_nodes"
    if combine not in ("exact", "fast"):
        raise ValueError(f"{op}: combine: expected exact or fast, got {combine}")
    if any(rest.values()):
        raise ValueError(f"{op}: {', '.join(rest)}: expected none between nodes, got {list(rest.values())}")
    if not timeout > 0:
        raise ValueError(f"{op}: timeout: expected more than 0, got {timeout}")
    least = {"experts": 1, "slots": 1, "row_bytes": 1, "max_tokens": 0}
    for (name, smallest), value in zip(least.items(), (experts, slots, row_bytes, max_tokens), strict=True):
        if not isinstance(value, int) or value < smallest:
            raise ValueError(f"{op}: {name}: expected an integer of at least {smallest}, got {value!r}")
    if len(expert_begin) != ranks + 1:
        raise ValueError(f"{op}: expert_begin: expected {ranks + 1} numbers, got {len(expert_begin)}")
    if expert_begin != sorted(expert_begin) or (expert_begin[0], expert_begin[-1]) != (0, experts):
        raise ValueError(
            f"{op}: expert_begin: expected numbers that do not decrease from 0 to {experts}, got {expert_begin}"
        )


def check_experts(buffer, x, ids, weights, gate_up, down):
    """Weights of experts, before rows travel for which a rank could have none."""
    op = "ep_experts"
    _check_open(op, buffer)
    named = {"x": x, "ids": ids, "weights": weights, "gate_up": gate_up, "down": down}
    for name, tensor in named.items():
        _check_tensor(op, name, tensor)
    for name in ("gate_up", "down"):
        if named[name].dim() != 3 or len(named[name]) != buffer.local_experts:
            raise ValueError(
                f"{op}: {name}: expected 3 dimensions, the first of size {buffer.local_experts} (experts of this "
                f"rank), got {list(named[name].shape)}"
            )


def check_dispatch(buffer, x, ids, weights, mask, int8, smooth_scale):
    op = "ep_dispatch"
    _check_open(op, buffer)
    named = {"weights": weights, "mask": mask, "smooth_scale": smooth_scale}
    for name, tensor in {"x": x, "ids": ids, **{n: t for n, t in named.items() if t is not None}}.items():
        _check_tensor(op, name, tensor)
    _check_rows(op, "x", x, buffer.row_bytes, FLOATS[: 3 if int8 else 4])
    if len(x) > buffer.max_tokens:
        raise ValueError(
            f"{op}: x: expected at most {buffer.max_tokens} tokens (max_tokens of the buffer), got {len(x)}"
        )
    if ids.dim() != 2 or len(ids) != len(x):
        raise ValueError(f"{op}: ids: expected shape [{len(x)}, slots], got {list(ids.shape)}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: ids: expected dtype int32 or int64, got dtype {ids.dtype}")
    if not 1 <= ids.shape[1] <= buffer.slots:
        raise ValueError(f"{op}: ids: expected 1 to {buffer.slots} slots (slots of the buffer), got {ids.shape[1]}")
    _check_weights(op, weights, ids.shape)
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"{op}: mask: expected dtype bool, got dtype {mask.dtype}")
    if mask is not None:
        _check_shape(op, "mask", mask, ids.shape[:1], ids.shape)
    if smooth_scale is not None and not int8:
        raise ValueError(f"{op}: smooth_scale: expected none without int8, got a tensor")
    if smooth_scale is not None:
        _check_shape(op, "smooth_scale", smooth_scale, [buffer.experts, x.shape[1]])
        _check_dtype(op, "smooth_scale", smooth_scale, torch.float32)


def check_static_shape(buffer, ids):
    """Pairs of a token on one rank are at most as many as that rank's experts."""
    begin = torch.tensor(buffer.expert_begin)
    most = begin.diff()
    owner = torch.bucketize(ids.long(), begin[1:], right=True)
    pairs = torch.zeros(len(ids), buffer.ranks, dtype=torch.int64).scatter_add_(1, owner, (ids >= 0).long())
    for token, rank in (pairs > most).nonzero().tolist()[:1]:
        raise ValueError(
            f"ep_dispatch: ids: expected at most {most[rank]} experts of rank {rank} in a token (static_shape), "
            f"got {pairs[token, rank]} in token {token}"
        )


def check_redispatch(buffer, x, handle):
    op = "ep_dispatch"
    _check_handle(op, buffer, handle)
    _check_tensor(op, "x", x)
    _check_rows(op, "x", x, buffer.row_bytes)
    _check_shape(op, "x", x, [handle.tokens, x.shape[1]])


def check_combine(buffer, y, handle, weighted, weights, shared_x, row_values):
    op = "ep_combine"
    _check_handle(op, buffer, handle)
    named = {"y": y, "weights": weights, "shared_x": shared_x, "row_values": row_values}
    for name, tensor in named.items():
        if tensor is not None:
            _check_tensor(op, name, tensor)
    if weights is not None and buffer.mode == "fast":
        raise ValueError(f"{op}: weights: expected none in fast mode, got a tensor; give them to dispatch")
    if weights is not None and not weighted:
        raise ValueError(f"{op}: weights: expected none in a plain sum, got a tensor")
    _check_weights(op, weights, handle.pair_rank.shape)
    if y is not None:
        _check_rows(op, "y", y, buffer.row_bytes)
        _check_shape(op, "y", y, [handle.shape_rows, y.shape[1]])
        if shared_x is not None:
            _check_shape(op, "shared_x", shared_x, [handle.tokens, y.shape[1]])
            _check_dtype(op, "shared_x", shared_x, y.dtype)
    if row_values is not None:
        _check_shape(op, "row_values", row_values, [handle.shape_rows])
        _check_dtype(op, "row_values", row_values, torch.float32)
