"""Checks of arguments that the functions of other packages share."""

import torch


def boundaries(op, cu_seqlens, cu_seqlens_cpu):
    """The one given; two given must be equal."""
    if cu_seqlens is None or cu_seqlens_cpu is None:
        return cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    if not torch.compiler.is_compiling() and cu_seqlens.tolist() != cu_seqlens_cpu.tolist():
        raise ValueError(f"{op}: cu_seqlens_cpu: expected {cu_seqlens.tolist()}, got {cu_seqlens_cpu.tolist()}")
    return cu_seqlens_cpu


def check_chunk_indices(op, chunk_indices, cu_seqlens, sizes=(16, 32, 64, 128)):
    """Chunk lists are made inside; a given one must be the canonical list of one of these chunk sizes."""
    if chunk_indices is None:
        return
    lengths = cu_seqlens.diff().tolist() if cu_seqlens is not None else []
    given = chunk_indices.tolist()
    for size in sizes:
        if given == [[n, c] for n, length in enumerate(lengths) for c in range(-(-length // size))]:
            return
    raise ValueError(f"{op}: chunk_indices: expected the chunk list of cu_seqlens, got another one")
