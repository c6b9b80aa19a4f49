"""Checks of arguments that the functions of other packages share."""

import torch


def check_tensor(op, name, value):
    if value is not None and not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name}: expected type Tensor, got type {type(value).__name__}")


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
