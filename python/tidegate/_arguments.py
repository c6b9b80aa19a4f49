"""Checks of arguments that the functions of other packages share."""

import torch


def check_tensor(op, name, value):
    if value is not None and not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name}: expected type Tensor, got type {type(value).__name__}")


def require_tensors(op, **tensors):
    for name, value in tensors.items():
        if value is None:
            raise ValueError(f"{op}: {name}: expected a tensor, got none")
        check_tensor(op, name, value)


def check_like(op, name, value, shape, like, like_name):
    """A tensor of a shape, on the device of another one."""
    check_tensor(op, name, value)
    if value.shape != shape:
        raise ValueError(f"{op}: {name}: expected shape {list(shape)}, got {list(value.shape)}")
    if value.device != like.device:
        raise ValueError(f"{op}: {name}: expected device {like.device} (as {like_name}), got {value.device}")


def check_residual(op, residual, x):
    if residual is not None:
        check_like(op, "residual", residual, x.shape, x, "x")
        check_float(op, "residual", residual.dtype)


def check_float(op, name, dtype):
    if not dtype.is_floating_point:
        raise TypeError(f"{op}: {name}: expected a floating dtype, got dtype {dtype}")


def _span(t):
    reach = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (reach + 1) * t.element_size()


def check_own_memory(op, name, out, **inputs):
    """An output that is written after the operator has run lies nowhere in the range of an input."""
    if torch.compiler.is_compiling() or out.numel() == 0:
        return
    first, last = _span(out)
    for other, t in inputs.items():
        if t is not None and t.numel() > 0 and first < _span(t)[1] and _span(t)[0] < last:
            raise ValueError(f"{op}: {name}: expected memory of its own, got an overlap with {other}")
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"{op}: {name}: expected memory for every element, got stride 0 in {list(out.stride())}")


def one_autocast_dtype(*tensors):
    """Under autocast some of q, k, v may have gone through a layer that narrows and some not."""
    if torch.is_autocast_enabled("cpu") and len({t.dtype for t in tensors}) > 1:
        return tuple(t.to(torch.get_autocast_dtype("cpu")) for t in tensors)
    return tensors


def _require(condition, text):
    """Raises, in a compiled graph when it runs."""
    if torch.compiler.is_compiling():
        torch._assert_async(condition, text)
    elif not condition:
        raise ValueError(text)


def boundaries(op, cu_seqlens, cu_seqlens_cpu):
    """cu_seqlens; a copy given with it must be equal. A copy alone has no meaning, as in FLA."""
    check_tensor(op, "cu_seqlens", cu_seqlens)
    check_tensor(op, "cu_seqlens_cpu", cu_seqlens_cpu)
    if cu_seqlens is None or cu_seqlens_cpu is None:
        return cu_seqlens
    if cu_seqlens.shape != cu_seqlens_cpu.shape:
        expected, got = list(cu_seqlens.shape), list(cu_seqlens_cpu.shape)
        raise ValueError(f"{op}: cu_seqlens_cpu: expected shape {expected} (as cu_seqlens), got {got}")
    equal = (cu_seqlens == cu_seqlens_cpu).all()
    _require(equal, f"{op}: cu_seqlens_cpu: expected the values of cu_seqlens, got others")
    return cu_seqlens


def _is_chunk_list(rows, lengths, size):
    """True if rows are (sequence, chunk) for all chunks of so many tokens, in order. A tensor, so that it compiles."""
    counts = (lengths + size - 1) // size
    sequence, chunk = rows.unbind(1)
    known = (sequence >= 0) & (sequence < lengths.shape[0])
    sequence = sequence.clamp(0, lengths.shape[0] - 1)
    place = counts.cumsum(0)[sequence] - counts[sequence] + chunk
    in_order = known & (chunk >= 0) & (chunk < counts[sequence])
    in_order &= place == torch.arange(rows.shape[0], device=rows.device)
    return in_order.all() & (counts.sum() == rows.shape[0])


def check_chunk_indices(op, chunk_indices, cu_seqlens, sizes=(16, 32, 64, 128)):
    """Chunk lists are made inside; a given one must be the canonical list of one of these chunk sizes."""
    check_tensor(op, "chunk_indices", chunk_indices)
    if chunk_indices is None:
        return
    if cu_seqlens is None:
        raise ValueError(f"{op}: chunk_indices: expected none without cu_seqlens, got a list")
    if chunk_indices.dim() != 2 or chunk_indices.shape[1] != 2:
        raise ValueError(f"{op}: chunk_indices: expected shape [chunks, 2], got {list(chunk_indices.shape)}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        return  # the operator has more to say about these
    rows, lengths = chunk_indices.long(), cu_seqlens.long().diff()
    found = torch.stack([_is_chunk_list(rows, lengths, size) for size in sizes]).any()
    _require(found, f"{op}: chunk_indices: expected the chunk list of cu_seqlens, got another one")
